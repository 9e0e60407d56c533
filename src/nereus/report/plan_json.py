"""An answer of the planner as plain values. Its keys are a promise: docs/planning.md explains every one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nereus.core import Cluster, codec
from nereus.report import tables
from nereus.report.answer import Answer, Comparison
from nereus.report.views import PlanView

SCHEMA = 1
"""Raised when a key changes its meaning or goes; new keys may come."""


def of(shown: Answer, name: str, assumptions: Sequence[str] = (), notes: Sequence[str] = ()) -> dict[str, Any]:
    """The answer, the job it is for included, so that it can be read back and exported."""
    problem, result = shown.problem, shown.result
    return {
        "schema": SCHEMA,
        "name": name,
        "assumptions": list(assumptions),
        "notes": list(notes),
        "fits": shown.best is not None,
        "shortage": shown.shortage,
        "bound_s": result.bound_s if result else None,
        "considered": result.considered if result else 0,
        **(_plan(shown.best) if shown.best else {"plan": None}),
        "runners_up": [
            {"step_s": other.step_s, "slower": other.slower, "changes": other.changes, "plan": codec.encode(other.plan)}
            for other in shown.runners_up
        ],
        "refused": tables.grouped(result.refused) if result else [],
        "comparison": _comparison(shown.comparison) if shown.comparison else None,
        "advice": [
            {
                "kind": line.kind,
                "change": line.change,
                "step_s": line.step_s,
                "now_s": line.now_s,
                "gain": line.gain,
                "text": line.describe(),
            }
            for line in shown.advice
        ],
        "cluster": _cluster(problem.cluster),
        "workload": codec.encode(problem.workload),
        "workflow": codec.encode(problem.workflow),
    }


def _plan(view: PlanView) -> dict[str, Any]:
    return {
        "plan": codec.encode(view.plan),
        "step_s": view.step_s,
        "uncertainty": view.uncertainty,
        "limited_by": view.limited_by,
        "critical_path": [call.call for call in view.calls if call.critical],
        "model_stages": [asdict(stage) for stage in view.stages],
        "calls": [asdict(call) | {"seconds": call.seconds} for call in view.calls],
        "memory": [asdict(row) | {"share": row.share} for row in view.memory],
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "own": found.own,
        "fits": found.fits,
        "reason": found.reason,
        "slower": found.slower,
        "changes": found.changes,
        "calls": [{"call": call, "own_s": own, "best_s": best} for call, own, best in found.calls],
        "own_plan": _plan(found.view) if found.view else None,
        "best_plan": _plan(found.other) if found.other else None,
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[device.kind] = counts.get(device.kind, 0) + 1
    nodes = len({device.node for device in cluster.devices})
    return {"devices": len(cluster.devices), "nodes": nodes, "kinds": counts}
