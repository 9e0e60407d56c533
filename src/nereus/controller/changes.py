"""The difference of two plans in words."""

from __future__ import annotations

from nereus.core import Assignment, Plan
from nereus.core.plan import listed


def changes(before: Plan, after: Plan) -> str:
    """`actor/training tp2 pp1 dp2 → tp1 pp2 dp2; critic/training mb4 → mb2`; model-stages that stay are left out."""
    parts = []
    for ms in after.model_stages:
        old, new = before.of(ms), after.of(ms)
        if old == new:
            continue
        parts.append(f"{ms} {_difference(old, new)}")
    return "; ".join(parts) or "the same plan"


def _difference(old: Assignment, new: Assignment) -> str:
    was, now = old.candidate, new.candidate
    degrees = tuple(f"{c.layout} dp{c.dp}" for c in (was, now))
    parts = [] if degrees[0] == degrees[1] else [" → ".join(degrees)]
    if old.devices != new.devices:
        parts.append(f"devices {_listed(old)} → {_listed(new)}")
    elif old.units != new.units and not parts:
        parts.append("other positions")
    if was.micro_batch != now.micro_batch:
        parts.append(f"mb{was.micro_batch} → mb{now.micro_batch}")
    if was.recompute != now.recompute:
        parts.append(f"recompute {was.recompute} → {now.recompute}")
    return ", ".join(parts) or "other settings"


def _listed(assignment: Assignment) -> str:
    return f"[{listed(assignment.devices)}]"
