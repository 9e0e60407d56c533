"""Learn from measurements: efficiency by operation class, a residual by call, memory scale, transition cost.

Values move in logarithms, by the mean of the first observations and by a quarter later; one observation moves a known
value by a bounded amount, so that an outlier does little and a lasting change wins within a few steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nereus.core import Calibration, Efficiency, Observation, Plan, SettingsError, Timing, codec
from nereus.core.sizes import checked
from nereus.cost import operations
from nereus.cost.step import StepModel

WEIGHT = 0.25
"""Weight of one observation once several have been seen."""
MIN_SURPRISE = 0.25
"""An observation may always count with so large a difference in logarithms."""
START_SPREAD = 0.0625
"""Variance after a single observation: nothing is yet known about its repeatability."""
MEMORY_DECAY = 0.1
MIN_MEMORY_SCALE = 1.0
"""One plan that stays below its prediction says nothing of the terms that make another plan's peak."""
TIMED_WITH = {"prefill": "decode", "forward": "backward"}
"""Classes that a job may time together with another: generation in one piece, an update's two passes."""
_LIMITS = (1e-4, 1e4)


def update(
    calibration: Calibration, ideal: Mapping[str, float], observed: Mapping[str, Timing], weight: float = WEIGHT
) -> Calibration:
    """Efficiency of each class from ideal and measured seconds, both keyed `call:class`; keys of one side are ignored.

    All calls of a class count together, by their seconds. Afterwards the residuals of calls no longer fit: see `learn`.
    """
    sums: dict[str, tuple[float, float]] = {}
    for (call, name), measured_s in sorted(_split(ideal, observed).items()):
        expected, measured = sums.get(name, (0.0, 0.0))
        sums[name] = (expected + ideal[f"{call}:{name}"], measured + measured_s)
    for name, (expected, measured) in sums.items():
        known = calibration.efficiency.get(name, Efficiency(0.0))
        calibration = calibration.with_efficiency(name, _moved(known, expected / measured, weight))
    return calibration


def update_calls(
    calibration: Calibration, predicted_s: Mapping[str, float], measured_s: Mapping[str, float], weight: float = WEIGHT
) -> Calibration:
    """Residual of each call, kept as class `call:NAME`: measured seconds over those predicted under `calibration`."""
    for call in sorted(predicted_s.keys() & measured_s.keys()):
        if predicted_s[call] > 0 and measured_s[call] > 0:
            known = operations.residual(calibration, call)
            target = known.value * measured_s[call] / predicted_s[call]
            calibration = calibration.with_efficiency(f"call:{call}", _moved(known, target, weight))
    return calibration


def learn(model: StepModel, plan: Plan, seen: Observation) -> Calibration:
    """The calibration after a step of `plan`: classes first, then what they leave unexplained, then peaks.

    `model` must describe the workload that was measured.
    """
    calibration = update(model.calibration, model.breakdown(plan), seen.timings)
    refined = StepModel(model.workflow, model.workload, model.cluster, calibration)
    calibration = update_calls(calibration, refined.call_s(plan), seen.call_s)
    peaks = model.peaks(plan)
    return update_memory(
        calibration,
        {device: peak.bytes for device, peak in peaks.items()},
        seen.peaks,
        {device: peak.resident_bytes for device, peak in peaks.items()},
    )


def update_memory(
    calibration: Calibration,
    predicted_peaks: Mapping[int, int],
    measured_peaks: Mapping[int, int],
    resident: Mapping[int, int] | None = None,
) -> Calibration:
    """Scale of the transient part of peaks: up at once, down slowly, by the device that exceeds its prediction most.

    With `resident` bytes by device the excess is charged to the transient part alone, where the errors are.
    """
    stored = resident or {}
    ratios = [
        max(measured_peaks[device] - stored.get(device, 0), 0) / (predicted_peaks[device] - stored.get(device, 0))
        for device in predicted_peaks.keys() & measured_peaks.keys()
        if predicted_peaks[device] > stored.get(device, 0)
    ]
    if not ratios:
        return calibration
    wanted = calibration.memory_scale * max(ratios)
    falling = calibration.memory_scale * (1 - MEMORY_DECAY) + wanted * MEMORY_DECAY
    scale = min(max(wanted, falling, MIN_MEMORY_SCALE), _LIMITS[1])
    return replace(calibration, memory_scale=scale, memory_count=calibration.memory_count + 1)


