"""Calibration: constants come out of timings that were made from them, and a live run writes a file that is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nereus.clusters.file import read
from nereus.core import DeviceKind, Link, SettingsError, codec
from nereus.cost.kernel_fit import Attentions, Collectives, Gemms
from nereus.engine.calibrate import Timings, calibrate, doubted, fitted, plan

TRUE = DeviceKind(
    "made-up",
    80_000_000_000,
    {"bf16": 1e15},
    3e12,
    4e-6,
    constants={
        "gemm.start_s": 4e-6,
        "gemm.share": 0.8,
        "gemm.half_k": 100.0,
        "gemm.half_mn": 2e5,
        "gemm.stream": 0.9,
        "attention.start_s": 8e-6,
        "attention.share": 0.5,
        "attention.half_tokens": 700.0,
        "decode_attention.start_s": 8e-6,
        "decode_attention.share": 0.8,
        "decode_attention.tokens": 150.0,
    },
)
LINK = Link(4e11, 3e-6, {"collective.start_s": 5e-6, "all_reduce.share": 0.7, "gather.share": 0.6})


def made_up() -> Timings:
    """Timings that follow `TRUE` and `LINK` exactly."""
    chosen = plan(cuda=True, quick=False)
    m, n, k = np.array(chosen.gemm, float).T
    gemm = Gemms(m, n, k, np.ones(len(m)))
    sequences, tokens, heads, _ = np.array(chosen.attention, float).T
    attention = Attentions(False, sequences, tokens, heads, heads, 128, np.ones(len(heads)))
    sequences, tokens, heads, _ = np.array(chosen.decode, float).T
    decode = Attentions(True, sequences, tokens, heads, heads, 128, np.ones(len(heads)))
    sizes = np.array([2.0**power for power in range(10, 29)])
    names = np.repeat(["all_reduce", "all_gather"], len(sizes))
    collectives = Collectives(
        names, np.full(len(names), 4), np.tile(sizes, 2), np.ones(len(names)), np.ones(len(names), np.int64)
    )
    return Timings(
        name=TRUE.name,
        memory_bytes=TRUE.memory_bytes,
        precision="bf16",
        gemm=replace(gemm, seconds=gemm.predicted(TRUE, "bf16")),
        attention=replace(attention, seconds=attention.predicted(TRUE, "bf16")),
        decode=replace(decode, seconds=decode.predicted(TRUE, "bf16")),
        stream_bytes_per_s=TRUE.memory_bytes_per_s,
        launch_s=TRUE.launch_s,
        host_bytes_per_s=5e10,
        send_bytes=(64, 1 << 28),
        send_s=(3e-6, 3e-6 + (1 << 28) / 4e11),
        collectives=replace(collectives, seconds=collectives.predicted(LINK)),
        setup_s=0.25,
        move_bytes_per_s=3e11,
        move_all_bytes_per_s=9e11,
        copy_bytes_per_s=1e12,
        hash_bytes_per_s=2e12,
    )


def test_the_fit_predicts_the_timings_it_was_made_from() -> None:
    kind, link, error = fitted(made_up())
    assert max(error.values()) < 0.05
    assert kind.memory_bytes_per_s == 3e12
    # The best product of the list is all that is known of the peak.
    assert 0.6e15 < kind.peak_flops["bf16"] < 0.8e15
    assert kind.peak_flops["bf16"] * kind.constants["gemm.share"] == pytest.approx(0.8e15, rel=0.02)
    assert kind.peak_flops["bf16"] * kind.constants["attention.share"] == pytest.approx(0.5e15, rel=0.1)
    for name in ("gemm.start_s", "gemm.half_k", "gemm.half_mn", "gemm.stream", "decode_attention.share"):
        assert kind.constants[name] == pytest.approx(TRUE.constants[name], rel=0.1)
    assert link.bytes_per_s == pytest.approx(4e11, rel=0.01)
    assert link.constants["all_reduce.share"] == pytest.approx(0.7, rel=0.1)
    assert link.constants["gather.share"] == pytest.approx(0.6, rel=0.1)
    assert link.constants["group.setup_s"] == 0.25
    assert (link.constants["state.bytes_per_s"], link.constants["state.all_bytes_per_s"]) == (3e11, 9e11)
    assert (kind.constants["state.copy_bytes_per_s"], kind.constants["state.hash_bytes_per_s"]) == (1e12, 2e12)


def test_a_fit_that_misses_its_own_measurements_is_said_and_makes_plans_uncertain() -> None:
    kind, _, error = fitted(made_up())
    assert doubted(kind, error) == (kind, ())
    unsure, (note,) = doubted(kind, {"gemm": 0.87, "attention": 0.1, "collectives": 1.4})
    assert "gemm 87 %, collectives 140 %" in note
    assert "attention" not in note
    assert unsure.constants["uncertainty"] == pytest.approx(np.log(2.4))


def test_a_single_device_has_no_link_to_fit() -> None:
    kind, link, error = fitted(replace(made_up(), collectives=None, send_bytes=(), send_s=()))
    assert not link.constants
    assert not any(name.startswith("state.") for name in kind.constants)
    assert "collectives" not in error


@pytest.mark.processes
def test_two_processes_measure_this_machine_and_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    report = calibrate(path, 2, quick=True)
    cluster = read(path)
    (kind,) = cluster.kinds.values()
    assert len(cluster.devices) == 2
    assert kind.peak_flops["fp32" if kind.name == "cpu" else "bf16"] > 1e8
    assert 0 < kind.launch_s < 1e-2
    assert cluster.links["intra"].bytes_per_s > 1e6
    assert cluster.links["intra"].constants["group.setup_s"] > 0
    assert all(1e7 < cluster.links["intra"].constants[f"state.{name}bytes_per_s"] < 1e13 for name in ("", "all_"))
    assert all(1e7 < kind.constants[f"state.{name}_bytes_per_s"] < 1e14 for name in ("copy", "hash"))
    assert kind.constants == pytest.approx(dict(report.kind.constants), rel=1e-3)
    assert ("uncertainty" in kind.constants) == any("fitted constants miss" in note for note in report.notes)
    assert "written to" in str(report)
    json.dumps(codec.encode(report))


def test_more_processes_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with pytest.raises(SettingsError, match=r"100000 processes.* 1 to 8 are valid"):
        calibrate(tmp_path / "x.yaml", 100_000, quick=True)


def test_more_devices_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SettingsError, match="3 devices, this machine has 2 GPUs"):
        calibrate(tmp_path / "x.yaml", 3, quick=True)
    assert not (tmp_path / "x.yaml").exists()
