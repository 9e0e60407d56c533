"""Tokens per second of one unpaced unit (tp 1, pp 1) against a plain transformers loop, and step time at dp 1 and 2.

    python -m benchmarks.step [--repeats 3] [--json]

Ours is the real job: a GRPO step on worker processes, timed at the coordinator. Theirs is `generate(use_cache=True)`
with sampling, and forward, backward and `torch.optim.AdamW` on the tokens that our job trained on. Both sides run the
same randomly initialised model in fp32 on one thread, in turns; medians count. Beside the wall time stands the CPU time
(for ours what the worker's decoder uses), which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks._common import FixedLength, running
from nereus.algorithms.grpo import Grpo
from nereus.clusters.local import Local
from nereus.core import Assignment, Candidate, Layout, Lengths, Plan, Workload
from nereus.core.model_dir import ModelDir
from nereus.families.llama import Llama
from nereus.trainer.config import JobConfig, ModelSource, OptimizerConfig, SamplingConfig
from nereus.trainer.job import RLJob

BATCH, PROMPT_TOKENS, RESPONSE_TOKENS = 16, 128, 128
LEARNING_RATE = 1e-5
CAPACITY = "8 GiB"
TARGET = 0.7
SIZES = LlamaConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one piece of work."""

    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class Sides:
    """Every repeat of one kind of work on both sides, `tokens` each."""

    tokens: int
    ours: list[Took] = field(default_factory=list)
    theirs: list[Took] = field(default_factory=list)

    def summary(self, clock: str) -> dict[str, float]:
        """Tokens per second on both sides by `wall_s` or `cpu_s`, medians."""
        ours, theirs = (statistics.median(getattr(t, clock) for t in side) for side in (self.ours, self.theirs))
        return {"nereus": self.tokens / ours, "transformers": self.tokens / theirs, "ratio": theirs / ours}


