"""Plans as a test writes them down."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.core import Assignment, Candidate, Layout, ModelStage, Plan

Degrees = tuple[int, int, int, tuple[int, ...]]
"""(tp, pp, dp, devices)."""


def plan_of(degrees: Mapping[str, Degrees], micro_batch: int = 2) -> Plan:
    """A plan from `{"actor/training": (tp, pp, dp, devices), ...}`; units take consecutive devices."""
    assignments = []
    for name, (tp, pp, dp, devices) in degrees.items():
        layout = Layout(tp, pp)
        units = tuple(tuple(devices[i * layout.size : (i + 1) * layout.size]) for i in range(dp))
        assignments.append(Assignment(Candidate(ModelStage.parse(name), layout, dp, micro_batch), units))
    return Plan(tuple(assignments))
