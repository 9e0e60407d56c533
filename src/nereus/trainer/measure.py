"""What a finished step says: the observation for the controller and the metrics for people (names as in verl, D8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nereus.core import Boundary, Lengths, Observation, Timing
from nereus.trainer.calls import Accounts
from nereus.trainer.config import JobConfig
from nereus.trainer.table import SampleTable

TIMING_NAMES = {
    "generate": "gen",
    "generate_greedy": "gen_max",
    "reference_log_probs": "ref",
    "old_log_probs": "old_log_prob",
    "reward_scores": "reward",
}


def observation(
    boundary: Boundary, table: SampleTable | None, accounts: Accounts, call_s: Mapping[str, float], **facts: Any
) -> Observation:
    """Facts since the last boundary; lengths only where responses were generated."""
    lengths: dict[str, Any] = {}
    tokens = 0
    if table is not None and "response_lengths" in table.columns:
        lengths["response"] = Lengths.measured(table.columns["response_lengths"].tolist())
        tokens = int(table.columns["response_lengths"].sum())
    if table is not None:
        lengths["prompt"] = Lengths.measured(table.columns["prompt_lengths"].tolist())
    return Observation(
        boundary=boundary, timings=timings(accounts), call_s=dict(call_s), update_tokens=tokens, **lengths, **facts
    )


def timings(accounts: Accounts) -> dict[str, Timing]:
    """`call:class` → seconds on the call's busiest device."""
    found: dict[str, Timing] = {}
    for call, devices in accounts.timings.items():
        busiest = max(devices.values(), key=lambda classes: sum(classes.values()), default={})
        for name, seconds in busiest.items():
            found[f"{call}:{name}"] = Timing(seconds, 1)
    return found


def metrics(
    config: JobConfig, table: SampleTable, accounts: Accounts, call_s: Mapping[str, float], step_s: float
) -> dict[str, float]:
    """The metrics of one step."""
    columns = table.columns
    lengths = columns["response_lengths"]
    tokens = float(lengths.sum() + columns["prompt_lengths"].sum())
    found = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float((lengths >= config.sampling.max_response_tokens).mean()),
        "prompt_length/mean": float(columns["prompt_lengths"].mean()),
        "critic/rewards/mean": float(columns["rewards"].mean()),
        "verifier/mean": float(columns["verifier_scores"].mean()),
        "perf/time_per_step": step_s,
        "perf/total_num_tokens": tokens,
        "perf/throughput": tokens / step_s,
        "timing_s/step": step_s,
    }
    if "reward_scores" in columns:
        found["critic/score/mean"] = float(columns["reward_scores"].mean())
    found |= {name.removeprefix("stat/"): float(value) for name, value in columns.items() if np.ndim(value) == 0}
    found |= {f"timing_s/{TIMING_NAMES.get(call, call)}": seconds for call, seconds in call_s.items()}
    for call, sums in accounts.sums.items():
        role = call.removeprefix("update_")
        count = sums["mini_batches"]
        found |= {f"{role}/{name}": value / count for name, value in sums.items() if name != "mini_batches"}
    for role, optimizer in config.optimizers.items():
        updates = config.workload.updates * table.step
        if role in config.models:
            found[f"{role}/lr"] = optimizer.rate(updates)
    return found
