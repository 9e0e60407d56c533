"""An answer of the planner as plain values. Its keys are a promise: docs/planning.md explains every one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nereus.core import Cluster, Device, DeviceKind, Link, Plan, SettingsError, Workflow, Workload, codec
from nereus.core.plan import numbers, ranges
from nereus.report import tables
from nereus.report.answer import Answer, Comparison
from nereus.report.close import RunnerUp
from nereus.report.views import PlanView

SCHEMA = 1
"""Raised when a key changes its meaning or goes; new keys may come."""


def of(
    shown: Answer,
    name: str,
    assumptions: Sequence[str] = (),
    notes: Sequence[str] = (),
    imported: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """The answer, the job it is for included, so that it can be read back and exported."""
    problem, result = shown.problem, shown.result
    return {
        "schema": SCHEMA,
        "name": name,
        "assumptions": list(assumptions),
        "notes": list(notes),
        "imported": dict(imported or {}),
        "fits": shown.best is not None,
        "shortage": shown.shortage,
        "bound_s": result.bound_s if result else None,
        "considered": result.considered if result else 0,
        **(_plan(shown.best) if shown.best else {"plan": None}),
        "runners_up": [_beside(other) for other in shown.runners_up],
        "alternatives": [_beside(other) for other in shown.alternatives],
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


def _beside(other: RunnerUp) -> dict[str, Any]:
    return {
        "step_s": other.step_s,
        "slower": other.slower,
        "changes": other.changes,
        "asked": other.asked,
        "calls": [{"call": call, "more_s": more_s} for call, more_s in other.calls],
        "plan": codec.encode(other.plan),
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
        "tight": found.tight,
        "reason": found.reason,
        "slower": found.slower,
        "changes": found.changes,
        "calls": [{"call": call, "own_s": own, "best_s": best} for call, own, best in found.calls],
        "own_plan": _plan(found.view) if found.view else None,
        "best_plan": _plan(found.other) if found.other else None,
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    """Kinds and links in full, devices by node as ranges of ids."""
    nodes: dict[tuple[int, str], list[int]] = {}
    for device in cluster.devices:
        nodes.setdefault((device.node, device.kind), []).append(device.id)
    return {
        "devices": len(cluster.devices),
        "nodes": [{"node": node, "kind": kind, "ids": ranges(ids)} for (node, kind), ids in nodes.items()],
        "kinds": codec.encode(cluster.kinds),
        "links": codec.encode(cluster.links),
    }


@dataclass(frozen=True, slots=True)
class Saved:
    """What an answer that was written holds of the job: enough to judge or export its plan."""

    plan: Plan
    workflow: Workflow
    workload: Workload
    cluster: Cluster


def read(path: Path) -> Saved:
    """The plan of an answer in a file. Raises SettingsError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise SettingsError(f"{path}: not an answer of `nereus plan --json` (schema {SCHEMA})")
    if data.get("plan") is None:
        raise SettingsError(f"{path}: holds no plan: {data.get('shortage')}")
    try:
        return Saved(
            _part(Plan, data, "plan"),
            _part(Workflow, data, "workflow"),
            _part(Workload, data, "workload"),
            _read_cluster(data),
        )
    except SettingsError as error:
        raise SettingsError(f"{path}: not an answer of `nereus plan --json`: {error}") from None


@dataclass(frozen=True, slots=True)
class _Node:
    """One row of the cluster's nodes. `ids` as in `0-7, 12`."""

    node: int
    kind: str
    ids: str


def _read_cluster(data: Mapping[str, Any]) -> Cluster:
    cluster: Mapping[str, Any] = _part(Mapping[str, Any], data, "cluster")
    nodes: tuple[_Node, ...] = _part(tuple[_Node, ...], cluster, "nodes", "cluster.")
    kinds: Mapping[str, DeviceKind] = _part(Mapping[str, DeviceKind], cluster, "kinds", "cluster.")
    links: Mapping[str, Link] = _part(Mapping[str, Link], cluster, "links", "cluster.")
    devices = [Device(number, each.node, each.kind) for each in nodes for number in _ids(each)]
    return Cluster(tuple(sorted(devices, key=lambda device: device.id)), kinds, links)


def _part(kind: Any, data: Mapping[str, Any], key: str, within: str = "") -> Any:
    if key not in data:
        raise SettingsError(f"there is no {within}{key}")
    return codec.decode(kind, data[key], f"{within}{key}")


def _ids(each: _Node) -> list[int]:
    try:
        return numbers(each.ids)
    except ValueError as error:
        raise SettingsError(f"cluster.nodes: ids of node {each.node}: {error}") from None
