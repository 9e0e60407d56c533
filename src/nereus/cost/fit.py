"""Batch calibration: constants of devices and links from a few measured updates, with counts and uncertainty.

A constant that the measurements do not touch keeps its start value and its wide uncertainty. Errors count by their
logarithm, far ones little; what is believed before the first measurement enters as one more, soft, measurement each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import least_squares

from nereus.core import DeviceKind, Efficiency, Link, ModelSpec, Workload
from nereus.cost.kernels import Rates
from nereus.cost.rows import Floats, Ints, Rows
from nereus.cost.site import Site
from nereus.cost.training import Pipeline, Shares

NOISE = 0.05
"""Relative error of the model where every constant is right; errors far beyond it are outliers."""
INDEPENDENT = 64
"""Errors of runs of one kind go together: however many were measured, they weigh as so many independent ones."""
TOUCHED = 0.01
"""A measurement counts for a constant when a change of the constant moves it by this share of the change."""
RATES = ("flops_per_s", "bytes_per_s", "launch_s")
"""Constants of a device that are fields of its rates."""
_REACH = 4.0
"""No constant moves further from its start than so many of its standard deviations."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Updates of one model that somebody timed: one row, one measurement. `seconds` are those of a whole step."""

    spec: ModelSpec
    rows: Rows
    workload: Workload
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Constant:
    """A positive number that measurements may move: `device.gemm.share`, `intra.latency_s`, `class.tp`.

    After `device`, `intra` and `inter` comes a field of the rates or the link, or a constant by name; after `class` an
    operation class, whose efficiency it is. `spread` is the standard deviation of its logarithm beforehand.
    """

    name: str
    start: float
    spread: float = 0.5
    maximum: float = np.inf


@dataclass(frozen=True, slots=True)
class Fit:
    """A site with fitted constants, and for each its value, measurements that touch it, and variance of its log."""

    site: Site
    constants: Mapping[str, Efficiency]

    def kind(self, kind: DeviceKind) -> DeviceKind:
        """The kind of device with what was fitted for it."""
        found = self._of("device")
        known = {name: value for name, value in found.items() if name in _names(kind)}
        rest = {name: value for name, value in found.items() if name not in known}
        return replace(kind, **known, constants={**kind.constants, **rest})  # type: ignore[arg-type]

    def _of(self, where: str) -> dict[str, float]:
        return {
            name.split(".", 1)[1]: each.value for name, each in self.constants.items() if name.startswith(f"{where}.")
        }


def predict(measured: Sequence[Measured], site: Site) -> Floats:
    """Seconds of every measurement, in order."""
    return _predict(_gather(measured), site, sum(len(each.rows) for each in measured))


def fit(measured: Sequence[Measured], site: Site, constants: Sequence[Constant]) -> Fit:
    """The constants that explain the measurements best, starting from a site's own."""
    groups = _gather(measured)
    seconds = np.concatenate([each.seconds for each in measured]) if measured else np.zeros(0)
    start = np.log([each.start for each in constants])
    spread = np.array([each.spread for each in constants])
    upper = np.minimum((np.log([each.maximum for each in constants]) - start) / spread, _REACH)

    def moved(x: Floats) -> Site:
        return _with(site, constants, np.exp(start + spread * x))

    def residuals(x: Floats) -> Floats:
        errors = np.log(_predict(groups, moved(x), len(seconds)) / seconds) / NOISE
        return np.concatenate([errors, x])

    found = least_squares(
        residuals, np.minimum(0.0, upper - 1e-6), bounds=(-_REACH, np.maximum(upper, 1e-6)),
        loss=_soft_errors(len(seconds)),  # type: ignore[arg-type]
        x_scale=1.0, ftol=1e-5, xtol=1e-5, max_nfev=40,
    )  # fmt: skip
    values = np.exp(start + spread * found.x)
    return Fit(moved(found.x), _estimates(constants, values, np.asarray(found.jac), len(seconds)))


def _estimates(constants: Sequence[Constant], values: Floats, jacobian: Floats, count: int) -> dict[str, Efficiency]:
    """Variances from the curvature at the solution; the scaled Jacobian holds the prior's rows too."""
    spread = np.array([each.spread for each in constants])
    covariance = np.linalg.inv(jacobian.T @ jacobian) if len(constants) else np.zeros((0, 0))
    moved = np.abs(jacobian[:count]) * NOISE / np.sqrt(_weight(count))
    touches = (moved > TOUCHED * spread).sum(axis=0)
    return {
        each.name: Efficiency(float(value), int(touched), float(variance))
        for each, value, touched, variance in zip(
            constants, values, touches, np.diag(covariance) * spread**2, strict=True
        )
    }


