"""The demo's criteria, read off a run's summary."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.demo_seeds import Run, table

from nereus.report.summary import Ends, Summary

GOOD = Run(
    name="seed 0",
    wall_s=200.0,
    summary=Summary(
        steps=60,
        elapsed_s=190.0,
        periods=(),
        prediction_error=None,
        transitions=5,
        transition_s=1.0,
        urgent=1,
        opportunistic=2,
        kept=1,
        restarts=0,
        decisions=(),
        verifier=Ends(0.1, 0.31),
        length=Ends(6.0, 36.0),
        speed="",
    ),
    reshaped=1,
    extends=1,
    destroys=1,
)


def test_a_run_that_meets_every_criterion_says_so() -> None:
    assert GOOD.missed() == []
    assert table([GOOD]).endswith("all met")


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (replace(GOOD, summary=replace(GOOD.summary, steps=59)), "steps >= 60"),
        (replace(GOOD, summary=replace(GOOD.summary, verifier=Ends(0.11, 0.3))), "gain >= 3"),
        (replace(GOOD, summary=replace(GOOD.summary, length=Ends(6.0, 34.0))), "length >= 35"),
        (replace(GOOD, reshaped=0), "tp/pp change"),
        (replace(GOOD, extends=0), "Extend"),
        (replace(GOOD, destroys=0), "Destroy"),
        (replace(GOOD, summary=replace(GOOD.summary, urgent=0)), "urgent"),
        (replace(GOOD, summary=replace(GOOD.summary, opportunistic=0)), "opportunistic"),
    ],
)
def test_each_missed_criterion_is_named(run: Run, missed: str) -> None:
    assert run.missed() == [missed]
    assert f"missed: {missed}" in table([run])
