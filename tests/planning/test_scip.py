"""SCIP, given one binary for each candidate, proves the same optimum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.planning.select import choose
from tests.oracles.brute_force_plans import fastest
from tests.oracles.scip_plans import columns_of, solve
from tests.planning.test_exact import problems, table

pytest.importorskip("pyscipopt")


@settings(max_examples=6, deadline=None)
@given(problems(rows=5, inference=st.integers(1, 2), training=st.integers(1, 2), asynchronous=st.booleans()))
def test_the_search_equals_scip_and_scip_equals_trying_everything(problem: Any) -> None:
    flow, rows, slots, room = problem
    tables = {ms: table(flow, ms, each) for ms, each in rows.items()}
    alone = {ms: each[each.resident + each.transient <= room] for ms, each in tables.items()}
    best = choose(flow, alone, slots, room, 1)
    calls = {ms: [call.name for call in flow.calls_of(ms)] for ms in tables}
    upper_s = sum(max(sum(row.call_s.values()) + row.sync_s for row in each) for each in rows.values()) + 1
    answer = solve(flow, columns_of(tables, calls), slots, room, upper_s)
    everything = min(fastest(flow, rows, slots, room).values(), default=float("inf"))
    if everything == float("inf"):
        assert not best.found
        assert answer.status == "infeasible"
        return
    assert answer.status == "optimal"
    assert answer.step_s == pytest.approx(everything, rel=1e-5)
    assert min(found.step_s for found in best.found.values()) == pytest.approx(everything, rel=1e-9)


def test_the_program_is_written_for_third_parties(tmp_path: Path) -> None:
    from tests.oracles.brute_force_plans import Row
    from tests.planning.test_exact import workflow

    flow = workflow(1, 1)
    rows = {ms: [Row(0, 1, 1.0, 1.0, {c.name: 2.0 for c in flow.calls_of(ms)}, 0.0)] for ms in flow.model_stages}
    tables = {ms: table(flow, ms, each) for ms, each in rows.items()}
    calls = {ms: [call.name for call in flow.calls_of(ms)] for ms in tables}
    answer = solve(flow, columns_of(tables, calls), 1, 10.0, 50.0, written_to=tmp_path / "job.cip")
    assert answer.step_s == pytest.approx(8.0)
    assert "actor/generation_0" in (tmp_path / "job.cip").read_text()
