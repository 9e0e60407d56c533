"""What a worker keeps from one transition to the next."""

from __future__ import annotations

import pickle

import pytest

from nereus.core import Cut, Kind, StateSchema, TensorSpec, Where
from nereus.engine.apply import as_before

TENSORS = (TensorSpec("weight", (8, 4), Where.LAYER, 0, Cut(0, 8)),)
BEFORE = StateSchema(1, TENSORS, {Kind.PARAM: "bf16", Kind.EXP_AVG: "fp32"})


def test_a_schema_that_says_the_same_is_the_object_of_before() -> None:
    told = pickle.loads(pickle.dumps(BEFORE))
    assert told is not BEFORE
    assert as_before(BEFORE, told) is BEFORE
    assert as_before(None, told) is told


@pytest.mark.parametrize(
    "told",
    [
        StateSchema(1, TENSORS, {Kind.EXP_AVG: "fp32", Kind.PARAM: "bf16"}),
        StateSchema(1, TENSORS, {Kind.PARAM: "fp32", Kind.EXP_AVG: "fp32"}),
        StateSchema(1, TENSORS, {Kind.PARAM: "bf16"}),
        StateSchema(1, (TensorSpec("weight", (8, 4), Where.LAYER, 0, Cut(1, 4)),), BEFORE.dtypes),
    ],
    ids=["order of kinds", "dtype", "kinds", "cut"],
)
def test_a_schema_that_says_anything_else_is_taken_as_told(told: StateSchema) -> None:
    assert as_before(BEFORE, told) is told
