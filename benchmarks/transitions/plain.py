"""What torch.distributed alone does: a direct exchange, tensor by tensor, of exactly what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import distributed

from benchmarks.transitions.scenario import Exchange, Scenario
from benchmarks.transitions.state import KINDS, State, Tensor, filled, wrong


class Work:
    """One message a tensor and kind, all posted at once. The plan is made before the clock starts."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.rank, self.scenario, self.placed = rank, scenario, scenario.placed
        self.source = filled(scenario.size, scenario.source, rank)
        self.target: State = {}
        self.moves = scenario.exchanges()
        self.before = {t.name: (start, stop) for t, start, stop in scenario.source.held(scenario.size, rank)}

    def reset(self) -> None:
        """Drop the target."""
        self.target = {}

    def wrong(self) -> list[str]:
        """Of the target."""
        return wrong(self.target, self.scenario.size, self.placed, self.rank)

    def run(self) -> None:
        """Copy what is here already, exchange the rest."""
        self.copy_own()
        self.exchange(self.moves)

    def copy_own(self) -> None:
        """Allocate the target and fill in what this rank holds."""
        for tensor, start, stop in self.placed.held(self.scenario.size, self.rank):
            held = self.before.get(tensor.name, (0, 0))
            low, high = max(start, held[0]), min(stop, held[1])
            for kind in KINDS:
                if (low, high) == (start, stop):
                    self.target[tensor.name, kind] = self.cut(tensor, kind, low, high).contiguous()
                    continue
                made = self.target[tensor.name, kind] = torch.empty(_shape(tensor, stop - start))
                if low < high:
                    made.narrow(tensor.dim or 0, low - start, high - low).copy_(self.cut(tensor, kind, low, high))

    def cut(self, tensor: Tensor, kind: str, low: int, high: int) -> torch.Tensor:
        """A view of a range of what this rank holds of the source."""
        whole = self.source[tensor.name, kind]
        return whole if tensor.dim is None else whole.narrow(tensor.dim, low - self.before[tensor.name][0], high - low)

    def exchange(self, moves: list[Exchange]) -> None:
        """Post everything of these moves that concerns this rank, then wait."""
        works, landed, sent = [], [], []
        for move, kind, tag in _numbered(moves):
            if move.source == self.rank:
                sent.append(self.cut(move.tensor, kind, move.start, move.stop).contiguous())
                works.append(distributed.isend(sent[-1], move.target, tag=tag))
            elif move.target == self.rank:
                view = self.into(move, kind)
                buffer = view if view.is_contiguous() else torch.empty(view.shape)
                landed.append((view, buffer))
                works.append(distributed.irecv(buffer, move.source, tag=tag))
        for work in works:
            work.wait()
        for view, buffer in landed:
            if view is not buffer:
                view.copy_(buffer)

    def into(self, move: Exchange, kind: str) -> torch.Tensor:
        """Where a move lands in the target."""
        tensor, whole = move.tensor, self.target[move.tensor.name, kind]
        if tensor.dim is None:
            return whole
        start = next(a for t, a, _ in self.placed.held(self.scenario.size, self.rank) if t.name == tensor.name)
        return whole.narrow(tensor.dim, move.start - start, move.stop - move.start)


class Sequential(Work):
    """The first owner serves one target after another, each with everything that it lacks."""

    def run(self) -> None:
        """Targets in order."""
        self.copy_own()
        for target in sorted({move.target for move in self.moves}):
            self.exchange([move for move in self.moves if move.target == target])


class Broadcast(Work):
    """One packed broadcast from each source to its targets: every target wants one source's shard whole.

    The source's flat buffer and, with `ready`, the target's are there before the clock starts, as a framework may keep
    them; then what is timed is the broadcast alone.
    """

    ready = True

    def __init__(self, rank: int, scenario: Scenario) -> None:
        super().__init__(rank, scenario)
        targets: dict[int, set[int]] = {}
        for target, source in scenario.copies().items():
            targets.setdefault(source, set()).add(target)
        self.groups = {s: distributed.new_group([s, *sorted(found)]) for s, found in sorted(targets.items())}
        self.root = next((s for s, found in targets.items() if rank == s or rank in found), None)
        self.flat = (
            self.packed() if self.root == rank else self.empty() if self.ready and self.root is not None else None
        )

    def packed(self) -> torch.Tensor:
        """All that a source holds, flat."""
        return torch.cat([part.reshape(-1) for part in self.source.values()])

    def empty(self) -> torch.Tensor:
        """Room for the target, filled so that its pages exist."""
        return torch.zeros(self.placed.stored_bytes(self.scenario.size, self.rank) // 4)

    def run(self) -> None:
        """The broadcast; the target's tensors are views of what has come."""
        if self.root is None:
            return
        flat = self.flat
        if not self.ready:
            flat = self.packed() if self.root == self.rank else torch.empty(self._elements())
        distributed.broadcast(flat, self.root, group=self.groups[self.root])
        if self.root != self.rank:
            self.unpack(flat)

    def unpack(self, flat: torch.Tensor) -> None:
        """Views of the buffer."""
        start = 0
        for tensor, low, high in self.placed.held(self.scenario.size, self.rank):
            for kind in KINDS:
                shape = _shape(tensor, high - low)
                self.target[tensor.name, kind] = flat[start : start + torch.Size(shape).numel()].view(shape)
                start += torch.Size(shape).numel()

    def wrong(self) -> list[str]:
        """Sources keep what they have."""
        return [] if self.root in (None, self.rank) else super().wrong()

    def _elements(self) -> int:
        return self.placed.stored_bytes(self.scenario.size, self.rank) // 4


class PackedBroadcast(Broadcast):
    """Packing and the target's memory are timed too, as a framework pays that keeps no second copy of its state."""

    ready = False


def _numbered(moves: list[Exchange]) -> Iterator[tuple[Exchange, str, int]]:
    """Both ends number the messages of a pair alike."""
    for index, move in enumerate(moves):
        for place, kind in enumerate(KINDS):
            yield move, kind, index * len(KINDS) + place


def _shape(tensor: Tensor, rows: int) -> list[int]:
    shape = list(tensor.shape)
    if tensor.dim is not None:
        shape[tensor.dim] = rows
    return shape
