"""State on live workers: every shard exact after every transition, masters included; memory as the ledger says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nereus.core import EdgeKind, Kind, LogicalState, ModelStage, StateSchema, TensorSpec
from nereus.cost.state import schemas
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.trainer.checkpoint import shard_name
from nereus.transition.budget import Budget
from nereus.transition.compile import compile as compile_transition
from tests.oracles.cut import Values, cut
from tests.support.jobs import TIMEOUT_S, ReplayedJob, job_config, make_models, running
from tests.support.plans import Degrees, plan_of
from tests.trainer.plans import ALONE, SPREAD
from tests.trainer.programs import COUNTER, READER

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ACTOR, CRITIC = ModelStage.parse("actor/training"), ModelStage.parse("critic/training")
TRAINED = (ACTOR, CRITIC)
WALK: tuple[dict[str, Degrees], ...] = (
    SPREAD,
    {**SPREAD, "actor/training": (4, 1, 1, (3, 1, 2, 0)), "critic/training": (1, 2, 2, (0, 1, 2, 3))},
    {**SPREAD, "actor/training": (1, 4, 1, (0, 1, 2, 3)), "critic/training": (2, 2, 1, (3, 2, 1, 0))},
    {**ALONE, "actor/training": (1, 1, 1, (3,)), "critic/training": (1, 1, 1, (2,))},
)
Whole = Mapping[str, torch.Tensor]
"""Logical tensors by `kind/name`."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def whole_state(job: ReplayedJob) -> dict[ModelStage, Whole]:
    """A checkpoint of units that are one device each: its shards are the logical tensors."""
    path = job.checkpoint()
    return {ms: load_file(path / shard_name(ms, 0, 0)) for ms in TRAINED}


def values_of(whole: Whole) -> Values:
    def values(_: StateSchema, tensor: TensorSpec, kind: Kind) -> np.ndarray[Any, Any]:
        found = whole[f"{kind}/{tensor.name}"]
        array: np.ndarray[Any, Any] = (found.view(torch.uint16) if found.dtype == torch.bfloat16 else found).numpy()
        return array

    return values


def check_shards(job: ReplayedJob, wanted: Mapping[ModelStage, Whole]) -> None:
    """Each device holds, bit for bit, what an oracle cuts for it out of the logical tensors."""
    known = schemas(job.workflow)
    replies = job.crew.call(sorted(job.units.devices), Message("read"), TIMEOUT_S)
    for ms in TRAINED:
        for unit in job.units.of(ms):
            for device in unit.devices:
                shards = cut(known[ms], unit, device, values_of(wanted[ms]))
                mine = {key: array for key, array in replies[device].arrays.items() if key.startswith(f"{ms} ")}
                assert mine.keys() == {f"{ms} {name} {kind}" for name, kind in shards}
                for (name, kind), array in shards.items():
                    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    assert np.array_equal(mine[f"{ms} {name} {kind}"], bits), f"{unit}, device {device}: {name} {kind}"


def counters(job: ReplayedJob) -> dict[ModelStage, set[LogicalState]]:
    replies = job.crew.call(sorted(job.units.devices), Message("read"), TIMEOUT_S)
    held = [reply.fields["held"] for reply in replies.values()]
    return {ms: {positions[ms][1] for positions in held if ms in positions} for ms in job.workflow.model_stages}


def same(a: Whole, b: Whole) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_every_shard_and_counter_is_exact_after_each_transition(precision: str, models: Path, tmp_path: Path) -> None:
    config = job_config(models, precision=precision, steps=2)
    with running(config, plan_of(ALONE), tmp_path, 4, program=READER) as (job, executor):
        boundaries = job.boundaries()
        next(boundaries)
        before, counted = whole_state(job), counters(job)
        assert {state.update_count for state in counted[ACTOR]} == {2}
        kinds = {"param", "exp_avg", "exp_avg_sq"} | ({"master"} if precision == "bf16" else set())
        assert {key.partition("/")[0] for key in before[ACTOR]} == kinds
        for degrees in WALK:
            goal = plan_of(degrees)
            dag = compile_transition(job.units, goal, schemas(job.workflow))
            with job.paused():
                outcome = executor.execute(dag)
                assert outcome.completed, outcome.error
                job.adopt(outcome.units, goal)
            check_shards(job, before)
            assert counters(job) == counted
        after = whole_state(job)
        assert all(same(after[ms], before[ms]) for ms in TRAINED)
        if precision == "bf16":
            next(boundaries)
            check_masters(job, after)


