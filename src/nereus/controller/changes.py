"""The difference of two plans in words."""

from __future__ import annotations

from nereus.core import Assignment, Plan
from nereus.core.plan import listed
from nereus.core.sizes import show_bytes


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
    for name in ("zero", "cp", "ep", "vpp"):
        if getattr(was, name) != getattr(now, name):
            parts.append(f"{name}{getattr(was, name)} → {name}{getattr(now, name)}")
    for name, words in (("offload", "offload"), ("sequence_parallel", "sequence parallel")):
        if getattr(was, name) != getattr(now, name):
            parts.append(words if getattr(now, name) else f"no {words}")
    if was.kv_bytes != now.kv_bytes and was.micro_batch == now.micro_batch:
        parts.append(f"KV budget {_budget(was.kv_bytes)} → {_budget(now.kv_bytes)}")
    return ", ".join(parts) or "other settings"


def _budget(kv_bytes: int) -> str:
    return show_bytes(kv_bytes) if kv_bytes else "as much as is needed"


def _listed(assignment: Assignment) -> str:
    return f"[{listed(assignment.devices)}]"
