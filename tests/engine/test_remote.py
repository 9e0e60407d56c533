"""Reading a position of another process from its unit and the addresses that were told; here the process is our own."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

from nereus.core import (
    EMU,
    Box,
    Cut,
    Kind,
    Layout,
    ModelStage,
    Move,
    Stage,
    StateSchema,
    TensorSpec,
    TransportError,
    Where,
)
from nereus.engine.ledger import Ledger
from nereus.engine.mover import Mover
from nereus.engine.positions import Position, Positions, shards
from nereus.engine.reading import LEAST_RUN_BYTES
from nereus.engine.remote import Remote, tiny_pieces_of
from nereus.engine.transports import attach
from nereus.transition.buckets import bucket_bytes
from nereus.transition.flows import Flow

ACTOR = ModelStage("actor", Stage.TRAINING)
TENSORS = (
    TensorSpec("rows", (60, 50), Where.FIRST, cut=Cut(0, 2)),
    TensorSpec("columns", (200, 40), Where.FIRST, cut=Cut(1, 2)),
    TensorSpec("experts", (3, 8, 70), Where.FIRST, cut=Cut(1, 2)),
    TensorSpec("scalar", (), Where.FIRST),
)
KINDS = {Kind.PARAM: "bf16", Kind.EXP_AVG: "fp32"}
SCHEMA = StateSchema(0, TENSORS, KINDS)
WHOLE, HALF = EMU(ACTOR, Layout(), (0,)), EMU(ACTOR, Layout(2), (9, 1))


def filled(unit: EMU, device: int, value: float | None = None) -> Position:
    """Elements counted up, or all of one value."""
    position = Positions(device, Ledger(device), torch.device("cpu")).create(unit, SCHEMA)
    for index, tensor in enumerate(position.tensors.values()):
        counted = torch.arange(tensor.numel()).reshape(tensor.shape) % 199 + index
        tensor.copy_(counted if value is None else torch.full_like(counted, int(value)))
    return position


def remote(position: Position, device: int) -> Remote:
    addresses = position.addresses(position.held, KINDS)
    assert addresses is not None
    process = attach.find(attach.card())
    assert process is not None
    return Remote(SCHEMA, position.unit, device, process, addresses)


def moves(source: int, target: int) -> list[Move]:
    """What a whole position and the second half of one have in common."""
    return [
        Move(spec.name, kind, Box(spec.cut.dim or 0, *spec.interval(2, 1)), source, (target,), 0)
        for spec in TENSORS
        for kind in KINDS
    ]


@pytest.mark.parametrize("merges", [False, True], ids=["part of a whole", "into a part of a whole"])
def test_parts_arrive_where_they_belong_and_nothing_else_changes(merges: bool) -> None:
    """Rows, columns (in tiny pieces on the side of the whole), a middle dim, and one element."""
    source, target = (filled(HALF, 1), filled(WHOLE, 0, -1)) if merges else (filled(WHOLE, 0), filled(HALF, 1, -1))
    ends = (1, 0) if merges else (0, 1)
    ledger = Ledger(ends[1])
    mover = Mover(ends[1], TENSORS, KINDS, None, ledger)
    traffic = mover.run(moves(*ends), lambda _: source, lambda _: target, remotes={ends[0]: remote(source, ends[0])})
    total = 0
    for spec in TENSORS:
        start, stop = spec.interval(2, 1)
        for kind in KINDS:
            whole, half = (p.tensors[spec.name, kind] for p in ((target, source) if merges else (source, target)))
            cut = whole.narrow(spec.cut.dim or 0, start, stop - start) if spec.shape else whole
            assert torch.equal(cut, half), (spec.name, kind)
            total += half.numel() * half.element_size()
            if merges and spec.shape:
                assert (whole.narrow(spec.cut.dim or 0, 0, start) == -1).all()
    assert (traffic.received_bytes, traffic.sent_bytes) == (total, 0)
    assert ledger.used_bytes == 0
    assert ledger.peak_bytes <= bucket_bytes(TENSORS, KINDS), "the scratch buffer is counted, and small"
    assert (ledger.peak_bytes > 0) == merges, "columns of the whole are in tiny pieces"


def test_what_the_source_does_not_hold_is_refused() -> None:
    source = remote(filled(HALF, 1), 1)
    with pytest.raises(TransportError, match=r"rows param \[0, 30\) is to be read, .* holds \[30, 60\) there"):
        source.offer(Move("rows", Kind.PARAM, Box(0, 0, 30), 1, (0,), 0))


def test_a_source_that_has_ended_is_named() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    position = filled(WHOLE, 0)
    gone = attach.Process(pid, 0, bytes(16))
    addresses = position.addresses(position.held, KINDS)
    assert addresses is not None
    other = Remote(SCHEMA, WHOLE, 0, gone, addresses)
    mover = Mover(1, TENSORS, KINDS, None, Ledger(1))
    with pytest.raises(TransportError, match=rf"reading from device 0 failed: memory of process {pid}"):
        mover.run(moves(0, 1), lambda _: position, lambda _: filled(HALF, 1), remotes={0: other})


def test_tensors_that_do_not_lie_as_their_shards_say_are_not_shown() -> None:
    position = filled(WHOLE, 0)
    found = position.addresses(position.held, KINDS)
    assert found is not None
    assert found.dtype == np.int64
    assert found.tolist() == [tensor.data_ptr() for tensor in position.tensors.values()]
    plain = position.tensors["columns", Kind.PARAM]
    for other in (plain.t().contiguous().t(), plain.float(), plain[:, :20].contiguous(), plain.to("meta")):
        changed = dataclasses.replace(position, tensors={**position.tensors, ("columns", Kind.PARAM): other})
        assert changed.addresses(position.held, KINDS) is None
    half = filled(HALF, 1)
    assert position.addresses(half.held, KINDS) is None, "of another unit than was thought"
    assert half.addresses(shards(SCHEMA, HALF, 9), KINDS) is None, "the other half has the same shapes"
    assert position.addresses(position.held, {**KINDS, Kind.MASTER: "fp32"}) is None
    assert position.addresses(position.held, {Kind.PARAM: "fp32"}) is None
    backwards = position.addresses(position.held, dict(reversed(KINDS.items())))
    assert backwards is not None
    assert backwards.reshape(-1, 2)[:, ::-1].ravel().tolist() == found.tolist()


def test_tiny_pieces_are_those_of_columns() -> None:
    def flow(spec: TensorSpec) -> Flow:
        return Flow((spec, spec), 1, *spec.interval(2, 1), 0, 1)

    assert LEAST_RUN_BYTES > 20 * 4
    assert [tiny_pieces_of(SCHEMA, WHOLE, flow(spec)) for spec in TENSORS[:2]] == [0, 2 * 2 * 200]
    assert tiny_pieces_of(SCHEMA, HALF, dataclasses.replace(flow(TENSORS[1]), source=1)) == 0, (
        "its half is all there is"
    )