def check_masters(job: ReplayedJob, before: Mapping[ModelStage, Whole]) -> None:
    """Training went on from the masters that moved: they changed, and parameters are those masters rounded."""
    assert all(np.isfinite(job.metrics[name]) for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm"))
    for ms, whole in whole_state(job).items():
        for key, master in whole.items():
            kind, _, name = key.partition("/")
            if kind == Kind.MASTER:
                assert master.dtype == torch.float32
                assert torch.equal(master.to(torch.bfloat16), whole[f"param/{name}"]), key
                assert not torch.equal(master, before[ms][key]), f"{key} has not been updated"


def pairs(crew: Crew, devices: int) -> dict[str, list[tuple[int, int]]]:
    """(ledger, independent count) by command, of all devices."""
    found: dict[str, list[tuple[int, int]]] = {}
    for reply in crew.call(range(devices), Message("counted"), TIMEOUT_S).values():
        for command, noted in reply.fields["pairs"].items():
            found.setdefault(command, []).extend(noted)
    return found


def test_the_ledger_agrees_with_a_count_of_live_storages(models: Path, tmp_path: Path) -> None:
    config = job_config(models, steps=2)
    sharded: dict[str, Degrees] = {
        **ALONE,
        "actor/generation": (1, 2, 1, (0, 1)),
        "actor/training": (2, 1, 1, (0, 1)),
        "critic/training": (1, 2, 1, (1, 0)),
    }
    with running(config, plan_of(ALONE), tmp_path, 2, program=COUNTER) as (job, executor):
        boundaries = job.boundaries()
        next(boundaries)
        goal = plan_of(sharded)
        with job.paused():
            outcome = executor.execute(compile_transition(job.units, goal, schemas(job.workflow)))
            assert outcome.completed, outcome.error
            job.adopt(outcome.units, goal)
        next(boundaries)
        found = pairs(job.crew, 2)
    assert found.keys() == {"generate", "update.prepare", "update.commit", "transition.apply"}
    for command, noted in found.items():
        worst = max(abs(ledger - count) / count for ledger, count in noted)
        assert worst <= 0.10, f"{command}: {worst:.1%} of {len(noted)} counts"


def test_no_device_holds_more_than_its_capacity_during_a_transition(models: Path, tmp_path: Path) -> None:
    """The critic's copy fits on device 1 only after the actor's copy there is gone."""
    config = replace(job_config(models), steps=1)
    start: dict[str, Degrees] = {
        **ALONE,
        "reward/inference": (1, 1, 1, (2,)),
        "actor/training": (1, 1, 2, (0, 1)),
        "critic/training": (1, 1, 1, (2,)),
    }
    goal = plan_of({**start, "actor/training": (1, 1, 1, (0,)), "critic/training": (1, 1, 2, (1, 2))})
    capacity = 360_000
    with running(config, plan_of(start), tmp_path, 3, capacity, program=COUNTER) as (job, executor):
        known = schemas(job.workflow)
        roomy = compile_transition(job.units, goal, known)
        tight = compile_transition(job.units, goal, known, Budget(dict.fromkeys(range(3), capacity)))
        assert not [edge for edge in roomy.edges if edge.kind is EdgeKind.RESOURCE]
        assert [edge for edge in tight.edges if edge.kind is EdgeKind.RESOURCE]
        with job.paused():
            outcome = executor.execute(tight)
            assert outcome.completed, outcome.error
            memory = job.crew.call(range(3), Message("memory"), TIMEOUT_S)
            job.adopt(outcome.units, goal)
        noted = pairs(job.crew, 3)["transition.apply"]
    assert max(reply.fields["peak_bytes"] for reply in memory.values()) <= capacity
    assert max(count for _, count in noted) <= capacity
    assert len(noted) > 1
