"""What no order can beat, in the model of a run: a lower bound of its span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus.transition.decompose import LocalDAG
from nereus.transition.demand import Stage, stages_of
from nereus.transition.doubling import doubled_bytes
from nereus.transition.occupancy import occupied_bytes
from nereus.transition.releasing import releases_of
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
    releases = releases_of(stages)
    found = max(occupied_bytes(stages), releases.span, doubled_bytes(stages, releases))
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
