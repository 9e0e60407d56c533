"""Which signals crossed their thresholds at a boundary (paper §4.1). Pure: values in, triggers out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.core import Cluster, ControllerState, Estimate, Observation, SettingsError, Signal, Trigger, expand
from nereus.core.sizes import show_bytes

LENGTH, DEVICES, MEMORY, UNITS = "length", "devices", "memory", "units"
_PEAK, _TREND = "peak:", "trend:"
SIGNALS = (LENGTH, DEVICES, MEMORY)
PRESSURE = "memory_pressure"
"""Factor on predicted peaks so that a new plan has room for what the measured ones are heading for."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """`length` is a relative change; `memory` the share of a device's capacity beyond which a peak is urgent.

    It leaves half of the planner's headroom: the longest of a batch of samples jumps by more than any trend foretells.
    """

    length: float = 0.30
    memory: float = 0.95
    lookahead_steps: int = 2
    """How far ahead the trend of the measured peaks is followed."""

    def __post_init__(self) -> None:
        if not self.length > 0:
            raise SettingsError(f"thresholds: length {self.length}, must be above 0")
        if not 0 < self.memory <= 1:
            raise SettingsError(f"thresholds: memory {self.memory}, must be above 0 and at most 1")
        if self.lookahead_steps < 0:
            raise SettingsError(f"thresholds: lookahead_steps {self.lookahead_steps}, must be at least 0")


@dataclass(frozen=True, slots=True)
class Watch:
    """The present values, what fired, and which signals crossed their threshold just now."""

    values: Mapping[str, float]
    triggers: tuple[Trigger, ...]
    crossed: frozenset[str]


def watch(
    state: ControllerState, seen: Observation, estimate: Estimate, thresholds: Thresholds, headroom: float
) -> Watch:
    """Compare an observation with `state` (before it). `estimate` is the current plan's at the observed lengths."""
    found = [
        _length(state, seen, thresholds),
        _devices(state, seen),
        _memory(state, seen, estimate, thresholds, 1.0 - headroom),
        _units(state, seen),
    ]
    values = dict(state.values)
    for each in found:
        values |= each.values
    return Watch(
        {name: value for name, value in values.items() if not _stale(name, seen)},
        tuple(trigger for each in found for trigger in each.triggers),
        frozenset[str]().union(*(each.crossed for each in found)),
    )


def without_trend(values: Mapping[str, float]) -> dict[str, float]:
    """Values without the history of measured peaks, which says nothing about another plan."""
    return {n: v for n, v in values.items() if not n.startswith((_PEAK, _TREND)) and n not in (PRESSURE, MEMORY)}


def _stale(name: str, seen: Observation) -> bool:
    """Whether a value belongs to a device that is gone."""
    prefix, colon, device = name.partition(":")
    return bool(colon) and prefix + colon in (_PEAK, _TREND) and int(device) not in seen.devices | seen.departing


def _length(state: ControllerState, seen: Observation, thresholds: Thresholds) -> Watch:
    """The mean response length differs from its value at the last replan; falls count as rises do."""
    if seen.response is None:
        return Watch({}, (), frozenset())
    reference = state.references.get(LENGTH, seen.response.mean)
    signal = Signal(LENGTH, reference, seen.response.mean, thresholds.length)
    if not signal.crossed:
        return Watch({LENGTH: signal.value}, (), frozenset())
    change = signal.value / signal.reference - 1.0
    why = f"length {signal.reference:.1f} → {signal.value:.1f}, {change:+.0%}"
    return Watch({LENGTH: signal.value}, (Trigger(LENGTH, False, why),), frozenset({LENGTH}))


def _devices(state: ControllerState, seen: Observation) -> Watch:
    """The ready set changed, or the current plan stands on devices that are gone or about to go."""
    usable, before = seen.devices - seen.departing, frozenset(state.cluster.ids)
    alive = seen.devices | seen.departing
    values = {DEVICES: float(len(usable))}
    broken = (state.plan.devices | state.units.devices) - usable
    changed = usable != before
    if not broken and not changed:
        return Watch(values, (), frozenset())
    parts = []
    for names, verb in (
        (broken & alive, "leaving"),
        (broken - alive, "lost"),
        (before - usable - broken, "gone, not in use"),
        (usable - before, "new"),
    ):
        if names:
            parts.append(f"{_named(names)} {verb}")
    trigger = Trigger(DEVICES, bool(broken), ", ".join(parts))
    return Watch(values, (trigger,), frozenset({DEVICES} if changed else ()))


