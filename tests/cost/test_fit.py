"""Batch calibration: planted constants come back, untouched ones stay, outliers and repetition do not mislead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nereus.core import Calibration, Candidate, DeviceKind, Layout, Lengths, Link, ModelSpec, Workload
from nereus.cost.fit import Constant, Measured, fit, predict
from nereus.cost.kernels import Rates
from nereus.cost.rows import Floats, Rows
from nereus.cost.site import Site
from tests.cost.jobs import ACTOR

PLANTED = {"gemm.share": 0.62, "stream.share": 0.8, "launch.power": 4.0, "launch.ahead": 1.0}
SITE = Site(
    Rates(3e14, 2e12, 2e-5, tuple(PLANTED.items())), Link(2e11, 1e-5), Link(2e10, 2e-5), Calibration()
)  # fmt: skip
WANTED = (
    Constant("device.gemm.share", 0.8, 0.3, 1.0),
    Constant("device.launch_s", 1e-5, 1.0),
    Constant("intra.bytes_per_s", 3e11, 0.5),
    Constant("inter.bytes_per_s", 3e10, 0.5),
)


def spec(layers: int, hidden: int) -> ModelSpec:
    return ModelSpec("llama", layers, hidden, 16, 16, hidden // 16, 4 * hidden, 32_000, dtype="bf16")


def measured(site: Site, batches: tuple[int, ...] = (8, 16), noise: float = 0.0) -> list[Measured]:
    """Runs on one node of 8, timed by the model itself."""
    plans = [(tp, pp, size) for tp in (1, 2, 4) for pp in (1, 2) for size in (1, 2, 4)]
    runs = []
    for layers in (8, 12):
        for hidden in (1024, 4096):
            for batch in batches:
                candidates = [Candidate(ACTOR, Layout(tp, pp), 8 // (tp * pp), size) for tp, pp, size in plans]
                workload = Workload(batch, 1, Lengths.constant(0), Lengths.constant(512), batch, 512)
                rows = Rows.of(candidates, layers, 8)
                runs.append(Measured(spec(layers, hidden), rows, workload, np.ones(len(rows))))
    seconds = predict(runs, site) * np.exp(np.random.default_rng(0).normal(0.0, noise, sum(len(r.rows) for r in runs)))
    ends = np.cumsum([len(run.rows) for run in runs])[:-1]
    return [replace(run, seconds=part) for run, part in zip(runs, np.split(seconds, ends), strict=True)]


def test_runs_priced_together_cost_what_they_cost_alone() -> None:
    runs = measured(SITE)
    alone = np.concatenate([predict([run], SITE) for run in runs])
    np.testing.assert_allclose(predict(runs, SITE), alone, rtol=1e-12)
    assert len({len(run.rows) for run in runs}) == 1


def test_packed_runs_are_not_priced_as_padded_ones() -> None:
    tail = Lengths(200, 400, 512, (64.0, 200.0, 512.0))
    runs = [replace(run, workload=replace(run.workload, response=tail, packed=packed))
            for run in measured(SITE, batches=(16,)) for packed in (False, True)]  # fmt: skip
    alone = np.concatenate([predict([run], SITE) for run in runs])
    np.testing.assert_allclose(predict(runs, SITE), alone, rtol=1e-12)


def test_planted_constants_come_back() -> None:
    found = fit(measured(SITE, noise=0.02), SITE, WANTED)
    assert found.constants["device.gemm.share"].value == pytest.approx(0.62, rel=0.05)
    assert found.constants["device.launch_s"].value == pytest.approx(2e-5, rel=0.05)
    assert found.constants["intra.bytes_per_s"].value == pytest.approx(2e11, rel=0.15)
    for name in ("device.gemm.share", "device.launch_s"):
        assert found.constants[name].count > 20
        assert found.constants[name].variance < 0.05**2


def test_what_nobody_measured_keeps_its_start_and_its_doubt() -> None:
    between = fit(measured(SITE), SITE, WANTED).constants["inter.bytes_per_s"]
    assert between.value == pytest.approx(3e10)
    assert between.count == 0
    assert between.variance == pytest.approx(0.5**2, rel=1e-3)


def test_no_measurement_leaves_everything_as_believed() -> None:
    found = fit([], SITE, WANTED)
    assert {name: each.value for name, each in found.constants.items()} == pytest.approx(
        {each.name: each.start for each in WANTED}
    )
    assert all(each.count == 0 for each in found.constants.values())


def test_a_few_absurd_runs_do_not_mislead() -> None:
    runs = measured(SITE, noise=0.02)

    def spoilt(seconds: Floats) -> Floats:
        return np.where(np.arange(len(seconds)) % 9 == 4, 4 * seconds, seconds)

    found = fit([replace(run, seconds=spoilt(run.seconds)) for run in runs], SITE, WANTED)
    assert found.constants["device.gemm.share"].value == pytest.approx(0.62, rel=0.12)


def test_more_runs_know_more_until_they_repeat() -> None:
    every = measured(SITE, noise=0.02)
    few = fit([replace(run, rows=run.rows[:3], seconds=run.seconds[:3]) for run in every[:4]], SITE, WANTED)
    many, more = fit(every, SITE, WANTED), fit([*every, *every], SITE, WANTED)
    name = "device.gemm.share"
    assert many.constants[name].variance < few.constants[name].variance
    assert more.constants[name].variance == pytest.approx(many.constants[name].variance, rel=0.1)


def test_an_efficiency_of_a_class_can_be_fitted() -> None:
    runs = measured(SITE)
    doubled = [replace(run, seconds=predict([run], _half_tp(SITE))) for run in runs]
    found = fit(doubled, SITE, [Constant("class.tp", 1.0, 0.5)])
    assert found.constants["class.tp"].value == pytest.approx(0.5, rel=0.02)
    assert found.site.efficiency("tp").value == pytest.approx(0.5, rel=0.02)


def _half_tp(site: Site) -> Site:
    halved = replace(site.efficiency("tp"), value=0.5)
    return replace(site, calibration=site.calibration.with_efficiency("tp", halved))


def test_a_fit_goes_back_into_the_kind_and_the_links() -> None:
    found = fit(measured(SITE), SITE, WANTED)
    kind = found.kind(DeviceKind("x", 1, {"bf16": 3e14}, 2e12, constants={"stream.share": 0.8}))
    assert kind.launch_s == found.site.rates.launch_s
    assert kind.constants == {"stream.share": 0.8, "gemm.share": found.constants["device.gemm.share"].value}
    assert found.site.intra.bytes_per_s == found.constants["intra.bytes_per_s"].value
