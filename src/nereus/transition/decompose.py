"""One model-stage's change as commit groups: what is built from what, and which units go (paper §6.1, D6.2).

Goal units that need the same Split are one group, every other goal unit is its own. A group reads the units on its own
devices; where those would be the slowest part of it, replicas that nobody else reads help. What holds nothing yet is
built from any whole unit, chosen when the order is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace

from nereus.core import EMU, InfeasibleError, Layout, ModelStage, StateSchema, TransitionError
from nereus.transition.classes import layouts_of
from nereus.transition.nodes import node_at
from nereus.transition.pricing import Pricing


@dataclass(slots=True, eq=False)
class Build:
    """A commit group. Without `sources` it reads whatever whole units are free when it starts.

    `acquires` by device; `kept_bytes` is the storage of the old positions that the new ones take over, by device;
    `received_bytes` and `moved_bytes` as in `Price`.
    """

    name: str
    goals: tuple[EMU, ...]
    sources: tuple[EMU, ...]
    acquires: dict[int, int]
    kept_bytes: dict[int, int]
    received_bytes: int
    moved_bytes: int
    index: int = 0
    """Its place among all groups of a run."""

    def price(self, pricing: Pricing) -> None:
        """Set what it acquires, takes over, receives and moves: only what its devices hold of `sources` is there."""
        held = {device for source in self.sources for device in source.devices} if self.sources else set[int]()
        self.acquires, self.kept_bytes, self.received_bytes, self.moved_bytes = {}, {}, 0, 0
        for goal in self.goals:
            price = pricing.price(goal, held)
            self.acquires.update(zip(goal.devices, price.acquired, strict=True))
            if held:
                self.kept_bytes.update(zip(goal.devices, price.kept, strict=True))
            self.received_bytes = max(self.received_bytes, price.received_bytes)
            self.moved_bytes += price.moved_bytes

    def copy(self) -> Build:
        """The same, to be changed by a run."""
        return Build(
            self.name, self.goals, self.sources, self.acquires, self.kept_bytes, self.received_bytes, self.moved_bytes
        )


@dataclass(slots=True, eq=False)
class LocalDAG:
    """What one model-stage has to do. `kept` are units of start and goal, `left` those that go, `sub` is T_sub."""

    model_stage: ModelStage
    kept: tuple[EMU, ...]
    left: tuple[EMU, ...]
    builds: tuple[Build, ...]
    sub: Layout
    pricing: Pricing
    elsewhere: bool = False
    """Whether a copy that nobody here reads stays for good, so that all of these may leave."""
    copies: int = 1
    """How many parts that are alike it stands for."""
    losses: dict[tuple[str, tuple[int, ...]], tuple[tuple[EMU, ...], int]] = field(default_factory=dict)
    """Name of a group and devices of a unit that it reads → all it read when that was found, and the loss."""

    def drop(self, build: Build, unit: EMU) -> list[Build]:
        """`build` reads `unit` no longer, which may then be destroyed before it.

        The groups that it falls apart into, if nothing else ties its goal units together and what it still reads would
        send for longer than they receive: some of them are read by others then.
        """
        build.sources = tuple(source for source in build.sources if source != unit)
        if build.acquires.keys().isdisjoint(unit.devices):
            return []
        build.price(self.pricing)
        senders = sum(len(source.devices) for source in build.sources)
        if len(build.goals) == 1 or build.moved_bytes <= senders * build.received_bytes:
            return []
        return self._apart(build)

    def _apart(self, build: Build) -> list[Build]:
        """What `build` falls apart into. A source on no device of it helps the first."""
        found = _tied(build.goals, build.sources, self.sub)
        if len(found) == 1:
            return []
        near = {unit for _, units in found for unit in units}
        first = [unit for unit in build.sources if unit not in near]
        apart = [
            Build(f"{build.name}.{number}", goals, (*units, *(() if number else first)), {}, {}, 0, 0)
            for number, (goals, units) in enumerate(found)
        ]
        for each in apart:
            each.price(self.pricing)
        return apart

    def loss(self, build: Build, unit: EMU) -> int:
        """Bytes that the busiest device of `build` receives more if it does not read `unit`."""
        key = (build.name, unit.devices)
        known = self.losses.get(key)
        if known is None or known[0] is not build.sources:
            known = self.losses[key] = (build.sources, self._loss(build, unit))
        return known[1]

    def _loss(self, build: Build, unit: EMU) -> int:
        # What a goal unit receives depends on what its own devices hold, so the other goal units lose nothing.
        goal_on = self.pricing.goal_on
        touched = {goal_on[device]: None for device in unit.devices if device in build.acquires}
        held = set[int]().union(*(source.devices for source in build.sources if source.devices != unit.devices))
        most = max((self.pricing.price(goal, held).received_bytes for goal in touched), default=0)
        return max(0, most - build.received_bytes)

    def copy(self) -> LocalDAG:
        """The same with groups of its own, which a run may change."""
        return replace(self, builds=tuple(build.copy() for build in self.builds))

    def in_turn(self) -> LocalDAG:
        """With every new replica read from the units of the start in turn, so that nothing is forwarded."""
        if all(build.sources for build in self.builds):
            return self
        found = self.copy()
        units = sorted((*self.kept, *self.left), key=lambda unit: unit.devices)
        for index, build in enumerate(build for build in found.builds if not build.sources):
            build.sources = (units[index % len(units)],)
        return found


def degrees(layout: Layout) -> tuple[int, int]:
    """TP and PP, whatever the layers of each pp rank."""
    return (layout.tp, layout.pp)


def decompose(
    start: Sequence[EMU],
    goal: Sequence[EMU],
    schema: StateSchema,
    unread: Collection[EMU] = (),
    node_of: Mapping[int, int] | None = None,
    sub: Layout | None = None,
    elsewhere: bool = False,
) -> LocalDAG:
    """The local DAG from the units `start` to `goal`, both of one model-stage.

    Units in both are kept and produce nothing. No group takes over storage of the units `unread`, or plans to read
    them. Where these are not all units of the model-stage, `sub` is its T_sub, and `elsewhere` says whether one of the
    others stays for good, so that these need not keep a copy. Raises InfeasibleError when there is no unit to copy
    from, TransitionError when nothing would be left.
    """
    left, kept, built = _changes(start, goal)
    if built and not start:
        raise InfeasibleError(
            f"{built[0].model_stage}: no unit exists, so no transition can build the goal's; restart instead"
        )
    if left and not goal and not elsewhere:
        raise TransitionError(f"{left[0].model_stage}: the goal has no unit of it, its last copy would be destroyed")
    sub = sub or Layout.common(*layouts_of((*start, *goal)))
    readable = [unit for unit in left if unit not in unread] if unread else left
    pricing = Pricing(schema, start, goal, readable)
    builds = _groups(built, readable, sub, pricing)
    _ask_replicas(builds, (*kept, *readable), node_of)
    return LocalDAG((start or goal)[0].model_stage, kept, left, builds, sub, pricing, elsewhere)


def _changes(start: Sequence[EMU], goal: Sequence[EMU]) -> tuple[tuple[EMU, ...], tuple[EMU, ...], tuple[EMU, ...]]:
    """The units of the start alone, those of both, and those of the goal alone."""
    if set(layouts_of(start)).isdisjoint(layouts_of(goal)):
        return tuple(start), (), tuple(goal)
    # Units of one model-stage share no device, so that devices tell them apart but for the layout.
    before, after = ({unit.devices: unit.layout for unit in units} for units in (start, goal))
    kept = {devices for devices in before.keys() & after.keys() if before[devices] == after[devices]}
    return (
        tuple([unit for unit in start if unit.devices not in kept]),
        tuple([unit for unit in start if unit.devices in kept]),
        tuple([unit for unit in goal if unit.devices not in kept]),
    )


def _groups(built: Sequence[EMU], readable: Sequence[EMU], sub: Layout, pricing: Pricing) -> tuple[Build, ...]:
    """Goal units that need the same Split together; the rest on their own."""
    found: list[Build] = []
    for number, (goals, sources) in enumerate(_tied(built, readable, sub)):
        build = Build(f"{goals[0].model_stage}/{number}", goals, sources, {}, {}, 0, 0)
        build.price(pricing)
        found.append(build)
    return tuple(found)


def _tied(built: Sequence[EMU], readable: Sequence[EMU], sub: Layout) -> list[tuple[tuple[EMU, ...], tuple[EMU, ...]]]:
    """Goal units that need the same Split, and the units on their devices."""
    unit_on = {device: index for index, unit in enumerate(readable) for device in unit.devices}
    shared = [degrees(unit.layout) != degrees(sub) for unit in readable]
    group_of: dict[int, int] = {}
    """Index of a unit that must be split → the group that reads it."""
    members: dict[int, list[int]] = {}
    locals_: dict[int, dict[int, None]] = {}
    for index, goal in enumerate(built):
        touched = {unit_on[device]: None for device in goal.devices if device in unit_on} if unit_on else {}
        if not touched:
            members[index] = [index]
            continue
        joined = sorted({group_of[unit] for unit in touched if unit in group_of})
        home = joined[0] if joined else index
        members.setdefault(home, []).append(index)
        locals_.setdefault(home, {}).update(touched)
        for other in joined[1:]:
            members[home].extend(members.pop(other))
            locals_[home].update(locals_.pop(other))
        group_of.update((unit, home) for unit in locals_[home] if shared[unit])
    return [
        (
            tuple([built[index] for index in sorted(members[home])]),
            tuple([readable[unit] for unit in locals_[home]]) if home in locals_ else (),
        )
        for home in sorted(members)
    ]


def _ask_replicas(builds: Sequence[Build], readable: Sequence[EMU], node_of: Mapping[int, int] | None) -> None:
    """Deal the units that no group reads to groups whose own senders have more to send than a device receives."""
    reading = [build for build in builds if build.sources]
    if not reading:
        return
    used = {source.devices for build in reading for source in build.sources}
    spare = [unit for unit in readable if unit.devices not in used]
    if not spare:
        return
    senders = {id(build): sum(len(source.devices) for source in build.sources) for build in reading}
    heap = [(-(build.moved_bytes / senders[id(build)]), index) for index, build in enumerate(reading)]
    heapify(heap)
    by_node = _by_node(spare, node_of)
    for _ in range(len(spare)):
        load, index = heap[0]
        build = reading[index]
        if -load <= build.received_bytes:
            return
        near = by_node.get(-1 if node_of is None else node_at(build.goals[0].devices[0], node_of))
        replica = near.pop() if near else next(units for units in by_node.values() if units).pop()
        build.sources = (*build.sources, replica)
        senders[id(build)] += len(replica.devices)
        heapreplace(heap, (-(build.moved_bytes / senders[id(build)]), index))


def _by_node(units: Sequence[EMU], node_of: Mapping[int, int] | None) -> dict[int, list[EMU]]:
    """Node of the first device → units, the first one last."""
    found: dict[int, list[EMU]] = {}
    for unit in reversed(units):
        found.setdefault(-1 if node_of is None else node_at(unit.devices[0], node_of), []).append(unit)
    return found
