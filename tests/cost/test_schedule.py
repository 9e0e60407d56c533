"""What waits for what, and how long a step is: by hand, and against a simulation of devices and partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Assignment, Candidate, Layout, ModelStage, Partition, Plan, Stage, Workflow, plugins
from nereus.cost.schedule import SYNC, node_order, timeline, waits
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, REFERENCE, REWARD, TINY, ppo

SECONDS = {
    "generate": 10.0,
    "reference_log_probs": 3.0,
    "reward_scores": 2.0,
    "old_log_probs": 4.0,
    "values": 1.0,
    "update_actor": 6.0,
    "update_critic": 5.0,
    SYNC: 0.5,
}


def placed(devices: Mapping[ModelStage, range], *cut: tuple[set[ModelStage], range]) -> Plan:
    """Replicas of one device each on a range of devices, and the partitions of a cut."""
    assignments = tuple(
        Assignment(Candidate(ms, Layout(), len(own)), tuple((device,) for device in own)) for ms, own in devices.items()
    )
    return Plan(assignments, tuple(Partition(frozenset(members), frozenset(part)) for members, part in cut))


def step_s(plan: Plan, workflow: Workflow | None = None, **changes: float) -> float:
    job = workflow or ppo()
    return timeline(node_order(job)[0], waits(job, plan), SECONDS | changes).step_s


def everything(own: range) -> dict[ModelStage, range]:
    return dict.fromkeys((GENERATION, REFERENCE, REWARD, ACTOR, CRITIC), own)


def test_colocated_model_stages_run_one_after_another() -> None:
    assert step_s(placed(everything(range(4)))) == sum(SECONDS.values())


def test_models_of_one_stage_on_disjoint_devices_cost_the_maximum() -> None:
    """Generation 10; max(3, 2) for inference; per critic and actor max(4, 1) then max(6, 5); sync 0.5."""
    halves = {REFERENCE: range(2), REWARD: range(2, 4), ACTOR: range(2), CRITIC: range(2, 4)}
    plan = placed(everything(range(4)) | halves, (set(ppo().model_stages), range(4)))
    assert step_s(plan) == 10 + 3 + 4 + 6 + 0.5


def test_a_partition_runs_one_stage_at_a_time() -> None:
    """Old log-probs on devices that inference does not use wait for it all the same, if the partition is the same."""
    plan = everything(range(2)) | {REFERENCE: range(2, 4), REWARD: range(2, 4)}
    stages = {GENERATION, REFERENCE, REWARD, ACTOR, CRITIC}
    assert step_s(placed(plan)) == 10 + (4 + 1) + 6 + 5 + 0.5
    assert step_s(placed(plan, (stages, range(4)))) == 10 + (3 + 2) + (4 + 1) + (6 + 5) + 0.5


def test_stages_of_a_partition_do_not_alternate() -> None:
    """ReMax scores a second, greedy set of responses: still all of inference comes before the old log-probs."""
    algorithm = plugins.make("nereus.algorithms", "remax", {})
    job = algorithm.workflow({role: TINY for role in algorithm.models()})
    own = {REFERENCE: range(2), REWARD: range(2, 4)} | {ms: range(4) for ms in (GENERATION, ACTOR)}
    seconds = {name: SECONDS.get(name, 1.0) for name in node_order(job)[0]} | {"greedy_reward_scores": 2.5}
    turns = waits(job, placed(own, (set(job.model_stages), range(4))))
    # Two generations, then reference (3) beside two scorings (2 + 2.5), old log-probs, update, synchronisation.
    assert timeline(node_order(job)[0], turns, seconds).step_s == (10 + 1) + max(3, 2 + 2.5) + 4 + 6 + 0.5


def test_partitions_run_beside_each_other_where_data_allows() -> None:
    """Generation | rest: nothing overlaps in a synchronous step. Inference | rest: it hides behind old log-probs."""
    rest = {REFERENCE, REWARD, ACTOR, CRITIC}
    apart = placed(everything(range(2, 4)) | {GENERATION: range(2)}, ({GENERATION}, range(2)), (rest, range(2, 4)))
    assert step_s(apart) == sum(SECONDS.values())
    beside = placed(
        everything(range(2)) | {REFERENCE: range(2, 4), REWARD: range(2, 4)},
        ({GENERATION, ACTOR, CRITIC}, range(2)),
        ({REFERENCE, REWARD}, range(2, 4)),
    )
    assert step_s(beside) == 10 + max(3 + 2, 4 + 1) + (6 + 5) + 0.5


def test_the_weights_travel_after_everything() -> None:
    """The critic's update does not touch the weights that are synchronised, and is waited for."""
    halves = placed(everything(range(2)) | {CRITIC: range(2, 4)})
    assert step_s(halves, update_critic=50.0) == 10 + (3 + 2 + 4) + 50 + 0.5


