"""Public tables of operation times, by machine type (see the README beside the tables for their sources)."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nereus.cost.kernel_fit import Attentions, Collectives, Gemms

Row = dict[str, str]

TYPES = {
    "A100-SXM4-80GB": "a100-80",
    "H100-SXM-80GB": "h100",
    "H200-SXM-141GB": "h200",
    "a100_sxm": "a100-80",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "gb200": "gb200",
}
OPERATIONS = {"alltoall": "all_to_all"}
NODES = {
    "2x p4de.24xlarge (8x A100-80GB, EFA 4x100Gb/s)": ("a100-80", 6.25e9),
    "2x p5.48xlarge (8x H100, EFA 32x100Gb/s)": ("h100", 50e9),
    "64x H100 with SHARP (8 a node, NDR IB)": ("h100", 50e9),
    "4x P6-B200 (8x B200, EFA v4 8x50GB/s)": ("b200", 50e9),
}
"""Published all-reduce tables across nodes of 8, with the nominal rate of a device's port."""


def read(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def gemms(data: Path) -> dict[str, Gemms]:
    """bf16 products of both tables."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in read(data / "measured" / "op_gemm_bf16.csv"):
        found.setdefault(TYPES[row["gpu"]], []).append((*_sizes(row, "mnk"), float(row["latency_ms"]) / 1e3))
    for row in read(data / "cluster-facts" / "gemm_bf16_measured.csv"):
        found.setdefault(TYPES[row["system"]], []).append((*_sizes(row, "mnk"), float(row["latency_us"]) / 1e6))
    return {name: Gemms(*np.array(rows).T) for name, rows in found.items()}


def attentions(data: Path, decode: bool) -> dict[str, Attentions]:
    """Attention of whole sequences, or of new tokens."""
    columns = ("batch", "seq_len", "heads", "kv_heads", "latency_ms")
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in read(data / "measured" / "op_attention_gqa4_hd128.csv"):
        if row["phase"] == ("generation" if decode else "context"):
            found.setdefault(TYPES[row["gpu"]], []).append(_sizes(row, columns))
    made = {}
    for name, rows in found.items():
        sequences, tokens, heads, kv_heads, milliseconds = np.array(rows).T
        made[name] = Attentions(decode, sequences, tokens, heads, kv_heads, 128, milliseconds / 1e3)
    return made


def collectives(data: Path) -> dict[str, Collectives]:
    """Inside a node."""
    found: dict[str, list[tuple[str, int, float, float, int]]] = {}
    for row in read(data / "cluster-facts" / "nccl_latency_measured.csv"):
        if row["system"] in TYPES:
            operation = OPERATIONS.get(row["op"], row["op"])
            timed = (operation, int(row["num_gpus"]), float(row["size_bytes"]), float(row["latency_us"]) / 1e6, 1)
            found.setdefault(TYPES[row["system"]], []).append(timed)
    return {name: _collectives(rows) for name, rows in found.items()}


def collectives_between_nodes(data: Path) -> dict[str, tuple[Collectives, float]]:
    """All-reduce among all devices of two to eight nodes of 8, and the nominal rate of a device's port."""
    found: dict[str, list[tuple[str, int, float, float, int]]] = {}
    rates = dict(NODES.values())
    for row in read(data / "cluster-facts" / "allreduce_busbw_published.csv"):
        if row["system"] in NODES and row["time_us"]:
            timed = ("all_reduce", int(row["gpus"]), float(row["size_bytes"]), float(row["time_us"]) / 1e6, 8)
            found.setdefault(NODES[row["system"]][0], []).append(timed)
    return {name: (_collectives(rows), rates[name]) for name, rows in found.items()}


def _collectives(rows: list[tuple[str, int, float, float, int]]) -> Collectives:
    operation, ranks, size_bytes, seconds, local = zip(*rows, strict=True)
    return Collectives(np.array(operation), np.array(ranks), np.array(size_bytes), np.array(seconds), np.array(local))


def _sizes(row: Row, columns: Iterable[str]) -> tuple[float, ...]:
    return tuple(float(row[column]) for column in columns)
