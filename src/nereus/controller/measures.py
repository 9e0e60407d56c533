"""The controller's own metrics of one step, under `nereus/`."""

from __future__ import annotations

from nereus.core import ControllerState


def measures(state: ControllerState) -> dict[str, float]:
    """What the last boundary showed: step time measured and predicted, devices, peak memory, what a transition took."""
    seen = state.last
    if seen is None:
        return {}
    found = {"nereus/pool_devices": float(len(seen.devices - seen.departing))}
    if seen.peaks:
        found["nereus/peak_bytes"] = float(max(seen.peaks.values()))
    for name in ("transition_s", "payback_steps"):
        if name in state.values:
            found[f"nereus/{name}"] = state.values[name]
    predicted_s = state.values.get("predicted_step_s")
    if seen.step_s is not None:
        found["nereus/step_s"] = seen.step_s
        if predicted_s is not None:
            found["nereus/predicted_step_s"] = predicted_s
            found["nereus/prediction_error"] = predicted_s / seen.step_s - 1.0
    return found
