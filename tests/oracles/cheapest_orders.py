"""The fewest bytes that have to move where memory is short, over all orders of commits, destroys and stagings.

Knows nothing of the search. Uniform-cost search over the sets of units that can exist; its steps are those of
`brute_force_orders`, and a unit in host memory may leave its devices though it is the last copy. Fewest units staged
come before fewest bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from nereus.core import EMU, EMUSet, ModelStage, StateSchema
from tests.oracles.brute_force_orders import State, fits, together
from tests.oracles.cut import lacks_bytes

Cost = tuple[int, int]
"""Units in host memory, bytes received."""


class TooManyError(Exception):
    """More states than allowed."""


def least_moved(
    start: EMUSet,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    host_bytes: int = 0,
    most_states: int = 20_000,
) -> Cost | None:
    """The least (units staged, bytes received) of all orders, or None if there is none. All devices are on one node.

    Raises TooManyError.
    """
    first, last = frozenset(start), frozenset(goal)
    begin = (first, frozenset[EMU]())
    known: dict[tuple[State, State], Cost] = {begin: (0, 0)}
    done: set[tuple[State, State]] = set()
    heap: list[tuple[Cost, int, tuple[State, State]]] = [((0, 0), 0, begin)]
    while heap:
        cost, _, state = heappop(heap)
        if state in done:
            continue
        if state[0] == last:
            return cost
        done.add(state)
        if len(done) > most_states:
            raise TooManyError
        for added, after in _steps(state, first, last, schemas, capacity, host_bytes):
            total = (cost[0] + added[0], cost[1] + added[1])
            if after not in known or total < known[after]:
                known[after] = total
                heappush(heap, (total, len(known), after))
    return None


def _steps(
    state: tuple[State, State],
    first: State,
    last: State,
    schemas: Mapping[ModelStage, StateSchema],
    capacity: Mapping[int, int],
    host_bytes: int,
) -> Iterator[tuple[Cost, tuple[State, State]]]:
    there, staged = state
    copies = Counter(unit.model_stage for unit in there | staged)
    left = host_bytes - sum(_stored(unit, schemas) for unit in staged)
    for unit in there - last:
        if copies[unit.model_stage] > 1:
            yield (0, 0), (there - {unit}, staged)
        elif _stored(unit, schemas) <= left:
            yield (1, 0), (there - {unit}, staged | {unit})
    for unit in last - there:
        group = together(unit, there, first, last)
        if copies[unit.model_stage] and fits(there - last, there & last, group, schemas, capacity):
            schema = schemas[unit.model_stage]
            held = [old for old in there - last if old.model_stage == unit.model_stage]
            moved = sum(lacks_bytes(schema, held, new, device) for new in group for device in new.devices)
            yield (0, moved), (there | group, staged)


def _stored(unit: EMU, schemas: Mapping[ModelStage, StateSchema]) -> int:
    return sum(schemas[unit.model_stage].stored_bytes(unit, device) for device in unit.devices)
