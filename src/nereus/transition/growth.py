"""How many devices can hold a model-stage after so many rounds: they at most double, and some have to give it up before
others have room to receive it. A round is the least time in which one receives."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, log, log1p, pow

ROUNDING = 1e-9
"""Of a round; times are sums in any order."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Old units that hold a model-stage on `held` devices until they leave; `wanted` devices receive it after that.

    The groups of these may have up to `spare` more of them than devices that send, in each round that they last.
    """

    held: int
    wanted: int
    spare: int


@dataclass(frozen=True, slots=True)
class Gate:
    """Another model-stage that keeps no unit. Its first new one is there after `earliest` rounds or later, and before
    that `late` devices have no room. In the last `before_end` rounds units that hold on `held` devices, and all of the
    swaps `opened`, have left for it."""

    earliest: float = 0.0
    late: int = 0
    before_end: float = 0.0
    held: int = 0
    opened: tuple[Swap, ...] = ()


@dataclass(frozen=True, slots=True)
class Growth:
    """Devices that hold a model-stage at the start, those to receive it beside them, and how many swaps of a kind.

    `whole`: what is there at the start and can be read is in units no smaller than the groups of a swap.
    """

    held: int
    wanted: int
    swaps: Counter[Swap]
    whole: bool = False

    def rounds(self, gate: Gate, enough: int | None = None) -> float:
        """The least until `enough` have received; None: all."""
        least = self.wanted if enough is None else enough
        opened = Counter(gate.opened)
        shut = self._levels(self.held, self.swaps, 0)
        through = self._levels(self.held - gate.held, self.swaps - opened, sum(swap.spare for swap in gate.opened))
        most = self.wanted.bit_length() + 2
        ends = {float(count) for count in range(1, most)}
        ends |= {gate.earliest + count for count in range(1, most)} if gate.late else set()
        found = sorted(ends)
        index = bisect_left(found, True, key=lambda end: _made(end, gate, shut, through) >= least)
        return found[min(index, len(found) - 1)]

    def _levels(self, held: int, swaps: Counter[Swap], spare: int) -> _Levels:
        beside = self.wanted - sum(swap.wanted * count for swap, count in swaps.items())
        return _Levels(held, beside, list(swaps.elements()), spare, self.whole)


def least_rounds(times: float, growth: float, first: float) -> float:
    """How many rounds it takes at least until there are `times` as many devices, where few may send to more.

    What a device sends in d of these makes at most `growth` d new ones; d is 1 at least, `first` where all begins. Of
    the ways to spend T in so many parts, equal ones make the most: (1 + growth T / parts)^parts of one device.
    """
    found: list[float] = []
    for parts in range(1, max(1, ceil(log(times) / log1p(growth) - 1e-9)) + 1):
        equal = (pow(times, 1 / parts) - 1) / growth
        if equal >= first:
            found.append(parts * equal)
        elif parts == 1:
            found.append(first)
        else:
            rest = (pow(times / (1 + growth * first), 1 / (parts - 1)) - 1) / growth
            found.append(first + (parts - 1) * max(1.0, rest))
    return min(found)


class _Levels:
    """How many devices hold the model-stage, send, and may receive it, by the number of swaps whose units have left.

    Each is the most over all choices of so many.
    """

    def __init__(self, held: int, wanted: int, each: Sequence[Swap], spare: int, whole: bool) -> None:
        self._held = _less(held, [swap.held for swap in each])
        self._sending = _less(held + spare, [max(0, swap.held - swap.spare) for swap in each])
        self._first = self._held if whole else self._sending
        self._wanted = list(accumulate(sorted((swap.wanted for swap in each), reverse=True), initial=wanted))

    def most(self, made: int, late: int) -> int:
        """How many new ones can be there after a round, if there were `made`, and `late` have no room yet."""

        sending = self._sending if made else self._first

        def sent(gone: int) -> int:
            return sending[gone] + 2 * made if self._held[gone] + made > 0 else 0

        # The more have left, the fewer send, and the more may receive.
        gone = bisect_left(range(len(self._held)), True, key=lambda gone: self._wanted[gone] - late >= sent(gone))
        return max(
            sent(gone) if gone < len(self._held) else 0,
            self._wanted[gone - 1] - late if gone else 0,
        )


def _less(held: int, swaps: list[int]) -> list[int]:
    return list(accumulate(sorted(swaps), lambda left, size: left - size, initial=held))


def _made(end: float, gate: Gate, shut: _Levels, through: _Levels) -> int:
    """The most that have received at the `end`. What is there a round later is being received now."""
    made = 0
    for left in range(int(end + ROUNDING), 0, -1):
        late = gate.late if end - left < gate.earliest - ROUNDING else 0
        made = max(made, through.most(made, late))
        if gate.held and left > gate.before_end + ROUNDING:
            made = max(made, shut.most(made, gate.late))
    return made
