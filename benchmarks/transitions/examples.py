"""What the paper's examples move: Fig. 5, §5.1 and Fig. 6 with its own GPU numbers, in copies of an 8B model's state.

`python -m benchmarks.transitions --only examples`. Moved is the sum over all routes, M* the least that any deal of
positions moves, C what the paper's composition (gather units of the common layout, then slice) moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks._result import Result
from nereus.core import Assignment, Candidate, Layout, ModelStage, Plan, expand
from nereus.cost.state import schema
from nereus.families.models import named
from nereus.transition import compile, composed_bytes, minimum_bytes, pair_bytes

MS = ModelStage.parse("actor/training")
MODEL, LIMIT = "llama-3.1-8b", 1.02


def gpus(first: int, last: int) -> tuple[int, ...]:
    """The paper counts from 1 and both ends in."""
    return tuple(range(first, last + 1))


@dataclass(frozen=True, slots=True)
class Example:
    """(TP, PP) and devices in order, before and after."""

    name: str
    before: tuple[int, int]
    start: tuple[int, ...]
    after: tuple[int, int]
    goal: tuple[int, ...]


EXAMPLES = (
    Example("Fig. 5a, PP-Split", (2, 2), gpus(1, 4), (2, 1), gpus(1, 4)),
    Example("Fig. 5a, TP-Split", (2, 2), gpus(1, 4), (1, 2), (1, 3, 2, 4)),
    Example("Fig. 5b, PP-Merge", (2, 1), gpus(1, 4), (2, 2), gpus(1, 4)),
    Example("Fig. 5b, TP-Merge", (1, 2), (1, 3, 2, 4), (2, 2), gpus(1, 4)),
    Example("Fig. 5c, Extend DP2 → DP4", (1, 2), (1, 3, 2, 4), (1, 2), (1, 3, 2, 4, *gpus(5, 8))),
    Example("Fig. 5d, Destroy DP2 → DP1", (1, 4), gpus(1, 8), (1, 4), gpus(5, 8)),
    Example("§5.1 actor TP1,PP4 → TP2,PP4 (DP2)", (1, 4), gpus(1, 8), (2, 4), gpus(1, 16)),
    Example("§5.1 critic DP2 → DP4 (TP1,PP4)", (1, 4), gpus(9, 16), (1, 4), gpus(9, 16) + gpus(17, 24)),
    Example("Fig. 6 actor TP2,PP4,DP4 → TP4,PP2,DP6", (2, 4), gpus(1, 32), (4, 2), gpus(1, 32) + gpus(49, 64)),
    Example("Fig. 6 reward TP4,PP8 → TP8,PP2", (4, 8), gpus(33, 64), (8, 2), gpus(33, 48)),
    Example("Fig. 6 critic TP1,PP4,DP8 → TP1,PP2,DP24", (1, 4), gpus(65, 96), (1, 2), gpus(49, 96)),
)


def run(quick: bool = False) -> list[Result]:  # noqa: ARG001  it takes no time
    """One line an example."""
    held = schema(named(MODEL), trained=True)
    whole = sum(tensor.elements for tensor in held.tensors) * held.element_bytes
    lines: list[Result] = []
    for example in EXAMPLES:
        before, after = (_plan(*each) for each in ((example.before, example.start), (example.after, example.goal)))
        dag = compile(expand(before), after, {MS: held})
        moved = sum(sum(pairs.values()) for pairs in pair_bytes(dag, {MS: held}).values())
        ends = dag.start.blocks(MS), dag.goal.blocks(MS)
        least, composed = minimum_bytes(held, *ends), composed_bytes(held, *ends)
        copies = [size / whole for size in (moved, least, composed)]
        steps = " ".join(dict.fromkeys(step.name for step in dag.primitives))
        lines.append(
            Result(
                f"{example.name}: moved, M* in copies",
                f"<= {LIMIT:g} M*",
                copies[0],
                copies[1],
                moved / least if least else None,
                moved <= LIMIT * least,
                f"the paper's composition {copies[2]:.3f}; {steps}",
                {"example": example.name, "copies": copies, "bytes": [moved, least, composed], "steps": steps},
            )
        )
    return lines


def tables(lines: Sequence[Result]) -> list[Table]:
    """All of them side by side."""
    table = Table("example", "primitives", "moved", "M*", "C", "C / moved", title=f"Copies of the state of {MODEL}")
    for line in lines:
        if "copies" in line.details:
            moved, least, composed = line.details["copies"]
            ratio = f"{composed / moved:.2f}" if moved else "–"
            cells = (f"{moved:.3f}", f"{least:.3f}", f"{composed:.3f}", ratio)
            table.add_row(line.details["example"], line.details["steps"], *cells)
    return [table]


def _plan(degrees: tuple[int, int], devices: tuple[int, ...]) -> Plan:
    layout = Layout(*degrees)
    units = tuple(devices[i : i + layout.size] for i in range(0, len(devices), layout.size))
    return Plan((Assignment(Candidate(MS, layout, len(units)), units),))
