"""Weight synchronisation from one sender to many: ours against a broadcast for each tensor and one packed broadcast.

All three ways take turns on the same processes and fill the same tensors. The packed one has its buffers ready, as a
framework may keep them; ours and the broadcasts convert tensor by tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from benchmarks._result import Result
from benchmarks.transitions.state import SIZES, Size, values
from nereus.core import EMU, Cut, Kind, Layout, ModelStage, StateSchema, TensorSpec, Where
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.worker import DeviceSettings, Handler, Worker
from nereus.trainer.weights import WeightSync

RECEIVERS = (1, 2, 4, 7)
WAYS = {"ours": "sync", "a broadcast a tensor": "broadcast", "one packed broadcast": "packed"}
TRAINED, GENERATING = ModelStage.parse("actor/training"), ModelStage.parse("actor/generation")
SENT = {"fp32": torch.float32, "bf16": torch.bfloat16}
RUNS, WAIT_S = 5, 120.0
Tensors = Mapping[tuple[str, Kind], torch.Tensor]


def run(quick: bool = False) -> list[Result]:
    """One line for each number of receivers, with and without a cast."""
    size = SIZES["tiny" if quick else "quarter"]
    counts, runs = (RECEIVERS[:2], 1) if quick else (RECEIVERS, RUNS)
    return [line for cast in (False, True) for count in counts for line in _lines(size, count, cast, runs)]


def schema(size: Size, dtype: str) -> StateSchema:
    """The parameters alone, in one dtype."""
    tensors = []
    for each in size.tensors:
        where = Where.LAST if each.layer is None else Where.FIRST if each.layer < 0 else Where.LAYER
        layer = each.layer if where is Where.LAYER else None
        cut = Cut() if each.dim is None else Cut(each.dim, each.shape[each.dim])
        tensors.append(TensorSpec(each.name, each.shape, where, layer, cut))
    return StateSchema(size.layers, tuple(tensors), {Kind.PARAM: dtype})


class Program:
    """`options` are the two schemas; the first device sends, the others receive."""

    def __init__(self, worker: Worker, options: Any) -> None:
        self._worker, self._size, self._schemas = worker, options["size"], options["schemas"]
        self._weights = WeightSync(worker, self._schemas)
        self._flat: torch.Tensor | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """Command name → what to do."""
        ways = {"sync": self._sync, "broadcast": self._broadcast, "packed": self._packed}
        return {"load": self._load, "spoil": self._spoil, "wrong": self._wrong, **ways}

    def _load(self, message: Message) -> None:
        unit: EMU = message.fields["unit"]
        position = self._worker.positions.create(unit, self._schemas[unit.model_stage])
        if unit.model_stage == TRAINED:
            for tensor in self._size.tensors:
                rows = tensor.shape[tensor.dim or 0] if tensor.dim is not None else 1
                position.tensors[tensor.name, Kind.PARAM].copy_(values(tensor, "param", 0, rows))
        count = sum(tensor.numel() for tensor in position.tensors.values())
        self._flat = torch.zeros(count, dtype=next(iter(self._target_dtypes())))

    def _target_dtypes(self) -> list[torch.dtype]:
        return [SENT[dtype] for dtype in self._schemas[GENERATING].dtypes.values()]

    def _tensors(self) -> Tensors:
        """What this device sends from or receives into."""
        (position,) = self._worker.positions
        return position.tensors

    def _sync(self, message: Message) -> None:
        self._weights.run(message.fields["sources"], message.fields["targets"], "all")

    def _broadcast(self, _: Message) -> None:
        (dtype,) = self._target_dtypes()
        group = self._worker.groups.get("all")
        for tensor in self._tensors().values():
            group.broadcast(tensor.to(dtype) if group.rank == 0 else tensor, 0)

    def _packed(self, _: Message) -> None:
        group, flat = self._worker.groups.get("all"), self._flat
        assert flat is not None
        if group.rank == 0:
            self._each(flat, lambda part, tensor: part.copy_(tensor))
        group.broadcast(flat, 0)
        if group.rank:
            self._each(flat, lambda part, tensor: tensor.copy_(part))

    def _each(self, flat: torch.Tensor, act: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        start = 0
        for tensor in self._tensors().values():
            act(flat[start : start + tensor.numel()].view(tensor.shape), tensor)
            start += tensor.numel()

    def _spoil(self, _: Message) -> None:
        if self._worker.groups.get("all").rank:
            for tensor in self._tensors().values():
                tensor.zero_()

    def _wrong(self, _: Message) -> Message:
        (dtype,) = self._target_dtypes()
        held, names = self._tensors(), []
        for tensor in self._size.tensors:
            rows = tensor.shape[tensor.dim] if tensor.dim is not None else 1
            if not torch.equal(held[tensor.name, Kind.PARAM].to(dtype), values(tensor, "param", 0, rows).to(dtype)):
                names.append(tensor.name)
        return Message("wrong", {"names": names})


def _lines(size: Size, count: int, cast: bool, runs: int) -> list[Result]:
    known = {TRAINED: schema(size, "fp32"), GENERATING: schema(size, "bf16" if cast else "fp32")}
    with Crew(
        {device: DeviceSettings() for device in range(count + 1)},
        f"{__name__}.Program",
        {"size": size, "schemas": known},
        timeout_s=WAIT_S,
    ) as crew:
        seconds, wrong = _measured(crew, count, runs)
    mine_s = median(seconds["ours"])
    moved = known[GENERATING].element_bytes * sum(tensor.elements for tensor in known[GENERATING].tensors)
    name = f"1 to {count}, {moved / 1e6:.0f} MB{', fp32 to bf16' if cast else ''}, s, against"
    details = {"seconds": seconds, "wrong": wrong, "bytes": moved}
    notes = f"WRONG: {wrong}" if wrong else f"{count * moved / mine_s / 1e9:.2f} GB/s received in all"
    return [
        Result(f"{name} {way}", "report", mine_s, other_s, other_s / mine_s, not wrong, notes, details)
        for way, other_s in ((way, median(taken)) for way, taken in seconds.items() if way != "ours")
    ]


def _measured(crew: Crew, count: int, runs: int) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds by way, and what any of them left wrong."""
    devices = range(count + 1)
    crew.start(devices)
    crew.wait_ready(devices, WAIT_S)
    sources = (EMU(TRAINED, Layout(), (0,)),)
    targets = tuple(EMU(GENERATING, Layout(), (device,)) for device in devices[1:])
    crew.call(devices, Message("groups.make", {"groups": [("all", tuple(devices))]}), WAIT_S)
    for unit in (*sources, *targets):
        crew.call(unit.devices, Message("load", {"unit": unit}), WAIT_S)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    wrong: list[str] = []
    for round_ in range(-1, runs):
        for way, command in WAYS.items():
            crew.call(devices, Message("spoil"), WAIT_S)
            began_s = time.perf_counter()
            crew.call(devices, Message(command, {"sources": sources, "targets": targets}), WAIT_S)
            if round_ >= 0:
                seconds[way].append(time.perf_counter() - began_s)
                continue
            replies = crew.call(devices, Message("wrong"), WAIT_S)
            wrong += [f"{way}: {name}" for reply in replies.values() for name in reply.fields["names"]]
    return seconds, wrong
