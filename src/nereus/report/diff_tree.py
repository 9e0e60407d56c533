"""A transition for a terminal: its primitives as a tree, then bytes, memory and what it is worth.

Steps that are alike (the same primitive between the same layouts, in groups that are alike) share a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from nereus.core.sizes import show_bytes, show_seconds
from nereus.report import devices
from nereus.report.diff import Diff, Level, Moved, Step, Unit

T = TypeVar("T")

FULLEST = 12
"""Groups of devices whose memory is shown, the fullest first."""
ALONE = ("Destroy", "Offload")
"""Primitives that are in no commit group."""
BUSY = "device"
"""Why a step waits that has a device in common with another, and nothing else."""
PATH = 6
"""Primitives of the critical path that are named, from either end."""


def render(shown: Diff, every: bool = False) -> RenderableType:
    """The whole answer; with `every`, one line for each primitive instead of each kind."""
    parts: list[RenderableType] = [f"note: {escape(line)}" for line in shown.notes]
    if not shown.steps:
        parts.append(f"no state moves: {escape(shown.changes)}")
    else:
        parts += [tree(shown, every), escape(summary(shown)), _bytes(shown), _memory(shown)]
        parts.append(escape(f"critical path: {path(shown)}"))
        parts += [order(shown)] if order(shown) else []
    parts += [escape(line) for line in worth(shown)]
    return Group(*parts)


def tree(shown: Diff, every: bool = False) -> Tree:
    """Model-stages, their commit groups and destroys in order of execution, and what each waits for."""
    root = Tree(escape(f"{shown.names[0]} → {shown.names[1]}"))
    by_id = {step.id: step for step in shown.steps}
    for model_stage, words in shown.stages.items():
        branch = root.add(escape(f"{model_stage} {words}"))
        mine = [step for step in shown.steps if step.model_stage == model_stage]
        by_group = [tuple(steps) for _, steps in groupby(mine, key=lambda step: step.group)]
        for alike in _collected(by_group, lambda group: (group[0].group if every else "", *map(_shape, group))):
            steps = [step for group in alike for step in group]
            node = branch
            if steps[0].primitive not in ALONE:
                names = "commit group" if len(alike) == 1 else f"{len(alike)} commit groups like"
                node = branch.add(escape(f"{names} {alike[0][0].group}"))
            for same in _collected(steps, lambda step: (step.id if every else "", _shape(step))):
                leaf = node.add(escape(line(same, shown)))
                for words in waits(same, by_id):
                    leaf.add(escape(words))
    return root


def line(same: Sequence[Step], shown: Diff) -> str:
    """`4 x Split tp2 pp4 → 2 x tp2 pp2 on nodes 0-3: 0 to 0.12 s, 1.5 GiB intra`."""
    first = same[0]
    count = f"{len(same)} x " if len(same) > 1 else ""
    places = {place for step in same for place in _places(step)}
    text = f"{count}{first.primitive} {layouts(first.sources)}"
    if first.targets:
        text += f" → {layouts(first.targets)}"
    began, ended = min(step.start_s for step in same), max(step.end_s for step in same)
    text += f" on {devices.where(places, shown.problem.cluster, devices.SPANS)}"
    text += f": {show_seconds(began)} to {show_seconds(ended)} s"
    moved = [f"{show_bytes(size)} {link}" for link, size in _summed(step.link_bytes for step in same).items() if size]
    freed = sum(step.releases_bytes for step in same)
    hosts = sum(step.host_bytes for step in same)
    parts = [*moved, *([f"to {show_bytes(hosts)} of host memory"] if hosts else [])]
    parts += [*([f"frees {show_bytes(freed)}"] if freed else []), *(["passed on"] if first.forwards else [])]
    return ", ".join([text, *parts, *(["critical"] if any(step.critical for step in same) else [])])


def waits(same: Sequence[Step], by_id: Mapping[str, Step]) -> list[str]:
    """`state: after 2 x Merge`, `resource: after reward/inference Destroy (destroy0@1)`."""
    found: dict[tuple[str, str], set[str]] = {}
    for step in same:
        kinds = {wait.id: wait.kind for wait in step.after}
        if step.cause is not None:
            kinds.setdefault(step.cause, BUSY)
        for earlier, kind in kinds.items():
            found.setdefault((kind, _named(by_id[earlier], step)), set()).add(earlier)
    return [f"{kind}: after {_told(name, [by_id[each] for each in ids], same)}" for (kind, name), ids in found.items()]


def _named(earlier: Step, step: Step) -> str:
    """What kind of step it is, and of which model-stage if another one waits for it."""
    same = earlier.model_stage == step.model_stage
    return earlier.primitive if same else f"{earlier.model_stage} {earlier.primitive}"


def _told(name: str, earlier: Sequence[Step], same: Sequence[Step]) -> str:
    """How many there are, or which one: by its id in its model-stage, unless it is in the group of what waits."""
    if len(earlier) > 1:
        return f"{len(earlier)} x {name}"
    if all(step.group == earlier[0].group for step in same):
        return name
    return f"{name} ({earlier[0].id.removeprefix(earlier[0].model_stage + '/')})"


def summary(shown: Diff) -> str:
    """Counts, seconds and bytes in one line."""
    total, over = shown.total, shown.total.over_minimum
    around = f" ({show_seconds(shown.overhead_s)} s of it around them)" if shown.overhead_s else ""
    must = f"{show_bytes(total.minimum_bytes)} must" + (f" ({over:.3f} x)" if over is not None else "")
    counted = f"{len(shown.steps)} primitives in {show_seconds(shown.seconds)} s{around}"
    return f"{counted}; {show_bytes(total.moved_bytes)} move, at least {must}"


def order(shown: Diff) -> str:
    """How near the order is to the best one; nothing where the scheduler has no bound."""
    if shown.over_bound is None:
        return ""
    if shown.dag.certified:
        return "order: certified, none takes less"
    return f"order: {shown.over_bound:.2f} x a lower bound of what any order takes"


def worth(shown: Diff) -> list[str]:
    """What the change saves, and what it took where a run made it."""
    before, after = shown.step_s
    lines = [f"predicted step: {show_seconds(after)} s"]
    if before is not None:
        lines = [f"predicted step: {show_seconds(before)} s → {show_seconds(after)} s"]
        if shown.steps:
            steps = shown.pays_back_steps
            lines[0] += "; it never pays back" if steps is None else f"; it pays back in {steps:.2g} steps"
    if shown.outcome is not None:
        done, received = shown.outcome, sum(shown.outcome.received_bytes.values())
        end = "" if done.completed else f", and stopped: {done.error}"
        lines.append(f"measured: {show_seconds(done.seconds)} s, {show_bytes(received)} received{end}")
    return lines


def path(shown: Diff) -> str:
    """The critical path; of a long one, its ends. A model-stage is named where it begins."""
    stages = {step.id: step.model_stage for step in shown.steps}
    names = shown.critical_path
    if len(names) > 2 * PATH:
        names = (*names[:PATH], f"{len(names) - 2 * PATH} more", *names[-PATH:])
    told, before = [], None
    for name in names:
        stage = stages.get(name)
        told.append(name.removeprefix(f"{stage}/") if stage == before else name)
        before = stage
    return " → ".join(told)


def ratio(value: float | None) -> str:
    """A ratio, or a dash where nothing has to move."""
    return "-" if value is None else f"{value:.3f}"


def columns(row: Moved) -> tuple[str, ...]:
    """One row of the table of bytes."""
    sizes = (row.link_bytes.get("intra", 0), row.link_bytes.get("inter", 0), row.moved_bytes)
    return (
        row.model_stage,
        *map(show_bytes, (*sizes, row.minimum_bytes)),
        ratio(row.over_minimum),
        show_bytes(row.composed_bytes),
        ratio(row.composed_over_minimum),
    )


def level(row: Level) -> tuple[str, ...]:
    """One row of the table of memory."""
    sizes = map(show_bytes, (row.before_bytes, row.peak_bytes, row.after_bytes))
    return (row.where, f"{len(row.devices):,}", *sizes, f"{row.share:.0%} of {show_bytes(row.usable_bytes)}")


BYTES = ("model-stage", "intra", "inter", "moved", "M*", "moved / M*", "C", "C / M*")
MEMORY = ("devices", "each of", "before", "at most", "after", "of usable")


def _shape(step: Step) -> tuple[str, ...]:
    """What steps that are alike have in common."""
    return (step.primitive, layouts(step.sources), layouts(step.targets), "passed on" if step.forwards else "")


def layouts(units: Iterable[Unit]) -> str:
    """`2 x tp2 pp4`."""
    counts = Counter(unit.layout for unit in units)
    return " + ".join(f"{count} x {layout}" if count > 1 else layout for layout, count in counts.items())


def _places(step: Step) -> Iterable[int]:
    """Where it acts: the devices of what it makes, or takes away."""
    return (device for unit in step.targets or step.sources for device in unit.devices)


def _summed(each: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for sizes in each:
        total.update(sizes)
    return total


def _collected(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with equal keys together, in order of first appearance."""
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _bytes(shown: Diff) -> Table:
    table = Table(*BYTES, title="bytes by link, the least (M*) and the paper's composition (C)", title_justify="left")
    for row in shown.moved if len(shown.moved) == 1 else (*shown.moved, shown.total):
        table.add_row(*map(escape, columns(row)))
    return table


def _memory(shown: Diff) -> Table:
    table = Table(*MEMORY, title="state on one device", title_justify="left")
    for row in shown.levels[:FULLEST]:
        table.add_row(*map(escape, level(row)))
    if len(shown.levels) > FULLEST:
        table.add_row(f"{len(shown.levels) - FULLEST} more groups, less full")
    return table