def update_transition(calibration: Calibration, predicted_ideal_s: float, measured_s: float) -> Calibration:
    """What transitions take beyond moving bytes at link speed, as an overhead and a scale.

    A transition that takes longer than its bytes need shows mostly set-up, so the excess goes to the overhead; one
    that takes less than predicted says that the scale is too high.
    """
    count = calibration.transition_count + 1
    share = max(1.0 / count, WEIGHT)
    excess_s = measured_s - calibration.transition_scale * predicted_ideal_s
    overhead_s = (1 - share) * calibration.transition_overhead_s + share * max(excess_s, 0.0)
    scale = calibration.transition_scale
    if excess_s < 0 and predicted_ideal_s > 0:
        scale = (1 - share) * scale + share * measured_s / predicted_ideal_s
    return replace(calibration, transition_scale=scale, transition_overhead_s=overhead_s, transition_count=count)


def save(calibration: Calibration, path: Path) -> None:
    """Write what was learnt as JSON."""
    path.write_text(json.dumps(codec.encode(calibration), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Calibration:
    """What `save` wrote. Raises FileNotFoundError, and SettingsError naming the file for anything else it holds."""
    try:
        found: Calibration = codec.decode(Calibration, json.loads(path.read_text(encoding="utf-8")))
        _check(found)
    except (ValueError, RecursionError, SettingsError) as error:
        raise SettingsError(f"{path}: not a calibration: {error}") from None
    return found


def _check(calibration: Calibration) -> None:
    for name, known in calibration.efficiency.items():
        checked(known.value, f"efficiency.{name}.value", *_LIMITS)
        checked(known.variance, f"efficiency.{name}.variance", 0)
        checked(known.count, f"efficiency.{name}.count", 0)
    checked(calibration.memory_scale, "memory_scale", *_LIMITS)
    checked(calibration.transition_scale, "transition_scale")
    for name in ("transition_overhead_s", "transition_count", "memory_count"):
        checked(getattr(calibration, name), name, 0)


def _split(ideal: Mapping[str, float], observed: Mapping[str, Timing]) -> dict[tuple[str, str], float]:
    """Measured seconds by (call, class). A class that was timed as part of another gets its share of that time."""
    found: dict[tuple[str, str], float] = {}
    for key, timing in observed.items():
        call, _, name = key.rpartition(":")
        if name not in operations.CLASSES or timing.measured_s <= 0:
            continue
        inside = [other for other, whole in TIMED_WITH.items() if whole == name and f"{call}:{other}" not in observed]
        parts = {part: ideal.get(f"{call}:{part}", 0.0) for part in (name, *inside)}
        total = sum(parts.values())
        found |= {(call, part): timing.measured_s * s / total for part, s in parts.items() if s > 0}
    return found


def _moved(known: Efficiency, target: float, weight: float) -> Efficiency:
    target = min(max(target, _LIMITS[0]), _LIMITS[1])
    if known.count == 0:
        return Efficiency(target, 1, START_SPREAD)
    reach = max(3 * math.sqrt(known.variance), MIN_SURPRISE)
    surprise = min(max(math.log(target / known.value), -reach), reach)
    share = max(1.0 / (known.count + 1), weight)
    variance = (1 - share) * (known.variance + share * surprise * surprise)
    return Efficiency(known.value * math.exp(share * surprise), known.count + 1, variance)
