"""Seconds of training steps as llm-analysis predicts them; run by the interpreter of an environment that has it.

    make baselines
    build/llm-analysis/bin/python -P benchmarks/baselines/llm_analysis.py

Reads a JSON list of runs from standard input and writes a JSON list of [step, passes] to standard output: the seconds
of an iteration as the tool states them, and those of as many of its forward passes (with their TP communication) as an
iteration has. A run it refuses is null.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

EFFICIENCY = 0.5
"""Of arithmetic; whoever compares scales all answers anyway."""

PASSES = 4
"""Of a model in one step with full recomputation: forward, again, and twice as long backward."""


def seconds(run: dict[str, Any]) -> list[float] | None:
    """One iteration of one run."""
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis  # type: ignore[import-not-found]
    from llm_analysis.config import ModelConfig, ParallelismConfig, get_gpu_config_by_name  # type: ignore[import-not-found]

    model = ModelConfig(
        name="gpt", num_layers=run["layers"], n_head=run["heads"], hidden_dim=run["hidden"],
        vocab_size=run["vocabulary"], max_seq_len=run["seq_len"], ffn_embed_dim=4 * run["hidden"],
    )  # fmt: skip
    layout = ParallelismConfig(tp_size=run["tp"], pp_size=run["pp"], dp_size=run["dp"])
    tool = LLMAnalysis(
        model, get_gpu_config_by_name(run["gpu"]), parallelism_config=layout, flops_efficiency=EFFICIENCY
    )
    try:
        found = tool.training(
            batch_size_per_gpu=run["micro_batch"],
            gradient_accumulation_steps=run["global_batch"] // (run["micro_batch"] * run["dp"]),
            global_batch_size=run["global_batch"],
            seq_len=run["seq_len"],
            activation_recomputation=ActivationRecomputation.FULL,
            flash_attn=False,
        )
    except AssertionError:
        return None
    accumulated = found["latency_per_iter"] / found["latency_per_micro_batch"]
    return [found["latency_per_iter"], PASSES * accumulated * found["latency_fwd"]]


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    answers = [seconds(run) for run in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)
