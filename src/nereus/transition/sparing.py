"""An order that was found, or one that gives up fewer units: fewer bytes, where it does not take that much longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus.core import Destroy, EMUSet, InfeasibleError, ModelStage, StateSchema, TransitionDAG
from nereus.transition.bound import bound_bytes
from nereus.transition.cheapest import cheapest
from nereus.transition.crowd import Crowd
from nereus.transition.decompose import LocalDAG, decompose
from nereus.transition.fit import check
from nereus.transition.lead import Lead
from nereus.transition.room import Room
from nereus.transition.schedule import IN_PLACE, Aim, Memory, schedule
from nereus.transition.site import Site

FEW_DEVICES, TRIES = 16, 2_000
"""Where there are more devices, nothing better is looked for; groups looked at before the best is taken."""


def spared(dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], memory: Memory, site: Site) -> TransitionDAG:
    """`dag`, or the order that gives up least, if it saves a larger share of the bytes than it takes longer."""
    in_lots = sum(len(lot.copies) * len(lot.copies[0]) for lot in dag.lots)  # their primitives are not made for this
    if not memory.capacity or (in_lots or len(dag.devices)) > FEW_DEVICES:
        return dag
    start, goal = dag.start, dag.goal
    locals_ = [decompose(start.of(ms), goal.of(ms), schemas[ms], (), site.node_of) for ms in goal.model_stages]
    crowd = crowd_of(start, goal, schemas, locals_, memory)
    lost = _lost_bytes(dag, crowd)
    found = cheapest(crowd, TRIES, lost) if lost else None
    if found is None:
        return dag
    try:
        other = led(start, goal, found.lead, locals_, schemas, memory, site)
    except InfeasibleError:  # there is an order already
        return dag
    moved = sum(build.moved_bytes for local in locals_ for build in local.builds)
    shorter = other.span_bytes * (moved + found.lost_bytes) <= dag.span_bytes * (moved + lost)
    return other if shorter else dag


def crowd_of(
    start: EMUSet,
    goal: EMUSet,
    schemas: Mapping[ModelStage, StateSchema],
    locals_: Sequence[LocalDAG],
    memory: Memory,
) -> Crowd:
    """The units on the devices that could run short."""
    builds = [build for local in locals_ for build in local.builds]
    tight = Room(memory.used, memory.capacity, builds, memory.buffer_bytes).capacity
    return Crowd(start, goal, schemas, tight, memory.other)


def led(
    start: EMUSet,
    goal: EMUSet,
    lead: Lead,
    locals_: Sequence[LocalDAG],
    schemas: Mapping[ModelStage, StateSchema],
    memory: Memory,
    site: Site,
) -> TransitionDAG:
    """The order that a lead begins, which fits; `locals_` read every old unit."""
    unread, stages = set(lead.unread), [local.model_stage for local in locals_]
    again = [decompose(start.of(ms), goal.of(ms), schemas[ms], unread, site.node_of) for ms in stages]
    waited_for = {} if lead.offloaded else memory.capacity  # what is staged waits for no copy
    aim = Aim(bound_bytes(locals_, memory.used, waited_for, site))
    dag = schedule(start, goal, {IN_PLACE: again}, memory, site, lead, aim)
    check(dag, memory.used, memory.capacity, memory.buffer_bytes)
    return dag


def _lost_bytes(dag: TransitionDAG, crowd: Crowd) -> int:
    """Bytes that goal units receive of what old units on their own devices had before they left."""
    old, new = ({place.unit: place for place in places} for places in (crowd.old, crowd.new))
    built = lost = 0
    for primitive in dag.primitives:
        if isinstance(primitive, Destroy):
            lost += crowd.lost(old[primitive.sources[0]], built)
        else:
            for unit in primitive.targets:
                built |= new[unit].bit if unit in new else 0
    return lost
