"""A recorded run of the demo, replayed through the brain: the same facts give the same decisions."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from nereus import settings as job_settings
from nereus.controller.admission.never import Never
from nereus.controller.brain import Brain
from nereus.controller.replay import replay
from nereus.core import Adapt, Decision, Keep
from nereus.cost.state import schemas
from nereus.report.recorders.jsonl import DECISIONS, Recording, read
from nereus.settings import build
from nereus.settings.pins import capabilities

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
ACTOR = "{family: llama, layers: 4, hidden: 64, heads: 4, kv_heads: 2, ffn_hidden: 128, vocab: 16}"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    directory = tmp_path_factory.mktemp("run")
    (directory / DECISIONS).write_bytes(gzip.decompress((HERE / "recorded" / f"{DECISIONS}.gz").read_bytes()))
    (only,) = read(directory)
    return only


@pytest.fixture(scope="module")
def brain() -> Brain:
    sizes = [f"models.{role}={ACTOR}" for role in ("actor", "reference", "reward", "critic")]
    settings = job_settings.resolve(EXAMPLES / "ppo_counting.yaml", sizes)
    workflow = build.workflow(settings)
    return Brain(
        workflow,
        capabilities(settings, workflow),
        schemas(workflow),
        build.admission_rule(settings),
        build.thresholds(settings),
    )


def _essence(decision: Decision) -> object:
    """What was decided, without the arithmetic's last digits."""
    match decision:
        case Adapt(proposal=proposal, urgent=urgent):
            return ("adapt", urgent, proposal.plan, proposal.units)
        case Keep():
            return "keep"
        case _:
            return decision


def test_the_same_facts_give_the_same_decisions(recording: Recording, brain: Brain) -> None:
    found = replay(recording.entries, brain, recording.state)
    for entry, made in zip(recording.entries, found.entries, strict=True):
        assert [t.signal for t in made.triggers] == [t.signal for t in entry.triggers]
        assert _essence(made.decision) == _essence(entry.decision), f"after step {entry.boundary.step}"


def test_the_run_shows_what_the_demo_is_for(recording: Recording) -> None:
    adapted = [entry.decision for entry in recording.entries if isinstance(entry.decision, Adapt)]
    assert {decision.urgent for decision in adapted} == {True, False}
    primitives = {primitive.name for decision in adapted for primitive in decision.proposal.dag.primitives}
    assert {"Extend", "Destroy"} <= primitives
    plans = [recording.state.plan, *(decision.proposal.plan for decision in adapted)]
    assert len({tuple(plan.of(ms).candidate.layout for ms in plan.model_stages) for plan in plans}) > 1
    assert recording.entries[-1].boundary.step >= 60


def test_another_rule_decides_otherwise_on_the_same_facts(recording: Recording, brain: Brain) -> None:
    found = replay(recording.entries, replace(brain, rule=Never()), recording.state)
    assert not any(isinstance(d, Adapt) and not d.urgent for d in found.decisions)
