"""Whether any order of commits and destroys fits in memory: every reachable set of units is visited.

Knows nothing of the scheduler. A unit of the start may leave while another whole one is there; goal units are built
together when they lie on an existing unit that has to be split; what is built from a unit on its own device takes over
the tensors whose shard stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import gcd

from nereus.core import DTYPE_BYTES, EMU, EMUSet, ModelStage, StateSchema

State = frozenset[EMU]


def an_order_exists(
    start: EMUSet, goal: EMUSet, schemas: Mapping[ModelStage, StateSchema], capacity: Mapping[int, int]
) -> bool:
    """Breadth-first search over the sets of units that can exist."""
    first, last = frozenset(start), frozenset(goal)
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        if state == last:
            return True
        for after in _steps(state, first, last, schemas, capacity):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return False


def _steps(
    state: State, first: State, last: State, schemas: Mapping[ModelStage, StateSchema], capacity: Mapping[int, int]
) -> Iterator[State]:
    for unit in state - last:
        if any(other != unit and other.model_stage == unit.model_stage for other in state):
            yield state - {unit}
    for unit in last - state:
        group = together(unit, state, first, last)
        if any(other.model_stage == unit.model_stage for other in state) and fits(
            state - last, state & last, group, schemas, capacity
        ):
            yield state | group


def together(unit: EMU, state: State, first: State, last: State) -> State:
    """The goal units that commit with `unit`."""
    ms = unit.model_stage
    layouts = {other.layout for other in first | last if other.model_stage == ms}
    sub = (gcd(*(layout.tp for layout in layouts)), gcd(*(layout.pp for layout in layouts)))
    split = [other for other in state - last if other.model_stage == ms and (other.layout.tp, other.layout.pp) != sub]
    group, grown = {unit}, True
    while grown:
        touched = [other for other in split if any(set(other.devices) & set(member.devices) for member in group)]
        more = {
            other
            for other in last - state
            if other.model_stage == ms and any(set(other.devices) & set(old.devices) for old in touched)
        }
        grown = not more <= group
        group |= more
    return frozenset(group)


def fits(
    old: State, built: State, group: State, schemas: Mapping[ModelStage, StateSchema], capacity: Mapping[int, int]
) -> bool:
    """Whether the devices of `group` hold it beside the units that go, `old`, and those that stay, `built`."""
    level: Counter[int] = Counter()
    for unit in old | built | group:
        for device in unit.devices:
            level[device] += schemas[unit.model_stage].stored_bytes(unit, device)
    for before in old:
        for after in built | group:
            if before.model_stage == after.model_stage:
                for device in set(before.devices) & set(after.devices):
                    level[device] -= shared_bytes(schemas[before.model_stage], before, after, device)
    acquiring = {device for unit in group for device in unit.devices}
    return all(level[device] <= capacity.get(device, level[device]) for device in acquiring)


def shared_bytes(schema: StateSchema, old: EMU, new: EMU, device: int) -> int:
    """Bytes of the tensors whose interval and local shape are the same in both positions."""
    size = sum(DTYPE_BYTES[dtype] for dtype in schema.dtypes.values())
    before = {tensor: (start, stop) for tensor, start, stop in schema.held(old, device)}
    total = 0
    for tensor, start, stop in schema.held(new, device):
        shapes = {tensor.local_shape(unit.layout.tp, unit.position(device)[1]) for unit in (old, new)}
        if before.get(tensor) == (start, stop) and len(shapes) == 1:
            elements = 1
            for length in shapes.pop():
                elements *= length
            total += elements * size
    return total
