"""Seconds and bytes of a transition before it runs, from closed forms over what is alike (D6.8)."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.core import Calibration, Cluster, ModelStage, StateSchema, TransitionDAG, TransitionEstimate
from nereus.transition.fit import peak_bytes
from nereus.transition.minimum import composed_bytes, minimum_bytes
from nereus.transition.timeline import Loads, critical_path, timeline


def estimate(
    dag: TransitionDAG, schemas: Mapping[ModelStage, StateSchema], cluster: Cluster, calibration: Calibration
) -> TransitionEstimate:
    """What `dag` is expected to take: `transition_overhead_s + transition_scale * ideal` seconds, nothing for no steps.

    The ideal is the critical path: a primitive waits for its predecessors and for its devices, and takes as long as
    its busiest device needs to send or to receive over each kind of link. Peaks include
    staging buffers and the communication group.
    """
    loads = Loads(dag, schemas, cluster)
    spans = timeline(dag, loads.of)
    ideal_s = max((span.end_s for span in spans.values()), default=0.0)
    seconds = calibration.transition_overhead_s + calibration.transition_scale * ideal_s if dag.primitives else 0.0
    intra = sum(load.intra_bytes for load in loads.of.values())
    inter = sum(load.inter_bytes for load in loads.of.values())
    changed = [ms for ms in dag.start.model_stages if dag.start.of(ms) != dag.goal.of(ms)]
    return TransitionEstimate(
        seconds=seconds,
        peak_bytes=peak_bytes(dag, schemas, loads.buffer_bytes()),
        link_bytes={"intra": intra, "inter": inter},
        moved_bytes=intra + inter,
        minimum_bytes=sum(minimum_bytes(schemas[ms], dag.start.of(ms), dag.goal.of(ms)) for ms in changed),
        composed_bytes=sum(composed_bytes(schemas[ms], dag.start.of(ms), dag.goal.of(ms)) for ms in changed),
        critical_path=critical_path(spans),
    )
