"""What no order can beat, in the model of a run: a lower bound of its span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log, log1p, log2, pow

from nereus.transition.decompose import LocalDAG
from nereus.transition.demand import Stage, stages_of
from nereus.transition.occupancy import occupied_bytes
from nereus.transition.releasing import released_bytes
from nereus.transition.site import Site


def bound_bytes(
    locals_: Sequence[LocalDAG], used: Mapping[int, int], capacity: Mapping[int, int], site: Site | None = None
) -> float:
    """The largest of: what one device takes part in, how fast new replicas double, how releases wait for copies, and
    what has to cross nodes.

    Several of `locals_` may be of one model-stage: parts of it that share no device, each for as many `copies`.
    """
    stages = stages_of(locals_, used, capacity)
    if not stages:
        return 0.0
    found = max(occupied_bytes(stages), *map(_doubling, stages), released_bytes(stages))
    return found if site is None or site.far == 1 else max([found, *(_crossing(stage, site) for stage in stages)])


def _crossing(stage: Stage, site: Site) -> float:
    """A group whose unit lies on several nodes crosses them; and so does the first on a node that holds nothing."""
    before = site.nodes(stage.old)
    apart, found = set[int](), 0.0
    first: dict[int, int] = {}
    for build in stage.builds:
        nodes = site.nodes(build.goals)
        if len(nodes) > 1:
            apart |= nodes
            found = max(found, site.far * build.received_bytes if len(build.goals) == 1 else 0.0)
        else:
            (node,) = nodes
            first[node] = min(build.received_bytes, first.get(node, build.received_bytes))
    fresh = (size for node, size in first.items() if node not in before and node not in apart)
    return max(found, site.far * max(fresh, default=0))


def _doubling(stage: Stage) -> float:
    """While a new replica is received, as many others can be as there are devices to send: devices at most double.

    Units of fewer devices than one replica take longer, and may each feed one meanwhile.
    """
    fresh = [build for build in stage.builds if not build.sources]
    received = min((build.received_bytes for build in fresh), default=0)
    if not received:
        return 0.0
    size = min(len(build.acquires) for build in fresh)
    units = [*stage.old, *(demand.goal for demand in stage.demands)]
    senders = stage.holding + stage.building(reading=True)
    count = sum(local.copies * sum(not build.sources for build in local.builds) for local in stage.parts)
    wanted = senders + count * size
    if min(unit.layout.size for unit in units) >= max(len(build.acquires) for build in fresh):
        return received * ceil(log2(wanted / senders) - 1e-9)
    first = max(1.0, min(build.moved_bytes for build in fresh) / senders / received)
    growth = received * max(len(build.acquires) / build.moved_bytes for build in fresh)
    return received * _rounds(wanted / senders, growth, first)


def _rounds(times: float, growth: float, first: float) -> float:
    """How often `received_bytes` it takes until there are `times` as many devices, where few may send to more.

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
