"""Flags of Megatron-LM for each trained model. Names: megatron/training/arguments.py of Megatron-LM core 0.13."""

from __future__ import annotations

from nereus.core import Candidate, ModelStage
from nereus.integrations.export import Exported

STAGES = {
    "first": "--decoder-first-pipeline-num-layers",
    "last": "--decoder-last-pipeline-num-layers",
    "layout": "--pipeline-model-parallel-layout",
}


def lines(asked: Exported) -> list[str]:
    """A comment with the devices, then the flags, for every trained model-stage."""
    trained = [ms for ms in asked.plan.model_stages if asked.workflow.updated(ms)]
    return [line for ms in trained for line in _trained(asked, ms)]


def _trained(asked: Exported, model_stage: ModelStage) -> list[str]:
    candidate = asked.plan.of(model_stage).candidate
    asked.whole_shares(candidate, updated=True)
    share = asked.workload.mini_batch // candidate.dp
    if share % candidate.micro_batch:
        raise asked.refuse(model_stage, f"micro-batch {candidate.micro_batch} does not divide a share of {share}")
    if candidate.zero > 1:
        raise asked.refuse(
            model_stage, f"ZeRO-{candidate.zero}: its distributed optimizer shards optimizer state alone"
        )
    nodes, each = asked.grid(asked.devices(model_stage), model_stage)
    return [
        f"# {model_stage}: {nodes} nodes x {each} devices, dp {candidate.dp}",
        *flags(asked, candidate),
        f"--micro-batch-size {candidate.micro_batch}",
        f"--global-batch-size {asked.workload.mini_batch}",
    ]


def flags(asked: Exported, candidate: Candidate) -> list[str]:
    """Degrees, stages and recomputation."""
    layout = candidate.layout
    found = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {candidate.cp}",
        f"--expert-model-parallel-size {candidate.ep}",
        *(f"{STAGES[name]} {value}" for name, value in asked.stage_keys(candidate).items()),
    ]
    if candidate.vpp > 1:
        found.append(f"--num-virtual-stages-per-pipeline-rank {candidate.vpp}")
    if candidate.sequence_parallel:
        found.append("--sequence-parallel")
    if candidate.zero == 1:
        found.append("--use-distributed-optimizer")
    if candidate.recompute == "full":
        found += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif candidate.recompute == "selective":
        found.append("--recompute-granularity selective")
    return found
