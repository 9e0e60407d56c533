"""Constants of an engine's kernels come out of tables that were made from them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmarks.planner.fit_experts import fit, latent, timed

from nereus.clusters.named import machine

(KIND,) = machine("h100").kinds.values()
TRUE = np.array([2e-5, 3e-7, 0.3])
SHAPES = ((4096, 1536, 128, 8), (2048, 768, 128, 8))


def written(path: Path, columns: str, rows: Sequence[tuple[object, ...]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns.split(), *rows])
    return path


def test_experts(tmp_path: Path) -> None:
    columns = (
        "num_tokens hidden_size inter_size num_experts topk moe_tp_size moe_ep_size moe_dtype distribution latency"
    )
    sizes = [
        (n, *shape, tp, 1, "bfloat16", "balanced") for shape in SHAPES for n in (1, 32, 512, 16384) for tp in (1, 8)
    ]
    ignored = (64, *SHAPES[0], 1, 8, "bfloat16", "balanced", 99.0)
    unknown = timed(written(tmp_path / "a.csv", columns, [(*each, 1.0) for each in sizes]), KIND)
    milliseconds = np.concatenate([1e3 * unknown[shape].predicted(TRUE) for shape in SHAPES])
    known = [(*each, ms) for each, ms in zip(sizes, milliseconds, strict=True)]
    shapes = timed(written(tmp_path / "b.csv", columns, [*known, ignored]), KIND)
    assert fit(list(shapes.values())) == pytest.approx(TRUE, rel=0.01)


def test_latent_attention(tmp_path: Path) -> None:
    columns = "num_heads batch_size step kv_cache_dtype gemm_type latency"
    sizes = [(h, b, s, "bfloat16", "bfloat16") for h in (128, 8) for b in (1, 64) for s in (64, 4096)]
    found, with_found, _ = latent(written(tmp_path / "a.csv", columns, [(*each, 1.0) for each in sizes]), KIND)
    milliseconds = 1e3 * (with_found - found + 4e-5)
    known = [(*each, ms) for each, ms in zip(sizes, milliseconds, strict=True)]
    again, predicted, measured = latent(written(tmp_path / "b.csv", columns, known), KIND)
    assert again == pytest.approx(4e-5, rel=0.01)
    assert predicted == pytest.approx(measured, rel=0.01)
