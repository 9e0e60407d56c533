"""The planner's answer as one self-contained page: tables, and as pictures the timeline and the memory of devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from nereus.core.sizes import show_bytes, show_seconds
from nereus.report import tables
from nereus.report.answer import IMPORTED, Answer, Comparison
from nereus.report.views import CallView, MemoryView, PlanView

WIDTH, LABEL, BAR, GAP = 960, 300, 22, 6
"""Pixels: of a picture, of the names at its left, of a bar, and between bars."""
COLOURS = ("#4878a8", "#e08a3c", "#5aa469", "#b8574f", "#8069a8", "#8c6f58", "#d477ad", "#7a7a7a", "#b5ad3f", "#3ea8b5")
FULLEST = 40
"""Groups of devices in the memory picture."""

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1000px; color: #222; }
table { border-collapse: collapse; margin: .6em 0 1.4em; } th, td { padding: .25em .7em; text-align: left; }
th { border-bottom: 2px solid #999; } td { border-bottom: 1px solid #ddd; vertical-align: top; }
.note { color: #666; } .bad { color: #a33; } svg { display: block; margin: .6em 0 1.4em; } svg text { font-size: 12px; }
"""


def page(shown: Answer, name: str, assumptions: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """HTML that needs nothing beside itself."""
    parts = [f"<h1>{escape(name)}</h1>"]
    parts += [f'<p class="note">assumed: {escape(line)}</p>' for line in assumptions]
    parts += [f'<p class="note">{escape(line)}</p>' for line in notes]
    if shown.best is None:
        parts.append(f'<p class="bad">{escape(shown.shortage)}</p>')
    if shown.comparison is not None:
        parts += _comparison(shown.comparison)
    if shown.best is not None and not (shown.comparison and shown.comparison.shows(shown.best)):
        parts += plan(shown.best, "The best plan")
    if shown.result is not None:
        parts.append(f"<p>No plan is below {show_seconds(shown.result.bound_s)} s a step.</p>")
    if shown.runners_up:
        rows = ((show_seconds(r.step_s), f"{r.slower:.1%}", r.changes) for r in shown.runners_up)
        parts += ["<h2>Plans that came close</h2>", _table(("step s", "slower by", "what differs"), rows)]
    if shown.advice:
        title = "What would help" if shown.best is None else "What would make the step shorter"
        parts += [f"<h2>{title}</h2>", "<ul>", *(f"<li>{escape(a.describe())}</li>" for a in shown.advice), "</ul>"]
    if shown.result is not None and shown.result.refused:
        rows = ((r["reason"], str(r["count"]), "; ".join(r["examples"])) for r in tables.grouped(shown.result.refused))
        parts += ["<h2>Refused</h2>", _table(("why", "how many", "for example"), rows)]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def plan(view: PlanView, title: str) -> list[str]:
    """Layouts, timeline and memory of one plan."""
    rows = (
        (
            s.model_stage,
            *map(str, (s.tp, s.pp, s.dp, s.micro_batch)),
            tables.options(s),
            s.where,
            show_seconds(s.seconds),
            f"{show_bytes(s.stored_bytes)} + {show_bytes(s.added_bytes)}",
        )
        for s in view.stages
    )
    columns = ("model-stage", "tp", "pp", "dp", "micro-batch", "with", "devices", "seconds", "stored + added")
    step = f"predicted step {show_seconds(view.step_s)} s, give or take {view.uncertainty:.0%}; {view.limited_by}"
    return [
        f"<h2>{escape(title)}</h2>",
        f"<p>{escape(step)}</p>",
        _table(columns, rows),
        "<h3>One step</h3>",
        timeline(view),
        "<h3>Memory of one device</h3>",
        memory(view.memory),
    ]


def timeline(view: PlanView) -> str:
    """A bar for every call, a line between partitions; calls on the critical path have a dark edge."""
    partitions = {stage.model_stage: stage.partition for stage in view.stages}
    rank = {call.call: partitions.get(call.model_stage, len(partitions)) for call in view.calls}
    lanes = sorted(view.calls, key=lambda call: (rank[call.call], call.start_s))
    names = list(dict.fromkeys(call.model_stage for call in view.calls))
    scale = (WIDTH - LABEL - 70) / max(view.step_s, 1e-12)
    shapes = []
    for index, call in enumerate(lanes):
        y = index * (BAR + GAP)
        if index and rank[call.call] != rank[lanes[index - 1].call]:
            shapes.append(f'<line x1="0" x2="{WIDTH}" y1="{y - GAP / 2}" y2="{y - GAP / 2}" stroke="#bbb"/>')
        edge = ' stroke="#222" stroke-width="1.5"' if call.critical else ""
        x, width = LABEL + call.start_s * scale, max(call.seconds * scale, 1.0)
        shapes.append(_text(0, y, f"{call.call} ({call.model_stage})"))
        shapes.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{_colour(names, call.model_stage)}"'
            f"{edge}><title>{escape(_about(call))}</title></rect>"
        )
        shapes.append(_text(x + width + 4, y, f"{show_seconds(call.seconds)} s"))
    return _svg(len(lanes), shapes)


