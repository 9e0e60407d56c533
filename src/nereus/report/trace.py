"""`trace.json`: calls and transitions by device, in the Chrome trace format that Perfetto opens.

Measured are the length of each call and of each primitive; where a call starts within its step follows from the
workflow: after the calls it waits for, when its devices are free.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus.core import Adapt, EdgeKind, Outcome, TransitionDAG, Workflow
from nereus.report.diff import Diff, Step
from nereus.report.history import History, Tick

Event = dict[str, Any]
EPSILON = 1e-3
"""Microseconds by which an arrow starts inside the span it leaves."""


def write(path: str | Path, history: History, workflow: Workflow) -> None:
    """Write the trace of a run."""
    Path(path).write_text(_text(events(history, workflow)), encoding="utf-8")


def planned(diff: Diff) -> str:
    """The trace of a transition that is only predicted: its primitives, and an arrow for every resource edge."""
    found: list[Event] = []
    by_id = {step.id: step for step in diff.steps}
    for step in diff.steps:
        span = {"ph": "X", "pid": 0, "ts": step.start_s * 1e6, "dur": step.seconds * 1e6}
        facts = {"primitive": step.id, "critical": step.critical, "after": step.waits, "bytes": dict(step.link_bytes)}
        name = f"{step.primitive} {step.model_stage}"
        first, *others = step.devices
        found.append({"name": name, **span, "tid": first, "args": facts})
        found.extend({"name": name, **span, "tid": other, "args": {"primitive": step.id}} for other in others)
        for wait in step.after:
            if wait.kind == EdgeKind.RESOURCE:
                found.extend(_arrow(by_id[wait.id], step))
    return _text([*_named(found), *found])


def _arrow(earlier: Step, later: Step) -> Iterator[Event]:
    """From the end of one primitive to the start of another, on a device of each."""
    shared = set(earlier.devices) & set(later.devices)
    same = {"name": "resource", "cat": "resource", "id": f"{earlier.id} {later.id}", "pid": 0}
    first, last = (min(shared or step.devices) for step in (earlier, later))
    yield {**same, "ph": "s", "ts": earlier.end_s * 1e6 - EPSILON, "tid": first}
    yield {**same, "ph": "f", "bp": "e", "ts": later.start_s * 1e6, "tid": last}


def _text(found: list[Event]) -> str:
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}) + "\n"


def _named(found: Iterable[Event]) -> list[Event]:
    lanes = sorted({event["tid"] for event in found})
    return [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": f"device {lane}"}} for lane in lanes
    ]


def events(history: History, workflow: Workflow) -> list[Event]:
    """One complete event per call and device, per primitive and device; one lane per device."""
    found: list[Event] = []
    for tick in history.ticks:
        found.extend(_calls(tick, workflow))
        decision, outcome = tick.entry.decision, tick.entry.outcome
        if isinstance(decision, Adapt) and outcome is not None:
            found.extend(_primitives(tick.entry.boundary.elapsed_s, decision.proposal.dag, outcome))
    return [*_named(found), *found]


def _calls(tick: Tick, workflow: Workflow) -> Iterator[Event]:
    seen, facts = tick.entry.seen, {"step": tick.entry.boundary.step}
    if seen.step_s is None:
        return
    edges = workflow.edges()
    lanes = _Lanes(tick.entry.boundary.elapsed_s - seen.step_s)
    for name in workflow.order():
        if name in seen.call_s:
            devices = tick.plan.of(workflow.call(name).model_stage).devices
            waits = [earlier for earlier, later in edges if later == name]
            yield from lanes.spans(name, name, seen.call_s[name], devices, waits, facts)


def _primitives(start_s: float, dag: TransitionDAG, outcome: Outcome) -> Iterator[Event]:
    before = dag.predecessors()
    lanes = _Lanes(start_s)
    for primitive in dag.primitives:
        if primitive.id in outcome.primitive_s:
            title, facts = f"{primitive.name} {primitive.model_stage}", {"primitive": str(primitive)}
            seconds = outcome.primitive_s[primitive.id]
            yield from lanes.spans(primitive.id, title, seconds, primitive.devices, before[primitive.id], facts)


@dataclass
class _Lanes:
    """When each piece of work ended and each device is free."""

    start_s: float
    ends_s: dict[str, float] = field(default_factory=dict)
    free_s: dict[int, float] = field(default_factory=dict)

    def spans(
        self, key: str, title: str, seconds: float, devices: Collection[int], waits: Iterable[str], facts: Event
    ) -> Iterator[Event]:
        """Place one piece of work as early as possible; one event per device."""
        began_s = max(
            self.start_s,
            *(self.ends_s.get(earlier, self.start_s) for earlier in waits),
            *(self.free_s.get(device, self.start_s) for device in devices),
        )
        self.ends_s[key] = began_s + seconds
        for device in sorted(devices):
            self.free_s[device] = self.ends_s[key]
            span = {"ts": began_s * 1e6, "dur": seconds * 1e6, "pid": 0, "tid": device}
            yield {"name": title, "ph": "X", **span, "args": facts}