def test_an_asynchronous_step_is_the_longer_of_generation_and_the_rest() -> None:
    job = replace(ppo(), asynchronous=True)
    rest = {REFERENCE, REWARD, ACTOR, CRITIC}
    plan = placed(everything(range(2, 4)) | {GENERATION: range(2)}, ({GENERATION}, range(2)), (rest, range(2, 4)))
    assert step_s(plan, job) == 21 + 0.5
    assert step_s(plan, job, generate=30.0) == 30 + 0.5
    assert step_s(placed(everything(range(2))), job) == sum(SECONDS.values())


def test_the_critical_path_names_the_calls_that_make_the_step() -> None:
    plan = placed(everything(range(2)) | {REFERENCE: range(2, 4), REWARD: range(2, 4)})
    found = timeline(node_order(ppo())[0], waits(ppo(), plan), SECONDS | {"reward_scores": 20.0})
    assert found.critical_path == (
        "generate",
        "reference_log_probs",
        "reward_scores",
        "update_actor",
        "update_critic",
        SYNC,
    )
    assert found.ends_s["reward_scores"] == 33.0


def simulated(workflow: Workflow, plan: Plan, seconds: Mapping[str, float]) -> float:
    """The end of the last call when every resource hands itself out in workflow order.

    Resources are devices and, for each partition, its present stage; a column is there when its writer is done.
    """
    order = [name for name in node_order(workflow)[0] if name != SYNC]
    free_s = dict.fromkeys(plan.devices, 0.0)
    stage_done_s: dict[tuple[int, Stage], float] = {}
    written_s: dict[str, float] = {}
    for name in order:
        call = workflow.call(name)
        own = plan.of(call.model_stage).devices
        homes = [i for i, part in enumerate(plan.partitions) if call.model_stage in part.model_stages]
        ready = [free_s[device] for device in own]
        ready += [written_s.get(column, 0.0) for column in call.reads]
        ready += [
            done
            for (home, stage), done in stage_done_s.items()
            if home in homes and stage is not call.model_stage.stage
        ]
        end = max(ready) + seconds[name]
        free_s.update(dict.fromkeys(own, end))
        written_s.update(dict.fromkeys(call.writes, end))
        for home in homes:
            key = (home, call.model_stage.stage)
            stage_done_s[key] = max(stage_done_s.get(key, 0.0), end)
    return max(free_s.values()) + seconds[SYNC]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Five model-stages anywhere on six devices, whole or cut into two partitions of three."""
    members = (GENERATION, REFERENCE, REWARD, ACTOR, CRITIC)
    cut = draw(st.booleans())
    left = frozenset(ms for ms in members if cut and draw(st.booleans()))
    devices = {}
    for ms in members:
        pool = range(6) if not cut else range(3) if ms in left else range(3, 6)
        first = draw(st.integers(pool.start, pool.stop - 1))
        devices[ms] = range(first, draw(st.integers(first + 1, pool.stop)))
    parts = ((set(left), range(3)), (set(members) - left, range(3, 6))) if cut else ()
    return placed(devices, *parts)


@settings(max_examples=150, deadline=None)
@given(plan=plans(), times=st.lists(st.floats(0.1, 10.0), min_size=8, max_size=8))
def test_the_longest_path_is_what_a_simulation_of_the_step_takes(plan: Plan, times: list[float]) -> None:
    seconds = dict(zip(SECONDS, times, strict=True))
    order = node_order(ppo())[0]
    assert timeline(order, waits(ppo(), plan), seconds).step_s == pytest.approx(simulated(ppo(), plan, seconds))


@settings(max_examples=60, deadline=None)
@given(plan=plans(), times=st.lists(st.floats(0.1, 10.0), min_size=8, max_size=8), which=st.integers(0, 7))
def test_a_longer_call_never_makes_the_step_shorter(plan: Plan, times: list[float], which: int) -> None:
    seconds = dict(zip(SECONDS, times, strict=True))
    longer = seconds | {list(SECONDS)[which]: times[which] + 1.0}
    order, turns = node_order(ppo())[0], waits(ppo(), plan)
    assert timeline(order, turns, longer).step_s >= timeline(order, turns, seconds).step_s