def _soft_errors(count: int) -> Callable[[Floats], Floats]:
    """The soft absolute value for errors, the square for what was believed beforehand."""

    weight = _weight(count)

    def loss(squares: Floats) -> Floats:
        root = np.sqrt(1 + squares)
        found = weight * np.array([2 * (root - 1), 1 / root, -0.5 / root**3])
        found[0, count:], found[1, count:], found[2, count:] = squares[count:], 1.0, 0.0
        return found

    return loss


def _weight(count: int) -> float:
    return min(1.0, INDEPENDENT / max(count, 1))


@dataclass(frozen=True, slots=True)
class _Group:
    """Measurements that differ in nothing but columns: priced in one go. `index` is where they belong."""

    spec: ModelSpec
    rows: Rows
    workload: Workload
    share: Ints
    repeats: Ints
    index: Ints


def _gather(measured: Sequence[Measured]) -> list[_Group]:
    """Models that differ in their depth alone are priced together, and so are batches of any size."""
    found: dict[object, list[tuple[Measured, Ints]]] = {}
    begin = 0
    for each in measured:
        # Depth enters by the columns of rows alone, unless leading layers differ from the others.
        spec = each.spec if each.spec.experts else replace(each.spec, layers=1)
        index = np.arange(begin, begin + len(each.rows))
        work = each.workload
        found.setdefault((spec, work.prompt, work.response, work.packed, work.loss), []).append((each, index))
        begin += len(each.rows)
    return [_group(parts) for parts in found.values()]


def _group(parts: Sequence[tuple[Measured, Ints]]) -> _Group:
    each = [measured for measured, _ in parts]
    rows = joined(measured.rows for measured in each)
    share = [-(-measured.workload.mini_batch // measured.rows.dp) for measured in each]
    repeats = [np.full(len(measured.rows), measured.workload.updates) for measured in each]
    index = np.concatenate([index for _, index in parts])
    return _Group(each[0].spec, rows, each[0].workload, np.concatenate(share), np.concatenate(repeats), index)


def joined(parts: Iterable[Rows]) -> Rows:
    """Rows one after another."""
    each = list(parts)
    return Rows(*(np.concatenate([getattr(rows, field.name) for rows in each]) for field in fields(Rows)))


def _predict(groups: Sequence[_Group], site: Site, count: int) -> Floats:
    seconds = np.zeros(count)
    for group in groups:
        pipeline = Pipeline(group.spec, group.rows, group.workload, site, train=True)
        seconds[group.index] = pipeline.price(Shares.of(group.rows, group.share), group.repeats).seconds
    return seconds


def _with(site: Site, constants: Sequence[Constant], values: Floats) -> Site:
    """A site whose constants by name have these values."""
    named: dict[str, dict[str, float]] = {"device": {}, "intra": {}, "inter": {}, "class": {}}
    for constant, value in zip(constants, values, strict=True):
        where, name = constant.name.split(".", 1)
        named[where][name] = float(value)
    calibration = site.calibration
    for name, value in named["class"].items():
        calibration = calibration.with_efficiency(name, Efficiency(value, 1, 0.0))
    rates = _rates(site.rates, named["device"])
    intra, inter = _link(site.intra, named["intra"]), _link(site.inter, named["inter"])
    return replace(site, rates=rates, intra=intra, inter=inter, calibration=calibration)


def _rates(rates: Rates, values: Mapping[str, float]) -> Rates:
    rest = {name: value for name, value in values.items() if name not in RATES}
    return replace(
        rates,
        flops_per_s=values.get("flops_per_s", rates.flops_per_s),
        bytes_per_s=values.get("bytes_per_s", rates.bytes_per_s),
        launch_s=values.get("launch_s", rates.launch_s),
        constants=tuple(sorted(({**rates.named, **rest}).items())),
    )


def _link(link: Link, values: Mapping[str, float]) -> Link:
    own = {name: value for name, value in values.items() if name in _names(link)}
    rest = {name: value for name, value in values.items() if name not in own}
    return replace(link, **own, constants={**link.constants, **rest})


def _names(value: object) -> set[str]:
    return {field.name for field in fields(value)}  # type: ignore[arg-type]
