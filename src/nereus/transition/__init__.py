"""Units now and a target → placed goal, primitives, schedule, memory check, routes, estimate. Pure."""

from nereus.transition.budget import Budget
from nereus.transition.compile import compile, connect
from nereus.transition.composed import compose
from nereus.transition.decompose import LocalDAG, decompose
from nereus.transition.estimate import estimate
from nereus.transition.fit import fit, peak_bytes, stored_bytes
from nereus.transition.minimum import composed_bytes, minimum_bytes
from nereus.transition.place import place
from nereus.transition.routes import (
    alias_source,
    aliased,
    expand_flows,
    flows_of,
    goal_units,
    local_copies,
    moves_of,
    pair_bytes,
    routes,
    source_units,
)
from nereus.transition.schedule import BlockedError, schedule
from nereus.transition.site import Site
from nereus.transition.timeline import Load, Loads, Span, critical_path, timeline

__all__ = [
    "BlockedError",
    "Budget",
    "Load",
    "Loads",
    "LocalDAG",
    "Site",
    "Span",
    "alias_source",
    "aliased",
    "compile",
    "compose",
    "composed_bytes",
    "connect",
    "critical_path",
    "decompose",
    "estimate",
    "expand_flows",
    "fit",
    "flows_of",
    "goal_units",
    "local_copies",
    "minimum_bytes",
    "moves_of",
    "pair_bytes",
    "peak_bytes",
    "place",
    "routes",
    "schedule",
    "source_units",
    "stored_bytes",
    "timeline",
]
