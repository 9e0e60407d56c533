"""`nereus diff`: from files and from a run, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
import yaml

from nereus import settings
from nereus.core import Boundary, ControllerState, Keep, Layout, Lengths, ModelStage, Outcome, Plan, codec, expand
from nereus.report.recorders.jsonl import Jsonl
from tests.cli.command import Answer, Command
from tests.controller.world import SPEC
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, REFERENCE, REWARD, WORKLOAD, assignment, cluster, grpo, plan, ppo
from tests.fakes import adapt, proposal, seen
from tests.settings.files import job
from tests.support import answers

FLOW = grpo(SPEC)
A = plan(assignment(GENERATION, dp=2), assignment(REFERENCE, dp=2), assignment(ACTOR, tp=2))
B = plan(assignment(GENERATION, tp=2), assignment(REFERENCE, dp=2), assignment(ACTOR, pp=2, dp=2))


def written(folder: Path, name: str, which: Plan, devices: int = 4, **job: object) -> Path:
    parts = {"workflow": FLOW, "workload": WORKLOAD, "cluster": cluster(devices)} | job
    return answers.write(folder / name, which, **parts)  # type: ignore[arg-type]


def refused(answer: Answer, code: int, *words: str) -> None:
    assert (answer.code, answer.out) == (code, ""), answer
    assert answer.err.count("nereus: ") == 1
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err.replace("\n", " "), answer.err


def test_two_answers_of_the_planner(nereus: Command, tmp_path: Path) -> None:
    before, after = written(tmp_path, "a", A, 2), written(tmp_path, "b", B)
    shown = nereus("diff", before, after, "--trace", tmp_path / "t.json", "--html", tmp_path / "p.html")
    assert (shown.code, shown.err) == (0, "")
    assert "actor/training tp2 pp1 dp1 → tp1 pp2 dp2" in shown.out
    data = json.loads(nereus("diff", before, after, "--json").out)
    assert data["schema"] == 1
    assert data["bytes"]["all"]["moved"] == data["bytes"]["all"]["minimum"] > 0
    devices = {event["tid"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert devices == {0, 1, 2, 3}
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_what_plan_prints_is_read(nereus: Command, tmp_path: Path) -> None:
    path = job(tmp_path)
    names = []
    for tp in (1, 2):
        pinned = nereus("plan", path, "--json", "--no-advice", "--set", f"plan.pin.actor/training={{tp: {tp}}}")
        names.append(tmp_path / f"tp{tp}.json")
        names[-1].write_text(pinned.out)
    data = json.loads(nereus("diff", *names, "--json").out)
    assert "actor/training" in data["bytes"]


def test_plans_alone_need_the_job(nereus: Command, tmp_path: Path) -> None:
    path = job(tmp_path)
    pool = settings.cluster_source(settings.resolve(path)).cluster()
    layouts = (1, 2)
    five = (GENERATION, REFERENCE, REWARD, ACTOR, CRITIC)
    names = []
    for tp in layouts:
        made = plan(*(assignment(ms, tp=tp) for ms in five))
        names.append(tmp_path / f"{tp}.json")
        names[-1].write_text(json.dumps(codec.encode(made)))
    assert len(pool.ids) == 4
    refused(nereus("diff", *names), 2, "--job")
    data = json.loads(nereus("diff", *names, "--job", path, "--json").out)
    assert set(data["bytes"]) == {*map(str, five), "all"}
    refused(nereus("diff", *names, "--set", "run.steps=4"), 2, "--set", "--job")


def run(folder: Path, longer: Lengths | None = None) -> Path:
    """A run of three steps whose plan changed after the second; responses of the third are `longer`."""
    directory = folder / "run"
    directory.mkdir()
    path = job(folder, algorithm={"use": "grpo", "reward_model": False}, reward={"model_weight": 0.0})
    resolved = settings.resolve(path)
    (directory / "settings.yaml").write_text(yaml.safe_dump(resolved.model_dump(mode="json", exclude_none=True)))
    pool = settings.cluster_source(resolved).cluster()
    sink = Jsonl(directory)
    sink.begin(ControllerState(A, expand(A), pool, pool, WORKLOAD))
    for step in (1, 2, 3):
        if step == 2:
            outcome = Outcome(expand(B), True, 0.75, {0: 2 << 20})
            sink.record(Boundary(step, 1.0), seen(step, range(4)), (), adapt(proposal(A, B, 1.0, 0.4, 0.8)), outcome)
        else:
            response = longer if step == 3 else None
            sink.record(Boundary(step, 1.0), seen(step, range(4), response=response), (), Keep("no"), None)
    return directory


def test_steps_of_a_run(nereus: Command, tmp_path: Path) -> None:
    directory = run(tmp_path)
    shown = nereus("diff", directory, "--steps", 2, 3)
    assert (shown.code, shown.err) == (0, "")
    assert "step 2 → step 3" in shown.out
    assert "measured: 0.75 s, 2 MiB received" in shown.out
    assert "no state moves" in nereus("diff", directory, "--steps", 1, 2).out
    back = nereus("diff", directory, "--steps", 3, 1)
    assert "actor/training tp1 pp2 dp2 → tp2 pp1 dp1" in back.out
    assert "measured" not in back.out


def test_steps_of_a_run_are_priced_for_the_lengths_they_had(nereus: Command, tmp_path: Path) -> None:
    """The longest responses that the workload allows, from step 3 on: steps 2 and 1 are priced as before."""
    top = WORKLOAD.response.maximum
    (tmp_path / "long").mkdir()
    (tmp_path / "short").mkdir()
    long, short = run(tmp_path / "long", Lengths(top, top, top)), run(tmp_path / "short")

    def step_s(directory: Path, *steps: int) -> dict[str, float]:
        predicted: dict[str, float] = json.loads(nereus("diff", directory, "--steps", *steps, "--json").out)["step_s"]
        return predicted

    for when in ("before", "after"):
        assert step_s(long, 2, 3)[when] > step_s(short, 2, 3)[when]
    assert step_s(long, 3, 1) == step_s(short, 3, 1)


def test_plan_files_of_a_run_know_their_job(nereus: Command, tmp_path: Path) -> None:
    plans = run(tmp_path) / "plans"
    files = sorted(plans.iterdir())
    assert len(files) == 2
    assert nereus("diff", *files).code == 0


def test_a_run_without_such_steps(nereus: Command, tmp_path: Path) -> None:
    directory = run(tmp_path)
    refused(nereus("diff", directory, "--steps", 2, 9), 2, "no step 9", "1-3")
    refused(nereus("diff", directory, directory), 2, "--steps FROM TO")
    refused(nereus("diff", directory), 2, "--steps FROM TO")
    refused(nereus("diff", tmp_path / "nowhere", "--steps", 1, 2), 2, "nowhere: not a run")


def test_plans_of_different_jobs(nereus: Command, tmp_path: Path) -> None:
    first = written(tmp_path, "a", A)
    larger = replace(FLOW, specs={**FLOW.specs, "actor": replace(FLOW.specs["actor"], layers=6)})
    refused(nereus("diff", first, written(tmp_path, "b", B, workflow=larger)), 2, "layers of the actor is 4", "6")
    five = plan(*(assignment(ms) for ms in ppo().model_stages))
    other = written(tmp_path, "c", five, workflow=ppo())
    more = "only the second has critic/training, reward/inference"
    refused(nereus("diff", first, other), 2, "different jobs", more)
    assert "only the first has" not in nereus("diff", first, other).err
    elsewhere = written(tmp_path, "d", B, cluster=cluster(4, memory_bytes=5 * 10**8))
    refused(nereus("diff", first, elsewhere), 2, "different machines", "device 0")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (plan(*B.assignments[:2], assignment(ACTOR, dp=2, first=3)), ["devices 4", "do not exist", "0-3"]),
        (plan(*B.assignments[:2], assignment(ACTOR, tp=3)), ["tp 3", "4 heads and 2 KV heads", "1, 2, 4"]),
        (plan(*B.assignments[:2]), ["no layout for actor/training"]),
        (plan(*B.assignments, assignment(CRITIC)), ["not of this job", "critic/training"]),
        (plan(*B.assignments[:2], assignment(ACTOR, zero=1)), ["zero 1", "whole replicas"]),
    ],
)
def test_targets_that_cannot_be(nereus: Command, tmp_path: Path, after: Plan, words: list[str]) -> None:
    refused(nereus("diff", written(tmp_path, "a", A), written(tmp_path, "b", after)), 2, *words)


def test_more_pipeline_ranks_than_layers(nereus: Command, tmp_path: Path) -> None:
    flow, deep = grpo(), plan(*B.assignments[:2], assignment(ACTOR, pp=4))
    files = (written(tmp_path, "a", A, workflow=flow), written(tmp_path, "b", deep, workflow=flow))
    refused(nereus("diff", *files), 2, "actor/training has pp 4", "2 layers", "1 to 2")


def test_uneven_layers_must_add_up(nereus: Command, tmp_path: Path) -> None:
    actor = B.of(ModelStage.parse("actor/training"))
    uneven = replace(actor, candidate=replace(actor.candidate, layout=Layout(1, 2, (1, 2))))
    files = (written(tmp_path, "a", A), written(tmp_path, "b", plan(*B.assignments[:2], uneven)))
    refused(nereus("diff", *files), 2, "stage_layers [1, 2]", "4 together")


def test_lost_devices(nereus: Command, tmp_path: Path) -> None:
    first, second = written(tmp_path, "a", A), written(tmp_path, "b", B)
    refused(nereus("diff", first, second, "--lost", "3"), 2, "uses devices 3, which are lost")
    refused(nereus("diff", first, second, "--lost", "7-9"), 2, "no device 7-9", "0-3")
    refused(nereus("diff", first, second, "--lost", "x"), 2, "4,8-15")
    refused(nereus("diff", first, second, "--lost", "2-1"), 2, "must rise")
    refused(nereus("diff", first, second, "--lost", "0-99999999999"), 2, "at most 1,048,576")
    refused(nereus("diff", first, second, "--host-memory", "much"), 2, "--host-memory 'much'", "GiB")
    one = written(tmp_path, "c", plan(assignment(GENERATION), assignment(REFERENCE), assignment(ACTOR)))
    assert nereus("diff", written(tmp_path, "d", replace_actor(A)), one, "--lost", "1").code == 0
    refused(nereus("diff", first, one, "--lost", "1"), 3, "actor/training: no unit exists")


def replace_actor(which: Plan) -> Plan:
    return plan(*which.assignments[:2], assignment(ACTOR, dp=2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["cannot be read", "No such file"]),
        ("{", ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        ("[1]", ["not an answer"]),
        ('{"type": "Plan"}', ["not a plan"]),
        ('{"schema": 1, "plan": null, "shortage": "too small"}', ["holds no plan", "too small"]),
    ],
)
def test_files_that_are_no_plans(nereus: Command, tmp_path: Path, text: str | None, words: list[str]) -> None:
    bad = tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    refused(nereus("diff", written(tmp_path, "a", A), bad), 2, "bad.json", *words)


def test_numbers_and_names_that_no_plan_has(nereus: Command, tmp_path: Path) -> None:
    first, bad = written(tmp_path, "a", A), tmp_path / "bad.json"

    def said(*path: str | int, value: object) -> Answer:
        answer = json.loads(written(tmp_path, "b", B).read_text())
        part = answer
        for key in path[:-1]:
            part = part[key]
        assert not isinstance(part, dict) or path[-1] in part
        part[path[-1]] = value
        bad.write_text(json.dumps(answer))
        return nereus("diff", bad, first)

    kind = next(iter(cluster(4).kinds))
    refused(said("workload", "prompts", value=inf), 2, "bad.json", "workload.prompts: Infinity", "a whole number")
    refused(said("workload", "prompt", "maximum", value=inf), 2, "bad.json", "finite")
    refused(said("workload", "response", "maximum", value=1e308), 2, "response lengths is 1e+308", "at most 1,099,511")
    refused(said("cluster", "kinds", kind, "memory_bytes_per_s", value=0), 2, "memory_bytes_per_s 0.0", "at least 1")
    recompute = ("plan", "assignments", 0, "candidate", "recompute")
    refused(said(*recompute, value="half"), 2, "recompute 'half'", "none, selective, full")
    candidate, place = ("plan", "assignments", 1, "candidate"), "plan.assignments[1].candidate"
    tp = (*candidate, "layout", "tp")
    refused(said(*tp, value="2"), 2, f'{place}.layout.tp: "2", expected a whole number')
    refused(said(*tp, value=2.0), 2, f"{place}.layout.tp: 2.0, expected a whole number")
    refused(said(*tp, value=None), 2, f"{place}.layout.tp: null, expected a whole number")
    refused(said(*tp, value=0), 2, f"{place}.layout: layout tp=0", "at least 1")
    refused(
        said(*candidate, "kv_bytes", value=2**63), 2, f"{place}.kv_bytes: {2**63}, expected", f"at most {2**63 - 1:,}"
    )
    refused(said("workload", "prompt", "maximum", value=10**400), 2, "workload.prompt.maximum: 1000", "a number")
    refused(said(*candidate, "offload", value="no"), 2, f'{place}.offload: "no", expected true or false')
    refused(said(*candidate, "model_stage", value=3), 2, f"{place}.model_stage: 3, expected a model-stage")
    refused(said(*candidate, "layout", value={"tp": 1, "pipeline": 2}), 2, f"{place}.layout: Layout has no field", "pp")
    refused(said(*candidate, "layout", value=[1, 2]), 2, f"{place}.layout: [1, 2], expected an object", "Layout")
    refused(said("plan", "assignments", 0, "units", 0, value=7), 2, "plan.assignments[0].units[0]: 7, expected a list")
    refused(said("plan", "assignments", 0, value={}), 2, "plan.assignments[0]: Assignment needs candidate, units")
    refused(said("cluster", "nodes", 0, "node", value="a"), 2, 'cluster.nodes[0].node: "a", expected a whole number')
    refused(said("cluster", "nodes", 0, "ids", value="3-1"), 2, "ids of node 0: '3-1'", "rise")
    for rate in (0, -1.0, 1e-320, nan, inf):
        refused(
            said("cluster", "links", "intra", "bytes_per_s", value=rate), 2, "cluster.links.intra", "at least 1 and"
        )
        refused(said("cluster", "kinds", kind, "peak_flops", value={"fp32": rate}), 2, "peak_flops of fp32", "at least")
    for constant in (-1.0, 1e-320, nan, inf):
        said_so = said("cluster", "kinds", kind, "constants", value={"gemm.share": constant})
        refused(said_so, 2, f"cluster.kinds.{kind}", "gemm.share", "must be a number of at least")
    refused(said("cluster", "kinds", kind, "memory_bytes", value=2**63 - 1), 2, f"{2**63 - 1}", "at most 1e+18")
    refused(said("cluster", "links", "intra", "latency_s", value=-1), 2, "latency_s -1.0", "at least 0")
    refused(said("cluster", "kinds", kind, "memory_bytes", value=-5), 2, "memory_bytes -5", "at least 1")


@pytest.mark.parametrize("key", ["plan", "workflow", "workload", "cluster"])
def test_what_an_answer_lacks_is_named(key: str, nereus: Command, tmp_path: Path) -> None:
    first, bad = written(tmp_path, "a", A), tmp_path / "bad.json"
    answer = json.loads(first.read_text())
    del answer[key]
    bad.write_text(json.dumps(answer))
    refused(nereus("diff", bad, first), 2, "bad.json", "no plan" if key == "plan" else f"there is no {key}")


def test_too_little_memory_is_an_error_of_its_own(nereus: Command, tmp_path: Path) -> None:
    tight = cluster(4, memory_bytes=100_000)
    files = (written(tmp_path, "a", A, cluster=tight), written(tmp_path, "b", B, cluster=tight))
    refused(nereus("diff", *files), 3, "device", "bytes short", "update_actor", "would do")


def test_outputs_that_cannot_be_written(nereus: Command, tmp_path: Path) -> None:
    files = (written(tmp_path, "a", A), written(tmp_path, "b", B))
    before = sorted(tmp_path.iterdir())
    for flag in ("--trace", "--html"):
        refused(nereus("diff", *files, flag, tmp_path / "no" / "where"), 2, flag, "cannot be written")
        refused(nereus("diff", *files, flag, tmp_path), 2, flag, "directory")
    assert sorted(tmp_path.iterdir()) == before


def test_outputs_do_not_replace_plans_nor_each_other(nereus: Command, tmp_path: Path) -> None:
    files = (written(tmp_path, "a", A), written(tmp_path, "b", B))
    before = files[0].read_text()
    there = sorted(tmp_path.iterdir())
    refused(nereus("diff", *files, "--trace", tmp_path / "x" / ".." / "a"), 2, "--trace", "that is the plan as well")
    refused(nereus("diff", *files, "--trace", tmp_path / "c", "--html", tmp_path / "c"), 2, "--html", "--trace as well")
    assert files[0].read_text() == before
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("decisions.jsonl", b"", ["is empty", "before its first step"]),
        ("decisions.jsonl", b"3\n", ["decisions.jsonl:1", "3, expected an object"]),
        ("decisions.jsonl", b"[" * 100_000, ["decisions.jsonl:1", "not a record"]),
        ("decisions.jsonl", bytes(range(256)), ["decisions.jsonl: cannot be read", "utf-8"]),
        ("decisions.jsonl", b'{"tick": {}}', ["decisions.jsonl:1", "not a record"]),
        ("calibration.json", b'{"memory_scale": true}', ["calibration.json", "memory_scale: true, expected a number"]),
        ("calibration.json", b'{"transition_scale": 1e-320}', ["calibration.json", "transition_scale 1e-320"]),
        ("settings.yaml", bytes(range(256)), ["settings.yaml: cannot be read"]),
    ],
)
def test_a_damaged_run_is_told(nereus: Command, tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    directory = run(tmp_path)
    (directory / name).write_bytes(content)
    refused(nereus("diff", directory, "--steps", 1, 3), 2, *words)
