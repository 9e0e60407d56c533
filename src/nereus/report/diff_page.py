"""A transition as one self-contained page: a Gantt chart of its primitives by device, edges, bytes and memory."""

from __future__ import annotations

from html import escape
from math import floor, log10

from nereus.core.sizes import show_bytes, show_seconds
from nereus.report import devices, diff_tree, html
from nereus.report.diff import Diff, Step

LANES, ROWS = 96, 400
"""Groups of devices in the chart, where devices that do the same at the same time are one; primitives in the table."""
TICKS = 4
"""Intervals of the chart's axis, at most."""


def page(shown: Diff) -> str:
    """HTML that needs nothing beside itself."""
    title = f"{shown.names[0]} → {shown.names[1]}"
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(shown.changes)}</p>"]
    parts += [f'<p class="note">{escape(note)}</p>' for note in shown.notes]
    if shown.steps:
        rows = shown.moved if len(shown.moved) == 1 else (*shown.moved, shown.total)
        path = diff_tree.path(shown)
        parts += [
            f"<p>{escape(diff_tree.summary(shown))}</p>",
            "<h2>Primitives by device</h2>",
            gantt(shown),
            f"<p>Critical path (dark edge): {escape(path)}</p>",
            f"<p>{escape(diff_tree.order(shown))}</p>",
            "<h2>Primitives</h2>",
            _primitives(shown),
            "<h2>Bytes</h2>",
            html.table(diff_tree.BYTES, map(diff_tree.columns, rows)),
            "<h2>State on one device</h2>",
            html.table(diff_tree.MEMORY, map(diff_tree.level, shown.levels)),
        ]
    parts += [f"<p>{escape(line)}</p>" for line in diff_tree.worth(shown)]
    return html.page(title, parts)


def gantt(shown: Diff) -> str:
    """A lane for every group of devices that do the same at the same time, a bar for every primitive on it."""
    names = list(dict.fromkeys(f"{step.model_stage} {step.primitive}" for step in shown.steps))
    ended_s = max(step.end_s for step in shown.steps)
    scale = (html.WIDTH - html.LABEL - 70) / max(ended_s, 1e-12)
    lanes = _lanes(shown)
    height = min(len(lanes), LANES) * (html.BAR + html.GAP)
    shapes = [html.tick(html.LABEL + mark_s * scale, height, f"{show_seconds(mark_s)} s") for mark_s in _marks(ended_s)]
    for index, (members, steps) in enumerate(lanes[:LANES]):
        y = index * (html.BAR + html.GAP)
        shapes.append(html.text(0, y, devices.where(members, shown.problem.cluster, 3)))
        for step in steps:
            fill = html.colour(names, f"{step.model_stage} {step.primitive}")
            x, width = html.LABEL + step.start_s * scale, step.seconds * scale
            shapes.append(html.bar(x, y, width, fill, about(step), step.critical))
    more = f'<p class="note">{len(lanes) - LANES} more groups of devices.</p>' if len(lanes) > LANES else ""
    return html.legend(names) + html.svg(min(len(lanes), LANES) + 1, shapes) + more


def _marks(ended_s: float) -> list[float]:
    """Round times from 0 on: multiples of 1, 2 or 5 times a power of ten."""
    least_s = max(ended_s, 1e-12) / TICKS
    power = 10.0 ** floor(log10(least_s))
    step_s = next(times * power for times in (1, 2, 5, 10) if times * power >= least_s)
    return [index * step_s for index in range(floor(ended_s / step_s) + 1)]


def _lanes(shown: Diff) -> list[tuple[list[int], list[Step]]]:
    """(devices, their primitives), by first device."""
    on: dict[int, list[Step]] = {}
    for step in shown.steps:
        for device in step.devices:
            on.setdefault(device, []).append(step)
    alike: dict[tuple[object, ...], tuple[list[int], list[Step]]] = {}
    for device in sorted(on):
        key = tuple((s.model_stage, s.primitive, s.start_s, s.end_s, s.critical) for s in on[device])
        alike.setdefault(key, ([], on[device]))[0].append(device)
    return list(alike.values())


def about(step: Step) -> str:
    """One primitive in words."""
    moved = ", ".join(f"{show_bytes(size)} {link}" for link, size in step.link_bytes.items() if size)
    times = f"{show_seconds(step.start_s)} to {show_seconds(step.end_s)} s"
    waits = f"after {', '.join(step.waits)}" if step.after else ""
    return "; ".join(filter(None, (step.id, times, moved, waits)))


def _primitives(shown: Diff) -> str:
    """Primitives in order of execution, with what each waits for."""
    rows = (
        (
            step.id,
            step.primitive,
            f"{diff_tree.layouts(step.sources)} → {diff_tree.layouts(step.targets) or 'nothing'}",
            f"{show_seconds(step.start_s)} to {show_seconds(step.end_s)}",
            show_bytes(sum(step.link_bytes.values())),
            ", ".join(step.waits),
        )
        for step in shown.steps[:ROWS]
    )
    more = f'<p class="note">{len(shown.steps) - ROWS:,} more primitives: diff --json has all.</p>'
    table = html.table(("id", "primitive", "units", "seconds", "moved", "after"), rows)
    return table + (more if len(shown.steps) > ROWS else "")
