"""Three replicas against two: the plans compared, the order of visits, and what the table makes of the seconds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from benchmarks.planner import any_dp
from benchmarks.planner.any_dp import ANY, DEVICES, POWER, SEQUENCES, SIZES, Found, job_config, lines, plan, turns
from transformers import LlamaConfig, LlamaForCausalLM

from nereus.clusters.local import Local
from nereus.core import Boundary, Observation, Timing
from nereus.cost.step import StepModel
from nereus.planning.judge import misfit
from nereus.planning.problem import Problem
from nereus.trainer.config import JobConfig

TINY = LlamaConfig(**{**SIZES.to_dict(), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(SIZES).save_pretrained(path)
    return job_config(path)


def test_both_plans_are_legal_on_the_devices_and_differ_in_replicas_alone(config: JobConfig) -> None:
    workflow = config.algorithm.workflow(config.specs)
    pool = Local(DEVICES, any_dp.CAPACITY, any_dp.SPEED, cores=2).cluster()
    problem = Problem(workflow, config.workload, pool, config.capabilities)
    two, three = (plan(config, dp) for dp in (POWER, ANY))
    for each in (two, three):
        assert misfit(problem, problem.model(), each) is None
        assert {a.candidate.model_stage for a in each.assignments} == set(workflow.model_stages)
    for a, b in zip(two.assignments, three.assignments, strict=True):
        assert (a.candidate.dp, b.candidate.dp) == (2, 3)
        assert (a.candidate.layout, a.candidate.micro_batch) == (b.candidate.layout, b.candidate.micro_batch)


def test_a_third_replica_is_predicted_to_pay_no_more_than_the_largest_share_shrinks(config: JobConfig) -> None:
    model = StepModel(config.algorithm.workflow(config.specs), config.workload, Local(DEVICES, "1 GiB", 0.2).cluster())
    seconds = any_dp.predicted(model, {dp: plan(config, dp) for dp in (POWER, ANY)})
    largest = -(-SEQUENCES // ANY)
    for name in (any_dp.UPDATE, any_dp.STEP):
        assert 1.0 < seconds[POWER][name] / seconds[ANY][name] <= (SEQUENCES / POWER) / largest


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_both_sides_are_visited_equally_often_and_neither_always_first(repeats: int) -> None:
    order = turns(repeats)
    assert order.count(POWER) == order.count(ANY) == repeats
    firsts = order[::2]
    assert abs(firsts.count(POWER) - firsts.count(ANY)) <= 1
    assert all({a, b} == {POWER, ANY} for a, b in zip(order[::2], order[1::2], strict=True))


def test_cpu_time_of_a_call_is_that_of_its_compute_classes() -> None:
    timings = {
        "update_actor:forward": 1.0,
        "update_actor:backward": 2.0,
        "update_actor:dp": 9.0,
        "generate:decode": 4.0,
    }
    seen = Observation(
        Boundary(1, 1.0),
        devices=frozenset({0}),
        call_s={"update_actor": 20.0, "generate": 5.0},
        step_s=26.0,
        timings={name: Timing(took, 1) for name, took in timings.items()},
    )
    found = any_dp.seconds(seen)
    assert {name: found[name] for name in ("update_actor", "generate", "step")} == {
        "update_actor": 20.0,
        "generate": 5.0,
        "step": 26.0,
    }
    cpu = [found[any_dp.cpu_name(name)] for name in ("update_actor", "generate", "step")]
    assert cpu == [3.0, 4.0, 7.0]


def test_lines_hold_medians_and_how_much_visits_differ() -> None:
    def steps(*seconds: float) -> list[Mapping[str, float]]:
        wall = [{any_dp.UPDATE: s, any_dp.STEP: 2 * s} for s in seconds]
        return [step | {any_dp.cpu_name(name): s**2 for name, s in step.items()} for step in wall]

    found = Found(
        visits={POWER: [steps(3.0, 3.0), steps(6.0, 9.0)], ANY: [steps(2.0, 2.0), steps(4.0, 1.0)]},
        before={POWER: steps(1.4)[0], ANY: steps(1.0)[0]},
        learnt={POWER: steps(1.2)[0], ANY: steps(1.0)[0]},
    )
    update, step = lines(found)
    assert (update.measured, update.baseline, update.ratio) == (2.0, 4.5, 2.25)
    assert (step.measured, step.baseline, step.ratio) == (4.0, 9.0, 2.25)
    assert (
        "1.50 to 3.00 by visit, 5.625 by CPU time (wall / CPU 0.50 against 0.20); predicted 1.200 after" in update.notes
    )
    assert "1.400 before" in update.notes
    assert update.details["measured_s"] == {POWER: [3.0, 3.0, 6.0, 9.0], ANY: [2.0, 2.0, 4.0, 1.0]}


@pytest.mark.processes
def test_one_visit_to_each_plan_times_every_call_and_teaches_the_planner() -> None:
    found = any_dp.measure(repeats=1, steps=1, sizes=TINY)
    for dp in (POWER, ANY):
        ((step,),) = found.visits[dp]
        for name in (any_dp.UPDATE, "generate", "reference_log_probs", any_dp.STEP):
            assert 0 < step[name] <= step[any_dp.STEP]
            assert 0 < step[any_dp.cpu_name(name)] <= step[any_dp.cpu_name(any_dp.STEP)]
    assert found.before[ANY] != found.learnt[ANY]


def test_no_visits_are_refused() -> None:
    with pytest.raises(SystemExit):
        any_dp.main(["--repeats", "0"])