def _memory(
    state: ControllerState, seen: Observation, estimate: Estimate, thresholds: Thresholds, limit: float
) -> Watch:
    """The peak, as predicted at these lengths or as its own trend will have it, leaves too little or nothing."""
    values, ahead = _trends(state, seen, thresholds.lookahead_steps)
    predicted = _worst(state.pool, estimate.peak_bytes, "predicted at these lengths")
    value, device, how = max(predicted, _worst(state.pool, ahead, "by trend"))
    values |= {MEMORY: value, PRESSURE: _pressure(state.pool, estimate, ahead, limit)}
    if seen.out_of_memory is not None:
        # More than the capacity was asked for where the prediction saw room.
        values[PRESSURE] = max(values[PRESSURE], 1.0 / predicted[0] if predicted[0] else 1.0)
        return Watch(values, (Trigger(MEMORY, True, seen.out_of_memory),), frozenset({MEMORY}))
    previous, reference = state.values.get(MEMORY, 0.0), state.references.get(MEMORY, 0.0)
    urgent = value > thresholds.memory
    # Inside the headroom one replan is enough until the peak becomes urgent.
    if not urgent and (value <= limit or reference > limit):
        return Watch(values, (), frozenset())
    capacity = show_bytes(state.pool.kind(device).memory_bytes)
    trigger = Trigger(MEMORY, urgent, f"peak of device {device} at {value:.0%} of {capacity}, {how}")
    fresh = previous <= (thresholds.memory if urgent else limit)
    return Watch(values, (trigger,), frozenset({MEMORY} if fresh else ()))


def _trends(state: ControllerState, seen: Observation, steps: int) -> tuple[dict[str, float], dict[int, float]]:
    """Peak and rise per step of each device, and the peak `steps` ahead.

    The rise is an exponential moving average from zero: one jump counts half, a steady rise in full after a few steps.
    """
    values: dict[str, float] = {}
    ahead: dict[int, float] = {}
    for device, peak in seen.peaks.items():
        before = state.values.get(f"{_PEAK}{device}")
        rise = 0.0 if before is None else 0.5 * state.values.get(f"{_TREND}{device}", 0.0) + 0.5 * (peak - before)
        values |= {f"{_PEAK}{device}": float(peak), f"{_TREND}{device}": rise}
        ahead[device] = peak + steps * max(0.0, rise)
    return values, ahead


def _worst(pool: Cluster, peaks: Mapping[int, float], how: str) -> tuple[float, int, str]:
    """The fullest device: share of its capacity, id, where the number is from."""
    shares = [(peak / pool.kind(device).memory_bytes, device, how) for device, peak in peaks.items()]
    return max(shares, default=(0.0, -1, how))


def _pressure(pool: Cluster, estimate: Estimate, ahead: Mapping[int, float], limit: float) -> float:
    """By how much the peaks that come close to their capacity will exceed their prediction; at least 1."""
    factors = [
        peak / estimate.peak_bytes[device]
        for device, peak in ahead.items()
        if peak > limit * pool.kind(device).memory_bytes and estimate.peak_bytes.get(device)
    ]
    return max([1.0, *factors])


def _units(state: ControllerState, seen: Observation) -> Watch:
    """The units are not the plan's: the last transition stopped half-way."""
    if state.units.same_units(expand(state.plan)) or state.units.devices - seen.devices - seen.departing:
        return Watch({}, (), frozenset())
    return Watch({}, (Trigger(UNITS, True, "the last transition stopped half-way"),), frozenset({UNITS}))


def _named(ids: frozenset[int]) -> str:
    listed = ", ".join(map(str, sorted(ids)))
    return f"device {listed}" if len(ids) == 1 else f"devices {listed}"
