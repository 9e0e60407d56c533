"""What self-contained pages are made of: the frame, tables, and bars drawn as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, LABEL, BAR, GAP = 960, 300, 22, 6
"""Pixels: of a picture, of the names at its left, of a bar, and between bars."""
COLOURS = (
    "#4878a8", "#e08a3c", "#5aa469", "#b8574f", "#8069a8", "#8c6f58", "#d477ad", "#7a7a7a", "#b5ad3f", "#3ea8b5",
    "#23395d", "#f2c14e", "#2f6b4f", "#e7a6a1", "#c3b1e1", "#a9d6e5",
)  # fmt: skip

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1000px; color: #222; }
table { border-collapse: collapse; margin: .6em 0 1.4em; } th, td { padding: .25em .7em; text-align: left; }
th { border-bottom: 2px solid #999; } td { border-bottom: 1px solid #ddd; vertical-align: top; }
.note { color: #666; } .bad { color: #a33; } svg { display: block; margin: .6em 0 1.4em; } svg text { font-size: 12px; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A document that needs nothing beside itself."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def legend(names: Sequence[str]) -> str:
    """The colour of each name."""
    marks = (f'<span style="color:{colour(names, name)}">&#9632;</span> {escape(name)}' for name in names)
    return f"<p>{' &nbsp; '.join(marks)}</p>"


def svg(lanes: int, shapes: Sequence[str]) -> str:
    """A picture of so many bars, one below another."""
    height = lanes * (BAR + GAP)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(shapes)
        + "</svg>"
    )


def text(x: float, y: int, words: str) -> str:
    """Words at the height of the bar that starts at `y`."""
    return f'<text x="{x:.1f}" y="{y + BAR - 7}">{escape(words)}</text>'


def bar(x: float, y: int, width: float, fill: str, about: str, edge: bool = False) -> str:
    """A bar, with a dark edge if so asked; `about` shows under the pointer."""
    line = ' stroke="#222" stroke-width="1.5"' if edge else ""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1.0):.1f}" height="{BAR}" fill="{fill}"{line}>'
        f"<title>{escape(about)}</title></rect>"
    )


def tick(x: float, height: int, words: str) -> str:
    """A line through all bars, with what it stands for below them."""
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#ddd"/>'
    return line + f'<text x="{x:.1f}" y="{height + BAR - 7}" text-anchor="middle" fill="#666">{escape(words)}</text>'


def colour(names: Sequence[str], name: str) -> str:
    """Of one of several names."""
    return COLOURS[names.index(name) % len(COLOURS)]
