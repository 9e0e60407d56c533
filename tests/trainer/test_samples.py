"""Which samples reach which worker when the number of replicas changes inside one epoch (L04)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from nereus.algorithms.ppo import Ppo
from nereus.core import Plan
from nereus.cost.state import schemas
from nereus.engine.connection import Message
from nereus.transition.compile import compile as compile_transition
from tests.support.jobs import TIMEOUT_S, job_config, make_models, running
from tests.support.plans import plan_of
from tests.trainer.programs import SAMPLER

BATCH, START = 8, 40


def replicated(dp: int) -> Plan:
    devices = tuple(range(dp))
    names = ("actor/generation", "reference/inference", "reward/inference", "critic/training", "actor/training")
    return plan_of({name: (1, 1, dp, devices) for name in names})


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_l04_every_step_uses_the_next_samples_once_each_whatever_the_replicas(tmp_path: Path) -> None:
    """accelerate#3938, KempnerForge#57: samples came twice or not at all after a second change."""
    base = job_config(make_models(tmp_path / "models"), Ppo(), precision="fp32", steps=4)
    config = replace(base, workload=replace(base.workload, prompts=BATCH, mini_batch=4))
    plans = [replicated(dp) for dp in (2, 4, 1, 2)]
    with running(config, plans[0], tmp_path, 4, program=SAMPLER) as (job, executor):
        job.position = START
        for boundary, plan in zip(job.boundaries(), plans, strict=True):
            devices = sorted(plan.devices)
            replies = job.crew.call(devices, Message("seen"), TIMEOUT_S)
            first = START + BATCH * (boundary.step - 1)
            ids = [reply.fields["ids"] for reply in replies.values()]
            assert sorted(chain.from_iterable(ids)) == list(range(first, first + BATCH))
            assert {len(each) for each in ids} == {BATCH // len(devices)}
            trained = [tuple(prompt) for reply in replies.values() for prompt in reply.fields["prompts"]]
            wanted = [tuple(config.task.prompt(index).tokens) for index in range(first, first + BATCH)]
            assert sorted(trained) == sorted(2 * wanted), "once by the actor, once by the critic"
            if boundary.step < len(plans):
                goal = plans[boundary.step]
                with job.paused():
                    outcome = executor.execute(compile_transition(job.units, goal, schemas(job.workflow)))
                    assert outcome.completed, outcome.error
                    job.adopt(outcome.units, goal)
