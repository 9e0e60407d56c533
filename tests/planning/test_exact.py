"""The search equals trying everything, on random small problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Call, ModelStage, Stage, Work, Workflow
from nereus.planning import exact
from nereus.planning.select import choose
from nereus.planning.table import Table
from tests.cost.jobs import TINY
from tests.oracles.brute_force_plans import Row, fastest


def workflow(
    inference: int, training: int, greedy: bool = False, frozen: bool = False, asynchronous: bool = False
) -> Workflow:
    """A job with so many models in inference and training; `greedy` generates twice, as ReMax does."""
    calls = [Call("generate", ModelStage("actor", Stage.GENERATION), Work.GENERATE, ("prompts",), ("responses",))]
    if greedy:
        calls.append(Call("greedy", ModelStage("actor", Stage.GENERATION), Work.GENERATE, ("prompts",), ("baseline",)))
    names = [f"judge{index}" for index in range(inference)]
    for index, name in enumerate(names):
        reads = ("baseline",) if greedy and index == 0 else ("responses",)
        calls.append(Call(name, ModelStage(name, Stage.INFERENCE), Work.FORWARD, reads, (name,)))
    trained = [f"student{index}" for index in range(training)]
    for name in trained:
        calls.append(
            Call(f"{name}_old", ModelStage(name, Stage.TRAINING), Work.FORWARD, ("responses",), (f"{name}_old",))
        )
    columns = tuple(column for call in calls for column in call.writes)
    for name in () if frozen else trained:
        calls.append(Call(f"{name}_update", ModelStage(name, Stage.TRAINING), Work.UPDATE, columns))
    models = {call.model_stage.model for call in calls}
    return Workflow(tuple(calls), dict.fromkeys(models, TINY), asynchronous=asynchronous)


def table(flow: Workflow, model_stage: ModelStage, rows: Sequence[Row]) -> Table:
    return Table(
        tuple(np.array([row.call_s[call.name] for row in rows]) for call in flow.calls_of(model_stage)),
        np.array([row.sync_s for row in rows]),
        np.array([row.slots for row in rows]),
        np.array([row.resident for row in rows]),
        np.array([row.transient for row in rows]),
        np.array([row.name for row in rows]),
        np.arange(len(rows)),
    )


seconds = st.integers(1, 40).map(float)
sizes = st.integers(0, 12).map(float)


Drawn = tuple[Workflow, dict[ModelStage, list[Row]], int, float]


@st.composite
def problems(draw: st.DrawFn, /, rows: int, **jobs: Any) -> Drawn:
    flow = workflow(**{key: draw(value) for key, value in jobs.items()})
    slots = draw(st.integers(1, 6))
    found = {
        ms: [
            Row(
                draw(st.integers(0, 2)),
                draw(st.integers(1, slots)),
                draw(sizes),
                draw(sizes),
                {call.name: draw(seconds) for call in flow.calls_of(ms)},
                draw(st.sampled_from([0.0, 0.5])),
            )
            for _ in range(draw(st.integers(1, rows)))
        ]
        for ms in flow.model_stages
    }
    return flow, found, slots, float(draw(st.integers(10, 60)))


def check(flow: Workflow, rows: Mapping[ModelStage, Sequence[Row]], slots: int, room: float, k: int) -> None:
    expected = sorted(fastest(flow, rows, slots, room).values())[:k]
    tables = {ms: table(flow, ms, each) for ms, each in rows.items()}
    alone = {ms: each[each.resident + each.transient <= room] for ms, each in tables.items()}
    best = choose(flow, alone, slots, room, k)
    assert sorted(found.step_s for found in best.found.values()) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems(rows=4, inference=st.integers(0, 2), training=st.integers(0, 2)), st.sampled_from([1, 2, 5]))
def test_the_fastest_layouts_of_jobs_like_ppo_and_grpo(problem: Drawn, k: int) -> None:
    flow, rows, slots, room = problem
    check(flow, rows, slots, room, k)


@settings(max_examples=8, deadline=None)
@given(problems(rows=2, inference=st.integers(3, 4), training=st.just(1)), st.sampled_from([1, 3]))
def test_three_and_four_models_of_one_stage(problem: Drawn, k: int) -> None:
    flow, rows, slots, room = problem
    check(flow, rows, slots, room, k)


@settings(max_examples=8, deadline=None)
@given(problems(rows=2, inference=st.just(1), training=st.just(3), frozen=st.booleans()), st.sampled_from([1, 3]))
def test_three_models_that_are_trained(problem: Drawn, k: int) -> None:
    flow, rows, slots, room = problem
    check(flow, rows, slots, room, k)


@settings(max_examples=15, deadline=None)
@given(
    problems(rows=3, inference=st.integers(1, 2), training=st.just(1), greedy=st.just(True)), st.sampled_from([1, 4])
)
def test_calls_that_need_not_wait_for_all_of_generation(problem: Drawn, k: int) -> None:
    flow, rows, slots, room = problem
    check(flow, rows, slots, room, k)


@settings(max_examples=25, deadline=None)
@given(
    problems(rows=4, inference=st.integers(0, 2), training=st.integers(1, 2), asynchronous=st.just(True)),
    st.sampled_from([1, 2, 5]),
)
def test_generation_goes_on_beside_training(problem: Drawn, k: int) -> None:
    flow, rows, slots, room = problem
    check(flow, rows, slots, room, k)


@settings(max_examples=25, deadline=None)
@given(
    problems(rows=4, inference=st.integers(1, 2), training=st.integers(1, 2), asynchronous=st.booleans()),
    st.sampled_from([1, 2, 5]),
    st.integers(1, 2),
    st.sampled_from([4, 16]),
)
def test_crowds_are_completed_a_few_at_a_time_and_none_is_lost(problem: Drawn, k: int, few: int, cells: int) -> None:
    flow, rows, slots, room = problem
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("SHORT", 0), ("CROWD", 2), ("FEW", few), ("CELLS", cells)):
            patch.setattr(exact, name, value)
        check(flow, rows, slots, room, k)
