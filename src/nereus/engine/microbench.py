"""What a worker measures for `calibrate`: single kernels on its device, messages and collectives with its peers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from nereus.core import NereusError
from nereus.engine.connection import Message
from nereus.engine.digest import quick_hash
from nereus.engine.exchange import Exchange
from nereus.engine.groups import Group
from nereus.engine.messages import Part, bundle_bytes
from nereus.engine.transports.torch import Torch
from nereus.engine.worker import Handler, Worker

SMALL_S = 1e-3
"""What takes less is repeated inside one timing."""
BUCKET_BYTES, MOVE_S = 1 << 26, 60.0
"""Staging of moves that are messages, and their deadline."""
TENSOR_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Of the tensors of a state: those of a small model on a CPU, of one of billions of parameters on a GPU."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a kernel is timed, of which the median counts."""

    kernels: int
    messages: int


class Microbench:
    """`options` are `Repeats`. Commands name sizes; replies hold seconds in the same order."""

    def __init__(self, worker: Worker, options: Any) -> None:
        self._worker = worker
        self._repeats: Repeats = options
        self._device = worker.torch_device

    def handlers(self) -> Mapping[str, Handler]:
        """Command name → measurement."""
        return {
            "facts": lambda _: Message("facts", self._facts()),
            "gemm": lambda message: self._each(message, self._gemm),
            "attention": lambda message: self._each(message, self._attention),
            "decode_attention": lambda message: self._each(message, self._decode_attention),
            "stream": lambda message: self._each(message, self._stream),
            "launch": lambda message: self._each(message, self._launch),
            "host": lambda message: self._each(message, self._host),
            "all_reduce": lambda message: self._collective(message, Group.all_reduce),
            "all_gather": lambda message: self._collective(message, Group.all_gather),
            "send": lambda message: self._collective(message, _half_round_trip),
            "move": lambda message: self._collective(message, _move_one),
            "move_all": lambda message: self._collective(message, _move_all),
            "copy": lambda message: self._collective(message, _copy),
            "hash": lambda message: self._collective(message, _hash),
            "setup": self._setup,
        }

    def _facts(self) -> dict[str, Any]:
        if self._device.type != "cuda":
            return {"name": "cpu", "memory_bytes": 0}
        properties = torch.cuda.get_device_properties(self._device)
        return {"name": properties.name, "memory_bytes": properties.total_memory}

    def _each(self, message: Message, measure: Callable[..., Callable[[], object]]) -> Message:
        dtype = getattr(torch, message.fields["dtype"])
        with torch.inference_mode():
            seconds = [self._time(measure(dtype, *(int(size) for size in sizes))) for sizes in message.fields["sizes"]]
        return Message("timed", {"seconds": seconds})

    def _time(self, run: Callable[[], object]) -> float:
        """The median of several timings, each long enough for the clock."""
        once_s = min(self._timed(run, 1) for _ in range(2))
        count = max(1, int(SMALL_S / max(once_s, 1e-7)))
        return median(self._timed(run, count) for _ in range(self._repeats.kernels))

    def _timed(self, run: Callable[[], object], count: int) -> float:
        self._synchronize()
        began_s = time.perf_counter()
        for _ in range(count):
            run()
        self._synchronize()
        return (time.perf_counter() - began_s) / count

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _random(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float32, device=self._device).to(dtype)

    def _gemm(self, dtype: torch.dtype, m: int, n: int, k: int) -> Callable[[], object]:
        left, right = self._random(dtype, m, k), self._random(dtype, n, k).t()
        return lambda: left @ right

    def _attention(
        self, dtype: torch.dtype, sequences: int, tokens: int, heads: int, width: int
    ) -> Callable[[], object]:
        query, keys, values = (self._random(dtype, sequences, heads, tokens, width) for _ in range(3))
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)

    def _decode_attention(
        self, dtype: torch.dtype, sequences: int, tokens: int, heads: int, width: int
    ) -> Callable[[], object]:
        query = self._random(dtype, sequences, heads, 1, width)
        keys, values = (self._random(dtype, sequences, heads, tokens, width) for _ in range(2))
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    def _stream(self, dtype: torch.dtype, elements: int) -> Callable[[], object]:
        source = self._random(dtype, elements)
        target = torch.empty_like(source)
        return lambda: torch.add(source, source, out=target)

    def _launch(self, dtype: torch.dtype, elements: int) -> Callable[[], object]:
        tensor = self._random(dtype, elements)
        return lambda: tensor.add_(1)

    def _host(self, dtype: torch.dtype, elements: int) -> Callable[[], object]:
        """To pinned memory of the host."""
        source = self._random(dtype, elements)
        target = torch.empty(elements, dtype=dtype, pin_memory=True)
        return lambda: target.copy_(source, non_blocking=True)

    def _collective(self, message: Message, run: Callable[[Group, torch.Tensor], object]) -> Message:
        """Members start together; the slowest one's time is the operation's."""
        group, seconds = self._worker.groups.get(message.fields["group"]), []
        for size in message.fields["sizes"]:
            tensor = torch.zeros(max(int(size) // 4, 1), device=self._device).fill_(0)  # in memory of its own
            run(group, tensor)
            timings = []
            for _ in range(self._repeats.messages):
                group.barrier()
                timings.append(self._timed(lambda tensor=tensor: run(group, tensor), 1))  # type: ignore[misc]
            seconds.append(median(timings))
        return Message("timed", {"seconds": seconds})

    def _setup(self, message: Message) -> Message:
        """Make a group with all members and let it go."""
        began_s = time.perf_counter()
        group = self._worker.groups.make(message.fields["group"], message.fields["members"])
        group.barrier()
        seconds = time.perf_counter() - began_s
        self._worker.groups.drop(message.fields["group"])
        return Message("timed", {"seconds": [seconds]})


def _half_round_trip(group: Group, tensor: torch.Tensor) -> None:
    """There and back between the first two members; twice the time of a message."""
    if group.rank == 0:
        group.send(tensor, 1)
        group.recv(tensor, 1)
    elif group.rank == 1:
        group.recv(tensor, 0)
        group.send(tensor, 0)


def _tensors(state: torch.Tensor) -> list[torch.Tensor]:
    """Square tensors that a state is made of."""
    side = math.isqrt(TENSOR_ELEMENTS[state.device.type])
    return [part.view(-1, side) for part in state.split(side * side)]


def _halves(state: torch.Tensor) -> Iterator[torch.Tensor]:
    """Both halves of every tensor: of its rows and of its columns, in turns."""
    for index, each in enumerate(_tensors(state)):
        yield from each.tensor_split(2, index % 2)


def _move_one(group: Group, state: torch.Tensor) -> None:
    """As a transition moves state, into fresh memory: from the first member to the second."""
    if group.rank < 2:
        _exchange(group, state, *(({1}, ()) if group.rank == 0 else ((), {0})))


def _move_all(group: Group, state: torch.Tensor) -> None:
    """From each member to the next at the same time."""
    _exchange(group, state, {(group.rank + 1) % group.size}, {(group.rank - 1) % group.size})


def _exchange(group: Group, state: torch.Tensor, to: Collection[int], source: Collection[int]) -> None:
    sends = {rank: [Part(each, each.dtype) for each in _tensors(state)] for rank in to}
    receives = {rank: [Part(each, each.dtype) for each in _tensors(torch.empty_like(state))] for rank in source}
    limit = bundle_bytes(BUCKET_BYTES, 1)
    Exchange(Torch(group, MOVE_S), sends, receives, limit, BUCKET_BYTES, _raise).run(lambda: None)


def _copy(_: Group, state: torch.Tensor) -> None:
    """As a transition keeps state that is cut anew, in fresh memory."""
    fresh, start = torch.empty_like(state), 0
    for half in _halves(state):
        fresh[start : start + half.numel()].view(half.shape).copy_(half)
        start += half.numel()


def _hash(_: Group, state: torch.Tensor) -> None:
    """As a transition compares copies before it merges them."""
    for half in _halves(state):
        quick_hash(half)


def _raise(error: NereusError) -> None:
    raise error
