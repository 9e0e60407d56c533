"""Core values survive the way to JSON and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import (
    Adapt,
    Boundary,
    Calibration,
    Capabilities,
    ControllerState,
    Decision,
    Destroy,
    Edge,
    EdgeKind,
    Efficiency,
    EMUSet,
    Estimate,
    Extend,
    Horizon,
    Keep,
    Lengths,
    Observation,
    Outcome,
    Partition,
    Payback,
    Pin,
    Plan,
    Proposal,
    Rejection,
    Restart,
    RopeScaling,
    SettingsError,
    Timing,
    TransitionDAG,
    TransitionEstimate,
    Workload,
    expand,
)
from nereus.core.codec import decode, encode
from tests.core.values import ACTOR_TRAINING, SPEC, cluster, model_stages, plan, plans, unit

PLAN = plan(actor_training=((0,), (1,)))


def round_trip(kind: Any, value: Any) -> Any:
    return decode(kind, json.loads(json.dumps(encode(value))))


def adapt() -> Adapt:
    start, extended = unit(0), unit(1)
    dag = TransitionDAG(
        EMUSet((start,)),
        EMUSet((extended,)),
        (
            Extend("e", (start,), (extended,), "g", acquires={1: 40}),
            Destroy("d", (start,), (), "h", releases={0: 40}),
        ),
        (Edge("e", "d", EdgeKind.STATE),),
    )
    estimate = Estimate(1.5, {"update": 1.5}, {0: 10, 1: 10}, ("update",), 0.1, {0: "gradients"})
    moved = TransitionEstimate(0.2, {1: 40}, {"intra": 40}, 40, 40, 80, ("e", "d"))
    proposal = Proposal(plan(actor_training=((1,),)), dag.goal, dag, estimate, moved, 0.4)
    return Adapt(proposal, True, Payback(0.2, 0.4, float("inf"), 0.5), "device 0 leaves", (Rejection("x", "y"),))


@given(plans())
def test_plans_and_units_round_trip(drawn: Plan) -> None:
    assert round_trip(Plan, drawn) == drawn
    assert round_trip(EMUSet, expand(drawn)) == expand(drawn)


@given(
    st.dictionaries(model_stages, st.builds(Pin, st.none() | st.integers(1, 8), devices=st.none() | st.just((2, 1))))
)
def test_mappings_keyed_by_model_stage_round_trip(pins: Any) -> None:
    capabilities = Capabilities(tp=(1, 2), max_pp=3, pins=pins)
    assert round_trip(Capabilities, capabilities) == capabilities


@pytest.mark.parametrize("decision", [adapt(), Keep("nothing", (Rejection("a", "b"),)), Restart(PLAN, "no way")])
def test_decisions_round_trip_with_their_class(decision: Decision) -> None:
    copy = round_trip(Decision, decision)
    assert copy == decision
    assert type(copy) is type(decision)


def test_primitives_come_back_as_their_own_class() -> None:
    copy: TransitionDAG = round_trip(TransitionDAG, adapt().proposal.dag)
    assert [type(primitive) for primitive in copy.primitives] == [Extend, Destroy]


def test_primitives_come_back_as_their_own_class_before_any_garbage_collection() -> None:
    code = (
        "import gc; gc.disable()\n"
        "from nereus.core import Extend\n"
        "from nereus.core.codec import decode, encode\n"
        "from nereus.core.transition import Primitive\n"
        "value = Extend('e', (), (), 'g')\n"
        "raise SystemExit(0 if type(decode(Primitive, encode(value))) is Extend else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_an_observation_and_an_outcome_round_trip() -> None:
    seen = Observation(
        Boundary(3, 1.5),
        frozenset({3, 1}),
        Lengths.measured([1, 2, 9]),
        None,
        {0: 12},
        {"generate:decode": Timing(0.5, 2)},
        {"generate": 0.5},
        2.0,
        None,
        frozenset({4}),
        17,
    )
    assert round_trip(Observation, seen) == seen
    outcome = Outcome(EMUSet((unit(0),)), False, 1.0, {0: 3}, {}, {"e": 0.5}, "peer lost")
    assert round_trip(Outcome, outcome) == outcome


def test_the_whole_controller_state_round_trips() -> None:
    workload = Workload(8, 1, Lengths.constant(3), Lengths(5, 9, 12, (1, 5, 12)), 4, 12)
    part = Partition(frozenset({ACTOR_TRAINING}), frozenset({0, 1}))
    state = ControllerState(
        Plan(PLAN.assignments, (part,)),
        expand(PLAN),
        cluster(3),
        cluster(3).without({2}),
        workload,
        Calibration({"matmul": Efficiency(0.4, 3, 0.01)}, transition_count=2),
        references={"length": 5.0},
        horizons={"length": Horizon(4.0, 12, 2)},
        pending_transition_s=0.25,
        departing=frozenset({2}),
    )
    assert round_trip(ControllerState, state) == state


def test_specs_round_trip_with_nested_scaling() -> None:
    scaled = replace(SPEC, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    assert round_trip(type(SPEC), scaled) == scaled
    assert round_trip(type(SPEC), SPEC) == SPEC


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), 0.1 + 0.2, 1e-300])
def test_floats_are_exact_and_may_be_infinite(number: float) -> None:
    assert round_trip(float, number) == number


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Plan, {"assignments": 3}),
        (Plan, {"asignments": []}),
        (Plan, []),
        (Decision, {"type": "Adapt"}),
        (Timing, {"measured_s": "soon", "count": 1}),
        (TransitionDAG, {"start": {"units": []}, "goal": {"units": []}, "primitives": [{"type": "Teleport"}]}),
    ],
)
def test_data_of_another_shape_is_a_settings_error(kind: Any, data: Any) -> None:
    with pytest.raises(SettingsError):
        decode(kind, data)
