"""Small jobs, clusters and plans with which the cost model and the planner are tested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nereus.core import (
    Assignment,
    Call,
    Candidate,
    Cluster,
    Device,
    DeviceKind,
    Head,
    Layout,
    Lengths,
    Link,
    ModelSpec,
    ModelStage,
    Plan,
    Stage,
    Work,
    Workflow,
    Workload,
)

GENERATION = ModelStage("actor", Stage.GENERATION)
REFERENCE = ModelStage("reference", Stage.INFERENCE)
REWARD = ModelStage("reward", Stage.INFERENCE)
ACTOR = ModelStage("actor", Stage.TRAINING)
CRITIC = ModelStage("critic", Stage.TRAINING)

TINY = ModelSpec("llama", 2, 32, 4, 2, 8, 64, 96)
SMALL = ModelSpec("llama", 8, 128, 8, 4, 16, 352, 512)

SEQUENCES = ("prompts", "responses")
GENERATE = Call("generate", GENERATION, Work.GENERATE, ("prompts",), ("responses",))
REFERENCE_CALL = Call("reference_log_probs", REFERENCE, Work.FORWARD, SEQUENCES, ("reference",))
REWARD_CALL = Call("reward_scores", REWARD, Work.FORWARD, SEQUENCES, ("rewards",))
OLD = Call("old_log_probs", ACTOR, Work.FORWARD, SEQUENCES, ("old",))
VALUES = Call("values", CRITIC, Work.FORWARD, SEQUENCES, ("values",))

WORKLOAD = Workload(4, 2, Lengths.constant(8), Lengths(12, 18, 24), 4, 32)


def grpo(spec: ModelSpec = TINY) -> Workflow:
    """Three model-stages: generation, reference, training."""
    update = Call("update_actor", ACTOR, Work.UPDATE, (*SEQUENCES, "reference", "old"))
    return Workflow((GENERATE, REFERENCE_CALL, OLD, update), {"actor": spec, "reference": spec}, ((ACTOR, GENERATION),))


def ppo(spec: ModelSpec = TINY) -> Workflow:
    """All five model-stages."""
    scalar = replace(spec, head=Head.SCALAR)
    reads = (*SEQUENCES, "reference", "rewards", "old", "values")
    calls = (
        GENERATE,
        REFERENCE_CALL,
        REWARD_CALL,
        OLD,
        VALUES,
        Call("update_actor", ACTOR, Work.UPDATE, reads),
        Call("update_critic", CRITIC, Work.UPDATE, reads),
    )
    specs = {"actor": spec, "reference": spec, "critic": scalar, "reward": scalar}
    return Workflow(calls, specs, ((ACTOR, GENERATION),))


def cluster(devices: int, memory_bytes: int = 10**9, nodes: int = 1, **kind: Any) -> Cluster:
    """Equal devices, dealt to nodes in equal runs."""
    base = DeviceKind("cpu", memory_bytes, {"fp32": 1e10, "bf16": 1e10}, 4e9, 1e-5)
    per_node = -(-devices // nodes)
    links = {"intra": Link(1.5e9, 1e-4), "inter": Link(1e8, 5e-4)}
    return Cluster(
        tuple(Device(index, index // per_node, "cpu") for index in range(devices)),
        {"cpu": replace(base, **kind)},
        links,
    )


def assignment(
    model_stage: ModelStage, tp: int = 1, pp: int = 1, dp: int = 1, first: int = 0, **candidate: Any
) -> Assignment:
    """Units on consecutive devices from `first` on."""
    layout = Layout(tp, pp)
    units = tuple(tuple(range(first + unit * layout.size, first + (unit + 1) * layout.size)) for unit in range(dp))
    return Assignment(Candidate(model_stage, layout, dp, **{"micro_batch": 1, **candidate}), units)


def plan(*assignments: Assignment) -> Plan:
    """A plan of these assignments."""
    return Plan(assignments)


def colocated(workflow: Workflow, **candidate: Any) -> Plan:
    """Every model-stage with the same layout on the same devices."""
    return Plan(tuple(assignment(model_stage, **candidate) for model_stage in workflow.model_stages))
