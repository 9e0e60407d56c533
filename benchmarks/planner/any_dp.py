"""What a replica count between powers of two is worth: training at dp 3 against dp 2 on three paced devices, measured.

    python -m benchmarks.planner.any_dp [--repeats 4] [--json FILE]

One GRPO job runs the same samples again and again (its learning rate is zero) and moves live between two plans, every
model-stage at dp 2 or at dp 3, in turns. 32 sequences a mini-batch do not divide by three: shares are 11, 11 and 10.
Beside the medians stands what the planner predicts before the first step, and after it has learnt from the steps at
dp 2 alone. Devices are held to a share of a core, so seconds say nothing of this machine; ratios count. A machine busy
with other work slows three workers more than two: the ratio of the busiest devices' CPU time is disturbed less, and
wall over CPU time, little above 1 on a quiet machine, says how much the seconds are worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks._common import FixedLength, running
from benchmarks._result import Result
from benchmarks.plan_choice import Bench, SameStep
from nereus.algorithms.grpo import Grpo
from nereus.clusters.local import Local
from nereus.core import Assignment, Candidate, Capabilities, Layout, Lengths, Observation, Plan, Workload
from nereus.core.model_dir import ModelDir
from nereus.cost.calibrate import learn
from nereus.cost.step import StepModel
from nereus.families.llama import Llama
from nereus.trainer.config import JobConfig, ModelSource, OptimizerConfig, SamplingConfig

DEVICES, SPEED, CAPACITY = 3, 0.1, "256 MiB"
POWER, ANY = 2, 3
"""The replicas compared: the largest power of two that three devices allow, and all three."""
SEQUENCES, MICRO_BATCH = 32, 4
PROMPT_TOKENS, RESPONSE_TOKENS = 120, 8
REPEATS, STEPS = 4, 2
"""Visits to each plan, and the counted steps of a visit; one more before them is not counted."""
UPDATE, STEP = "update_actor", "step"
COMPUTE = ("prefill", "decode", "forward", "backward", "optimizer")
"""Operation classes timed by the CPU time of the busiest device, divided by its speed."""
SIZES = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=PROMPT_TOKENS + RESPONSE_TOKENS,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


@dataclass(slots=True)
class Found:
    """Seconds by dp of every call and, as `step`, of the step; measured also of the CPU, under `cpu_name`."""

    visits: dict[int, list[list[Mapping[str, float]]]] = field(default_factory=lambda: {POWER: [], ANY: []})
    """Measured: the counted steps of each visit."""
    before: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Predicted before the first step."""
    learnt: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Predicted after the steps at the power of two."""

    def measured_s(self, dp: int, name: str) -> list[float]:
        """Of a call or the step, every counted step."""
        return [step[name] for visit in self.visits[dp] for step in visit]

    def pairs(self, name: str) -> list[float]:
        """The ratio of every two visits that followed each other, by their medians."""
        power, other = (
            [statistics.median(step[name] for step in visit) for visit in self.visits[dp]] for dp in (POWER, ANY)
        )
        return [a / b for a, b in zip(power, other, strict=True)]


def run(data: Path) -> list[Result]:  # noqa: ARG001
    """The lines of the table; nothing is read from the public tables."""
    return lines(measure())


def measure(repeats: int = REPEATS, steps: int = STEPS, sizes: LlamaConfig = SIZES) -> Found:
    """Run the job and ask the planner."""
    found, source = Found(), Local(DEVICES, CAPACITY, SPEED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        torch.manual_seed(0)
        logging.disable_progress_bar()
        LlamaForCausalLM(sizes).save_pretrained(path)
        config = job_config(path)
        plans = {dp: plan(config, dp) for dp in (POWER, ANY)}
        model = StepModel(config.algorithm.workflow(config.specs), config.workload, source.cluster())
        found.before = predicted(model, plans)
        with running(config, source, plans[POWER], Path(folder, "runs"), SameStep) as (job, executor):
            bench = Bench(job, executor)
            for dp in turns(repeats):
                bench.move(plans[dp])
                counted = list(bench.steps(steps + 1))[1:]
                found.visits[dp].append([seconds(seen) for seen in counted])
                for seen in counted if dp == POWER else ():
                    calibration = learn(model, plans[dp], seen)
                    model = StepModel(model.workflow, model.workload, model.cluster, calibration)
    found.learnt = predicted(model, plans)
    return found


def seconds(seen: Observation) -> dict[str, float]:
    """What one step took."""
    cpu_s = {STEP: 0.0}
    for key, timing in seen.timings.items():
        call, _, name = key.partition(":")
        if name in COMPUTE:
            cpu_s[call] = cpu_s.get(call, 0.0) + timing.measured_s
            cpu_s[STEP] += timing.measured_s
    return {**seen.call_s, STEP: seen.step_s or 0.0} | {cpu_name(each): took for each, took in cpu_s.items()}


def cpu_name(name: str) -> str:
    """The key of the CPU seconds of a call or the step."""
    return f"{name} (CPU)"


def turns(repeats: int) -> list[int]:
    """The order of visits, forwards and backwards, so that a machine that slowly changes favours neither side."""
    return [dp for turn in range(repeats) for dp in ((POWER, ANY) if turn % 2 == 0 else (ANY, POWER))]


def job_config(path: Path) -> JobConfig:
    """GRPO, one mini-batch a step, every step alike."""
    source = ModelSource(str(path), Llama().spec(ModelDir.read(path).config))
    return JobConfig(
        algorithm=Grpo(reward_model=False),
        task=FixedLength(source.spec.vocab, PROMPT_TOKENS),
        models={"actor": source, "reference": source},
        workload=Workload(
            prompts=SEQUENCES // 4,
            samples_per_prompt=4,
            prompt=Lengths.constant(PROMPT_TOKENS),
            response=Lengths.constant(RESPONSE_TOKENS),
            mini_batch=SEQUENCES,
            max_response_tokens=RESPONSE_TOKENS,
        ),
        optimizers={"actor": OptimizerConfig(lr=0.0)},
        sampling=SamplingConfig(max_response_tokens=RESPONSE_TOKENS),
        capabilities=Capabilities(recompute=("none",)),
        steps=10**9,
    )


def plan(config: JobConfig, dp: int) -> Plan:
    """Every model-stage with `dp` replicas of one device each; generation decodes its whole share at once."""
    units = tuple((device,) for device in range(dp))
    assignments = []
    for model_stage in config.algorithm.workflow(config.specs).model_stages:
        decodes = str(model_stage) == "actor/generation"
        candidate = Candidate(model_stage, Layout(), dp, SEQUENCES if decodes else MICRO_BATCH)
        assignments.append(Assignment(candidate, units))
    return Plan(tuple(assignments))


def predicted(model: StepModel, plans: Mapping[int, Plan]) -> dict[int, Mapping[str, float]]:
    """Seconds of calls and step under each plan."""
    return {dp: {**model.call_s(plan), STEP: model.estimate(plan).step_s} for dp, plan in plans.items()}


def lines(found: Found) -> list[Result]:
    """The actor's update and the whole step, each as measured and as predicted."""
    made = []
    for name, label in ((UPDATE, "actor's update"), (STEP, "whole step")):
        ours, other = (statistics.median(found.measured_s(dp, name)) for dp in (ANY, POWER))
        ours_cpu, other_cpu = (statistics.median(found.measured_s(dp, cpu_name(name))) for dp in (ANY, POWER))
        first, learnt = (side[POWER][name] / side[ANY][name] for side in (found.before, found.learnt))
        pairs = found.pairs(name)
        notes = (
            f"{DEVICES} devices at {SPEED:g} of a core, {len(pairs)} visits each, "
            f"ratio {min(pairs):.2f} to {max(pairs):.2f} by visit, {other_cpu / ours_cpu:.3f} by CPU time "
            f"(wall / CPU {ours / ours_cpu:.2f} against {other / other_cpu:.2f}); "
            f"predicted {learnt:.3f} after the steps at dp {POWER}, {first:.3f} before any"
        )
        details = {
            "measured_s": {dp: found.measured_s(dp, name) for dp in (POWER, ANY)},
            "measured_cpu_s": {dp: found.measured_s(dp, cpu_name(name)) for dp in (POWER, ANY)},
            "predicted_learnt_s": {dp: found.learnt[dp][name] for dp in (POWER, ANY)},
            "predicted_before_s": {dp: found.before[dp][name] for dp in (POWER, ANY)},
        }
        title = f"{label}, dp {ANY} against {POWER}, s"
        made.append(Result(title, "report", ours, other, other / ours, notes=notes, details=details))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.any_dp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="visits to each plan")
    parser.add_argument("--json", type=Path, help="also write every number here")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: must be at least 1")
    found = lines(measure(given.repeats))
    for line in found:
        print(f"{line.name}: {line.measured:.2f} against {line.baseline:.2f}, ratio {line.ratio:.3f} ({line.notes})")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([line.as_json for line in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
