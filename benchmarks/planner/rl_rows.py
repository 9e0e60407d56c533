"""Published steps of NeMo RL's colocated GRPO jobs, as plans that the step model prices."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.clusters.named import machine
from nereus.core import Assignment, Candidate, Cluster, Layout, Lengths, ModelStage, Plan, Workflow, Workload, plugins
from nereus.core.ports import Algorithm
from nereus.cost.step import StepModel
from nereus.families.models import named
from nereus.integrations.habits import used_by
from nereus.planning.place import place

MODELS = {"DeepSeek V3": "DeepSeek-V3", "Qwen3-235B": "Qwen3-235B-A22B", "Qwen3-30B3A": "Qwen3-30B-A3B"}
MACHINES = {"H100": "h100", "GB200": "gb200"}
RECOMPUTED = ("Qwen3-235B", "DeepSeek V3")
"""Models whose recipes recompute activations (examples/configs/recipes/llm/performance of NVIDIA-NeMo/RL)."""
UNPACKED = (("DeepSeek V3", "GB200"),)
"""Recipes that turn packing off."""
PROMPT_TOKENS = 100
"""Of a problem of the mathematics sets that these jobs train on, about."""
ANSWERS = 32
"""To each prompt."""


@dataclass(frozen=True, slots=True)
class RLRow:
    """One published run: a plan, its model and the seconds of a step."""

    label: str
    model: StepModel
    plan: Plan
    seconds: float

    def predict(self) -> float:
        """Seconds of the step in the model."""
        return self.model.estimate(self.plan).step_s


def read(data: Path, host_bytes_per_s: float | None = None) -> tuple[list[RLRow], Counter[str]]:
    """The rows that can be priced, and how many others could not be, by reason.

    With `host_bytes_per_s` state moves to host memory and back so fast, else as is assumed of the framework.
    """
    rows, excluded = [], Counter[str]()
    with (data / "measured" / "nemo_rl_step_time.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            system = line["system"].split()[0]
            if line["model"] not in MODELS:
                excluded[f"family not named: {line['model']}"] += 1
            elif system not in MACHINES:
                excluded[f"device not named: {system}"] += 1
            elif line["policy"] != "On policy":
                excluded["asynchronous: how the devices are shared out is not stated"] += 1
            else:
                rows.append(_row(line, system, host_bytes_per_s))
    return rows, excluded


def _row(line: Mapping[str, str], system: str, host_bytes_per_s: float | None) -> RLRow:
    devices, sequences = int(line["gpus"]), int(line["gen_gbs"])
    precision = "fp8" if "FP8" in line["system"] else "bf16"
    size = len(machine(MACHINES[system]).ids)
    cluster = used_by("nemo-rl", machine(MACHINES[system], -(-devices // size)))
    if host_bytes_per_s is not None:
        kinds = {
            name: replace(kind, host_bytes_per_s=host_bytes_per_s, constants={**kind.constants, "offload.fetch": 1.0})
            for name, kind in cluster.kinds.items()
        }
        cluster = replace(cluster, kinds=kinds)
    algorithm: Algorithm = plugins.make("nereus.algorithms", "grpo", {})
    spec = named(MODELS[line["model"]])
    workflow = _verified(algorithm.workflow({model: spec for model in algorithm.models()}))
    mean, longest = (float(line[name]) - PROMPT_TOKENS for name in ("gen_avg_seq", "train_max_seq"))
    response = Lengths(mean, longest, longest)
    workload = Workload(
        sequences // ANSWERS,
        ANSWERS,
        Lengths.constant(PROMPT_TOKENS),
        response,
        mini_batch=int(line["train_gbs"]),
        max_response_tokens=int(longest),
        packed=(line["model"], system) not in UNPACKED,
    )
    plan = Plan(tuple(_placed(line, stage, cluster, precision) for stage in workflow.model_stages))
    label = f"{line['algorithm']} {line['model']} {system} x{devices}"
    return RLRow(label, StepModel(workflow, workload, cluster), plan, float(line["step_time_s"]))


def _verified(workflow: Workflow) -> Workflow:
    """The same step without a reward model: these jobs check answers by rule."""
    calls = tuple(call for call in workflow.calls if call.model_stage.model != "reward")
    return replace(workflow, calls=calls)


def _placed(line: Mapping[str, str], stage: ModelStage, cluster: Cluster, precision: str) -> Assignment:
    """Every model-stage on all devices, on the host while others work.

    A packed micro-batch has room for one sequence of the greatest length.
    """
    devices = int(line["gpus"])
    if stage.stage.value == "generation":
        tp, pp = json.loads(line["gen_tp_pp"])
        dp = devices // (tp * pp)
        candidate = Candidate(stage, Layout(tp, pp), dp, micro_batch=-(-int(line["gen_gbs"]) // dp), offload=True)
    else:
        tp, cp, ep, pp, vpp = (int(each) if each.isdigit() else 1 for each in _degrees(line))
        layout, dp = Layout(tp, pp), devices // (tp * cp * pp)
        packed = (line["model"], line["system"].split()[0]) not in UNPACKED
        fits = int(float(line["train_max_seq"]) // float(line["gen_avg_seq"])) if packed else 1
        again = "full" if line["model"] in RECOMPUTED and stage.stage.value == "training" else "none"
        candidate = Candidate(
            stage, layout, dp, fits, again, offload=True, zero=1, cp=cp, ep=ep, vpp=vpp, sequence_parallel=tp > 1,
            precision=precision,
        )  # fmt: skip
    return Assignment(candidate, place(candidate, [cluster.ids[:devices]]))


def _degrees(line: Mapping[str, str]) -> list[str]:
    return [each.strip() for each in line["train_tp_cp_ep_pp_vpp"].strip("[]").split(",")]


def describe(row: RLRow) -> str:
    """The row beside its prediction, by call."""
    calls = row.model.call_s(row.plan)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in calls.items())
    return f"{row.label}: measured {row.seconds:.1f} s, predicted {row.predict():.1f} s ({parts})"
