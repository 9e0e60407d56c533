"""Seconds and bytes of a transition before it runs, from closed forms over what is alike (D6.8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from nereus.core import Calibration, Cluster, ModelStage, StateSchema, TransitionDAG, TransitionEstimate
from nereus.transition.fit import peak_bytes
from nereus.transition.minimum import minimum_and_composed_bytes
from nereus.transition.timeline import Loads, critical_path, timeline, with_groups


def estimate(
    dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], cluster: Cluster, calibration: Calibration
) -> TransitionEstimate:
    """What `dag` is expected to take: `transition_overhead_s + transition_scale * ideal` seconds, nothing for no steps.

    The ideal is the critical path: a primitive waits for its predecessors and for its devices, and takes as long as
    its busiest device needs to send or to receive over each kind of link. Peaks include
    staging buffers and the communication group.
    """
    ideal_s, critical = 0.0, tuple[str, ...]()
    links = Counter(intra=0, inter=0)
    buffers: dict[int, int] = {}
    for lot in dag.lots or (None,):
        part, copies = (lot.dag, len(lot.copies)) if lot else (dag, 1)
        loads = Loads(part, schemas, cluster)
        spans = timeline(part, loads.of)
        end_s = max([span.end_s for span in spans.values()], default=0.0)
        if end_s > ideal_s:
            path = critical_path(spans)
            ideal_s, critical = end_s, tuple(map(lot.named, path)) if lot else path
        links["intra"] += copies * sum([load.intra_bytes for load in loads.of.values()])
        links["inter"] += copies * sum([load.inter_bytes for load in loads.of.values()])
        buffers |= lot.everywhere(loads.staging_bytes) if lot else loads.staging_bytes
    seconds = 0.0 if dag.idle else calibration.transition_overhead_s + calibration.transition_scale * ideal_s
    changed = [ms for ms in dag.start.model_stages if dag.start.blocks(ms) != dag.goal.blocks(ms)]
    ends = [minimum_and_composed_bytes(schemas[ms], dag.start.blocks(ms), dag.goal.blocks(ms)) for ms in changed]
    return TransitionEstimate(
        seconds=seconds,
        peak_bytes=peak_bytes(dag, schemas, with_groups(buffers, cluster)),
        link_bytes=dict(links),
        moved_bytes=links.total(),
        minimum_bytes=sum(least for least, _ in ends),
        composed_bytes=sum(composed for _, composed in ends),
        critical_path=critical,
    )