def memory(rows: Sequence[MemoryView]) -> str:
    """A bar for every group of equal devices: what is stored by model-stage, what a call adds, what may be used."""
    shown = rows[:FULLEST]
    names = list(dict.fromkeys(name for row in shown for name in (*row.stored, *row.added)))
    largest = max(max(row.capacity_bytes, row.peak_bytes) for row in shown)
    scale = (WIDTH - LABEL - 130) / largest
    shapes = []
    for index, row in enumerate(shown):
        y, x = index * (BAR + GAP), float(LABEL)
        shapes.append(_text(0, y, f"{row.where} ({row.count:,})"[:44]))
        parts = [(name, f"{name} stored", size) for name, size in row.stored.items()]
        parts += [(name, f"{row.call}: {name}", size) for name, size in row.added.items()]
        for name, words, size in parts:
            about = f"<title>{escape(words)} {show_bytes(size)}</title>"
            colour = _colour(names, name)
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}" fill="{colour}">{about}</rect>'
            )
            x += size * scale
        for limit, dash in ((row.usable_bytes, "4 3"), (row.capacity_bytes, "0")):
            at = LABEL + limit * scale
            shapes.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + BAR}" stroke="#222" stroke-dasharray="{dash}"/>'
            )
        end = LABEL + max(row.peak_bytes, row.capacity_bytes) * scale
        shapes.append(_text(end + 6, y, f"{show_bytes(row.peak_bytes)}, {row.share:.0%}"))
    rest = f'<p class="note">{len(rows) - FULLEST} more groups, less full.</p>' if len(rows) > FULLEST else ""
    hint = '<p class="note">Dashed: what a plan may use; solid: capacity.</p>'
    return _legend(names) + _svg(len(shown), shapes) + rest + hint


def _comparison(found: Comparison) -> list[str]:
    parts = [f"<h2>The {escape(found.own)}</h2>"]
    if found.reason:
        parts.append(f'<p class="bad">{found.verdict}: {escape(found.reason)}</p>')
    if found.slower is not None and found.view is not None and found.other is not None:
        parts.append(
            f"<p>{show_seconds(found.view.step_s)} s a step; the best plan takes {show_seconds(found.other.step_s)} s "
            f"({found.slower:+.1%}). To the best plan: {escape(found.changes)}</p>"
        )
        rows = ((call, show_seconds(own), show_seconds(best), f"{best - own:+.3g}") for call, own, best in found.calls)
        parts.append(_table(("call", "own s", "best s", "difference s"), rows))
    if found.view is not None and found.own == IMPORTED:
        parts += plan(found.view, f"The {found.own} as a plan")
    elif found.other is not None and found.better is found.other:
        parts += plan(found.other, "The best plan without pins")
    return parts


def _about(call: CallView) -> str:
    classes = sorted(call.classes.items(), key=lambda entry: -entry[1])
    inside = ", ".join(f"{name} {show_seconds(seconds)} s" for name, seconds in classes if seconds)
    return f"{call.call}: {show_seconds(call.start_s)} to {show_seconds(call.end_s)} s; {inside}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _legend(names: Sequence[str]) -> str:
    marks = (f'<span style="color:{_colour(names, name)}">&#9632;</span> {escape(name)}' for name in names)
    return f"<p>{' &nbsp; '.join(marks)}</p>"


def _svg(lanes: int, shapes: Sequence[str]) -> str:
    height = lanes * (BAR + GAP)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(shapes)
        + "</svg>"
    )


def _text(x: float, y: int, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y + BAR - 7}">{escape(words)}</text>'


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]
