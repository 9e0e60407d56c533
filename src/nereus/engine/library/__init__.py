"""The engine for frameworks: describe tensors and who holds which box of them, get routes, run them over your groups.

    tensors, source = describe(shards, group)         # or LogicalTensor and Placement written by hand
    plan = plan_routes(tensors.values(), source, target)
    new = allocate(tensors, target, rank)
    report = reshard(plan, old, new, group)           # report.fresh: streams that this rank has to start

Ranks are ranks of the group. Needs neither a coordinator nor the job's layout classes.
"""

from nereus.engine.library.describe import Shard, allocate, describe, staying
from nereus.engine.library.execute import Options, Report, reshard
from nereus.engine.library.fused import grouped, interleaved, stacked
from nereus.engine.library.modules import module_tensors
from nereus.engine.library.optimizer import optimizer_shards, restore_optimizer, target_shards
from nereus.engine.library.streams import stream_name, stream_seed, stream_shard
from nereus.transition.boxes import BoxPlan, LogicalTensor, Placement, Route, plan_routes
from nereus.transition.positions import place_positions
from nereus.transition.region import Region

__all__ = [
    "BoxPlan",
    "LogicalTensor",
    "Options",
    "Placement",
    "Region",
    "Report",
    "Route",
    "Shard",
    "allocate",
    "describe",
    "grouped",
    "interleaved",
    "module_tensors",
    "optimizer_shards",
    "place_positions",
    "plan_routes",
    "reshard",
    "restore_optimizer",
    "stacked",
    "staying",
    "stream_name",
    "stream_seed",
    "stream_shard",
    "target_shards",
]
