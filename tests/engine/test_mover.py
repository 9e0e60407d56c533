"""The mover on threads: large inner-dim boxes, many small ones, conversion of dtypes, boxes nobody holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import distributed

from nereus.core import (
    EMU,
    Box,
    Cut,
    Kind,
    Layout,
    ModelStage,
    Move,
    NereusError,
    OutOfMemoryError,
    Stage,
    StateSchema,
    TensorSpec,
    TransportError,
    Where,
)
from nereus.engine import exchange as exchange_module
from nereus.engine.exchange import Exchange
from nereus.engine.groups import Group, GroupRegistry
from nereus.engine.ledger import Hold, Ledger
from nereus.engine.messages import Part
from nereus.engine.mover import Mover, Prepared, Traffic
from nereus.engine.positions import Position, Positions
from nereus.engine.transports.torch import Torch
from nereus.transition.buckets import bucket_bytes

ACTOR = ModelStage("actor", Stage.TRAINING)
ROWS = TensorSpec("rows", (300, 500), Where.FIRST, cut=Cut(0, 2))
COLUMNS = TensorSpec("columns", (300, 500), Where.FIRST, cut=Cut(1, 2))
SMALL = tuple(TensorSpec(f"small{i}", (7,), Where.FIRST) for i in range(40))
SCALAR = TensorSpec("scalar", (), Where.FIRST)
TENSORS = (ROWS, COLUMNS, SCALAR, *SMALL)


def schema(dtype: str) -> StateSchema:
    return StateSchema(0, TENSORS, {Kind.PARAM: dtype})


def logical(tensor: TensorSpec) -> torch.Tensor:
    return (torch.arange(tensor.elements, dtype=torch.float32) % 251 + len(tensor.name)).reshape(tensor.shape)


def moves(item_bytes: int) -> list[Move]:
    """Device 0 holds everything and sends device 1 what it holds as tp rank 1."""
    found = []
    for tensor in TENSORS:
        start, stop = tensor.interval(2, 1)
        size = torch.empty(tensor.shape or (1,)).narrow(tensor.cut.dim or 0, start, stop - start).numel() * item_bytes
        found.append(Move(tensor.name, Kind.PARAM, Box(tensor.cut.dim or 0, start, stop), 0, (1,), size))
    return found


@pytest.mark.parametrize(("target", "item_bytes"), [("fp32", 4), ("bf16", 2)])
def test_boxes_arrive_in_place_and_in_the_dtype_of_the_target(target: str, item_bytes: int) -> None:
    store = distributed.HashStore()

    def run(device: int) -> tuple[Position, Traffic, int, int]:
        registry = GroupRegistry(store, device, 20)
        ledger = Ledger(device)
        positions = Positions(device, ledger, torch.device("cpu"))
        unit = EMU(ACTOR, Layout(), (0,)) if device == 0 else EMU(ACTOR, Layout(2), (9, 1))
        position = positions.create(unit, schema("fp32" if device == 0 else target))
        if device == 0:
            for tensor in TENSORS:
                position.tensors[tensor.name, Kind.PARAM].copy_(logical(tensor))
        stored = ledger.used_bytes
        mover = Mover(device, TENSORS, {Kind.PARAM: target}, Torch(registry.make("sync#1", (0, 1)), 20), ledger)
        traffic = mover.run(moves(item_bytes), lambda _: position, lambda _: position)
        registry.drop_all()
        assert ledger.used_bytes == stored
        return position, traffic, stored, ledger.peak_bytes

    with ThreadPoolExecutor(2) as pool:
        sender, receiver = list(pool.map(run, (0, 1)))
    for tensor in TENSORS:
        start, stop = tensor.interval(2, 1)
        whole = logical(tensor)
        wanted = whole.narrow(tensor.cut.dim or 0, start, stop - start) if tensor.shape else whole
        got = receiver[0].tensors[tensor.name, Kind.PARAM]
        assert torch.equal(got, wanted.to(got.dtype)), tensor.name
    total = sum(move.bytes for move in moves(item_bytes))
    assert (sender[1], receiver[1]) == (Traffic(0, total), Traffic(total, 0))
    assert receiver[3] - receiver[2] <= bucket_bytes(TENSORS, {Kind.PARAM: target}), "staging stays small"


class Full(Ledger):
    """Refuses buffers, and remembers which."""

    def __init__(self) -> None:
        super().__init__(0)
        self.refused: list[weakref.ref[torch.Tensor]] = []

    def hold(self, category: str, *tensors: torch.Tensor) -> Hold:
        self.refused += [weakref.ref(tensor) for tensor in tensors if tensor.numel()]
        raise OutOfMemoryError(0, 1, 1, 1, category)


def test_buffers_that_the_ledger_refuses_are_let_go_of() -> None:
    """What is prepared stays for the next synchronisation; memory that nobody counts must not."""
    transport = Torch(Group("sync", (0, 1), 0, None), 20, read_memory=False)
    columns = Part(torch.zeros(300, 500)[:, 250:], torch.float32)
    exchange = Exchange(transport, {1: [columns]}, {}, 1 << 20, 1 << 20, _raise)
    ledger = Full()
    with pytest.raises(OutOfMemoryError):
        Prepared((), exchange, Traffic(), ledger).run()
    assert ledger.refused
    assert all(buffer() is None for buffer in ledger.refused)


def test_what_is_copied_beside_an_exchange_is_kept_for_its_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let go of after an error, its memory must not be handed out while the stream still copies."""
    kept: list[int] = []

    @contextmanager
    def beside(_: torch.device, used: Iterable[torch.Tensor], left_s: Callable[[], float]) -> Iterator[None]:
        kept.extend(tensor.data_ptr() for tensor in used)
        yield

    monkeypatch.setattr(exchange_module, "beside", beside)
    exchange = Exchange(Torch(Group("sync", (0, 1), 0, None), 20, False), {}, {}, 1 << 20, 1 << 20, _raise)
    copied = torch.zeros(3), torch.arange(3.0)
    Prepared((copied,), exchange, Traffic(), Ledger(0)).run()
    assert torch.equal(*copied)
    assert {tensor.data_ptr() for tensor in copied} <= set(kept)


def _raise(error: NereusError) -> None:
    raise error


def test_a_box_that_is_not_held_is_refused_by_name() -> None:
    positions = Positions(1, Ledger(1), torch.device("cpu"))
    position = positions.create(EMU(ACTOR, Layout(2), (9, 1)), schema("fp32"))
    move = Move("rows", Kind.PARAM, Box(0, 0, 10), 1, (1,), 20_000)
    mover = Mover(1, TENSORS, {Kind.PARAM: "fp32"}, None, Ledger(1))
    with pytest.raises(TransportError, match=r"rows param \[0, 10\) is asked for, .* holds \[150, 300\)"):
        mover.run([move], lambda _: position, lambda _: position)
