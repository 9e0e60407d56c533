"""When nothing fits: the plan that would fit in the least memory, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from nereus.core import InfeasibleError, Plan
from nereus.cost.step import StepModel
from nereus.planning.choices import ENDLESS, Arrangement, Choices, width
from nereus.planning.exact import Best, Solver
from nereus.planning.judge import explain_shortage, shortage
from nereus.planning.problem import Problem
from nereus.planning.select import fastest
from nereus.planning.table import Table, beaten

PRECISION = 1e-6


def nothing_fits(problem: Problem, model: StepModel, choices: Choices, lean: Plan | None) -> InfeasibleError | None:
    """The error that says what the leanest plan lacks, on which device and why; None when it fits after all."""
    devices = len(problem.cluster.devices)
    where = f"no plan fits {devices} devices"
    for model_stage in problem.workflow.model_stages:
        if not choices.exists(model_stage):
            reasons = {r.reason for r in choices.refusals.all() if r.plan.startswith(str(model_stage))}
            words = "; ".join(sorted(reasons)) or "its degrees need more devices than there are"
            return InfeasibleError(f"{where}: {model_stage} has no layout there ({words})")
    if lean is None:
        return InfeasibleError(f"{where}: no two model-stages share these devices whatever their memory")
    peaks = model.peaks(lean)
    short = shortage(problem, peaks)
    if not short:
        return None
    if any(could_fit(arrangements) for _, arrangements in loose(choices)):
        where += " (the fullest pp ranks of model-stages are counted as if on one device)"
    return InfeasibleError(
        f"{where}; the one that needs least is {lean.describe()}: {explain_shortage(problem, peaks)}", short
    )


def leanest(choices: Choices) -> Plan | None:
    """The fastest plan that fits devices as much larger as need be, and no smaller ones; None where none ever fits."""
    times = _least_times(choices)
    if times is None:
        return None
    arrangements = list(choices.arrangements(times * (1 + PRECISION)))
    (found,) = fastest(arrangements, choices.problem.workflow, 1).found.values()
    return choices.plan(arrangements[found.arrangement], found)


def loose(choices: Choices) -> Iterator[tuple[Choices, list[Arrangement]]]:
    """All arrangements with bytes that no plan uses less of.

    Where model-stages of a partition follow each other on the same devices, that is of their first pp ranks.
    """
    first, least = choices.counting("first"), choices.counting("emptiest")
    yield first, [each for each in first.arrangements() if _in_turns(each)]
    yield least, [each for each in least.arrangements() if not _in_turns(each)]


def _in_turns(each: Arrangement) -> bool:
    """Whether the model-stages of every partition begin on the same device."""
    homes = each.program.home
    sites = {(home, each.sites[ms]) for home, ms in zip(homes, each.program.levels, strict=True)}
    return len(sites) == len(set(homes)) and all(width(each.program, home) == 1 for home in set(homes))


def could_fit(arrangements: Sequence[Arrangement]) -> bool:
    """Whether any plan fits by the bytes that are counted."""
    return any(_fits(each, 1.0) for each in _timeless(arrangements))


def _least_times(choices: Choices) -> float | None:
    """How many times their memory devices need for any plan to fit."""
    least = 1 + PRECISION
    for each in _timeless(list(choices.arrangements(ENDLESS))):
        if _fits(each, least * (1 - PRECISION)):
            least = _least_share(each, least)
    return least * ENDLESS if least <= 1 else None


def _least_share(each: Arrangement, enough: float) -> float:
    """The share of its room that an arrangement needs."""
    low, high = 0.0, enough
    while high * ENDLESS > 1 and _fits(each, high / 4):
        high /= 4
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(each, middle) else (middle, high)
    return high


def _fits(each: Arrangement, share: float) -> bool:
    """Whether an arrangement has a choice that fits this share of its room."""
    room = [share * whole for whole in each.room]
    homes = zip(each.tables, each.program.home, strict=True)
    tables = [table[table.resident + table.transient <= room[home]] for table, home in homes]
    if not all(map(len, tables)):
        return False
    best = Best(1)
    Solver(each.program, tables, each.slots, room, best).run()
    return bool(best.found)


def _timeless(arrangements: Sequence[Arrangement]) -> list[Arrangement]:
    """The same where nothing takes any time: of each table the rows that no other needs less than in everything."""
    known: dict[int, Table] = {}

    def lean(table: Table) -> Table:
        if id(table) not in known:
            sizes = [column.astype(np.float64) for column in (table.resident, table.transient, table.slots)]
            kept = table[~beaten(sizes, np.zeros(len(table), dtype=np.int64), 1)]
            nothing = np.zeros(len(kept))
            known[id(table)] = replace(kept, calls=(nothing,) * len(kept.calls), sync=nothing, _weights={})
        return known[id(table)]

    return [replace(each, tables=tuple(map(lean, each.tables))) for each in arrangements]