class Plain:
    """The transformers loop."""

    def __init__(self, path: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.generation = GenerationConfig(
            do_sample=True,
            top_k=0,
            top_p=1.0,
            min_new_tokens=RESPONSE_TOKENS,
            max_new_tokens=RESPONSE_TOKENS,
            use_cache=True,
            pad_token_id=0,
        )

    def generate(self, prompts: torch.Tensor) -> None:
        """Sample a response to every prompt."""
        self.model.eval()
        with torch.inference_mode():
            found = self.model.generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=self.generation
            )
        if found.shape[1] != PROMPT_TOKENS + RESPONSE_TOKENS:
            raise RuntimeError(f"transformers made {found.shape[1] - PROMPT_TOKENS} tokens, not {RESPONSE_TOKENS}")

    def train(self, tokens: torch.Tensor) -> None:
        """One update on whole sequences; as ours, only the response tokens need logits."""
        self.model.train()
        self.optimizer.zero_grad()
        logits = self.model(tokens, use_cache=False, logits_to_keep=RESPONSE_TOKENS + 1).logits[:, :-1]
        targets = tokens[:, -RESPONSE_TOKENS:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()


def job_config(path: Path, steps: int) -> JobConfig:
    """GRPO, one update a step."""
    spec = Llama().spec(ModelDir.read(path).config)
    source = ModelSource(str(path), spec)
    return JobConfig(
        algorithm=Grpo(reward_model=False),
        task=FixedLength(SIZES.vocab_size, PROMPT_TOKENS),
        models={"actor": source, "reference": source},
        workload=Workload(
            prompts=BATCH // 4,
            samples_per_prompt=4,
            prompt=Lengths.constant(PROMPT_TOKENS),
            response=Lengths.constant(RESPONSE_TOKENS),
            mini_batch=BATCH,
            max_response_tokens=RESPONSE_TOKENS,
        ),
        optimizers={"actor": OptimizerConfig(lr=LEARNING_RATE)},
        sampling=SamplingConfig(max_response_tokens=RESPONSE_TOKENS),
        steps=steps,
        timeout_s=300.0,
    )


def plan(config: JobConfig, dp: int) -> Plan:
    """Every model-stage with `dp` replicas on the first devices, its whole share one micro-batch."""
    units = tuple((device,) for device in range(dp))
    stages = config.algorithm.workflow(config.specs).model_stages
    return Plan(tuple(Assignment(Candidate(ms, Layout(), dp, BATCH // dp), units) for ms in stages))


def compare(path: Path, repeats: int, run_dir: Path) -> tuple[dict[str, Sides], list[float]]:
    """Generation and training of both sides in turns, after a warm-up of each; also the seconds of our whole steps."""
    found = {
        "generation": Sides(BATCH * RESPONSE_TOKENS),
        "training": Sides(BATCH * (PROMPT_TOKENS + RESPONSE_TOKENS)),
    }
    steps: list[float] = []
    plain, config = Plain(path), job_config(path, repeats + 1)
    with running(config, Local(1, CAPACITY), plan(config, 1), run_dir) as (job, _):
        for boundary in job.boundaries():
            prompts, tokens = _tokens(job)
            theirs = _timed(lambda: plain.generate(prompts)), _timed(lambda: plain.train(tokens))  # noqa: B023
            if boundary.step == 1:
                continue
            steps.append(job.metrics["timing_s/step"])
            for sides, call, took in zip(found.values(), ("generate", "update_actor"), theirs, strict=True):
                sides.theirs.append(took)
                sides.ours.append(Took(job.call_s[call], sum(job.accounts.timings[call][0].values())))
    return found, steps


def step_times(path: Path, dp: int, repeats: int, run_dir: Path) -> list[float]:
    """Seconds of each step at `dp` replicas on unpaced devices, without the first."""
    config = job_config(path, repeats + 1)
    with running(config, Local(dp, CAPACITY, oversubscribe=True), plan(config, dp), run_dir) as (job, _):
        return [job.metrics["timing_s/step"] for _ in job.boundaries()][1:]


def _tokens(job: RLJob) -> tuple[torch.Tensor, torch.Tensor]:
    columns = job.table.columns if job.table is not None else {}
    prompts, responses = (torch.from_numpy(columns[f"{name}_tokens"]) for name in ("prompt", "response"))
    return prompts, torch.cat([prompts, responses], 1)


def _timed(work: Callable[[], None]) -> Took:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def measure(repeats: int) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as folder:
        path, runs = Path(folder, "model"), Path(folder, "runs")
        torch.manual_seed(0)
        model = LlamaForCausalLM(SIZES)
        model.save_pretrained(path)
        sides, one = compare(path, repeats, runs)
        two = step_times(path, 2, max(2, repeats - 1), runs)
    return {
        "parameters": model.num_parameters(),
        "repeats": repeats,
        "tokens_per_s": {
            name: {clock: both.summary(clock) for clock in ("wall_s", "cpu_s")} for name, both in sides.items()
        },
        "step_s": {"dp1": statistics.median(one), "dp2": statistics.median(two)},
        "measured": {name: asdict(both) for name, both in sides.items()} | {"dp1_s": one, "dp2_s": two},
    }


def report(found: dict[str, Any]) -> str:
    """The comparison as a table."""
    lines = [
        f"{found['parameters'] / 1e6:.1f} M parameters, fp32, batch {BATCH}, "
        f"{PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens, one thread, medians of {found['repeats']}",
        f"{'tokens/s':<12}{'by':<10}{'nereus':>8}{'transformers':>14}{'ratio':>8}",
    ]
    for name, clocks in found["tokens_per_s"].items():
        for clock, row in clocks.items():
            by = {"wall_s": "wall time", "cpu_s": "CPU time"}[clock]
            lines.append(f"{name:<12}{by:<10}{row['nereus']:>8.0f}{row['transformers']:>14.0f}{row['ratio']:>8.2f}")
    one, two = (found["step_s"][f"dp{dp}"] for dp in (1, 2))
    lines.append(f"step of the job, unpaced: dp 1 {one:.2f} s, dp 2 {two:.2f} s ({one / two:.2f}x)")
    low = [name for name, clocks in found["tokens_per_s"].items() if clocks["wall_s"]["ratio"] < TARGET]
    lines.append(f"target of {TARGET}x: " + (f"missed by {', '.join(low)}" if low else "met"))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats of each side, at least 3 to compare")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    found = measure(options.repeats)
    print(json.dumps(found, indent=1) if options.json else report(found))


if __name__ == "__main__":
    main()
