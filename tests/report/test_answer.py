"""The planner's answer: verdicts on a plan that one has, the page, and JSON that reads back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nereus.core import Assignment, Candidate, Capabilities, Layout, Pin, Plan, SettingsError
from nereus.planning.problem import Problem
from nereus.report import html, plan_json, plan_page, tables
from nereus.report.answer import IMPORTED, PINNED, Answer, answer
from tests.controller.world import WORKFLOW
from tests.fakes import TRAINING, cluster, workload

ABLE = Capabilities(recompute=("none",))
PROBLEM = Problem(WORKFLOW, workload(), cluster(2, speed=0.3), ABLE)


@pytest.fixture(scope="module")
def plain() -> Answer:
    return answer(PROBLEM, widest=ABLE, top=3)


def test_calls_fill_the_step_and_their_classes_fill_them(plain: Answer) -> None:
    assert plain.best is not None
    assert max(call.end_s for call in plain.best.calls) == pytest.approx(plain.best.step_s)
    for call in plain.best.calls:
        assert sum(call.classes.values()) == pytest.approx(call.seconds)
    critical = [call for call in plain.best.calls if call.critical]
    assert sum(call.seconds for call in critical) == pytest.approx(plain.best.step_s)


def test_memory_rows_cover_every_device_once_and_add_up(plain: Answer) -> None:
    assert plain.best is not None
    assert sum(row.count for row in plain.best.memory) == len(plain.best.plan.devices)
    for row in plain.best.memory:
        assert sum(row.stored.values()) + sum(row.added.values()) == row.peak_bytes
        assert row.share <= 1


def slowed(best: Plan) -> Plan:
    """The plan with the actor trained on one device only, a sequence at a time."""
    unit = best.of(TRAINING).units[0][:1]
    slow = Assignment(Candidate(TRAINING, Layout(1, 1), 1, 1), (unit,))
    others = (a for a in best.assignments if a.candidate.model_stage != TRAINING)
    return Plan((*others, slow))


def test_a_plan_that_one_has_is_judged_beside_the_best(plain: Answer) -> None:
    assert plain.best is not None
    own = slowed(plain.best.plan)
    found = answer(PROBLEM, own=own, widest=ABLE, advise=False).comparison
    assert found is not None
    assert (found.own, found.fits, found.reason) == (IMPORTED, True, "")
    assert found.view is not None
    assert found.other is not None
    assert found.slower == pytest.approx(found.view.step_s / found.other.step_s - 1)
    assert found.better is (found.other if found.view.step_s > found.other.step_s else found.view)
    assert any(own_s != best_s for _, own_s, best_s in found.calls)


def test_the_best_plan_itself_has_no_faster_beside_it(plain: Answer) -> None:
    assert plain.best is not None
    found = answer(PROBLEM, own=plain.best.plan, widest=ABLE, advise=False).comparison
    assert found is not None
    assert found.better is found.view


def test_a_plan_that_does_not_fit_names_device_bytes_call_and_term(plain: Answer) -> None:
    assert plain.best is not None
    largest = max(row.peak_bytes for row in plain.best.memory)
    tight = replace(PROBLEM, cluster=cluster(2, int(largest / 0.9 * 0.98), speed=0.3))
    found = answer(tight, own=plain.best.plan, widest=ABLE, advise=False).comparison
    assert found is not None
    assert not found.fits
    assert re.search(r"device \d", found.reason)
    assert re.search(r"[\d,]+ bytes short", found.reason)
    assert found.view is not None, "what it would take is shown all the same"
    assert found.tight, "it lacks less than the headroom"
    half = replace(PROBLEM, cluster=cluster(2, largest // 2, speed=0.3))
    short = answer(half, own=plain.best.plan, widest=ABLE, advise=False).comparison
    assert short is not None
    assert not short.tight


def test_a_configuration_that_cannot_be_placed_is_no_plan() -> None:
    found = answer(PROBLEM, widest=ABLE, unplaced="needs 64 devices", advise=False)
    assert found.comparison is not None
    assert (found.comparison.fits, found.comparison.reason) == (False, "needs 64 devices")
    assert found.best is found.comparison.other


def test_pinned_degrees_are_shown_beside_the_best_without(plain: Answer) -> None:
    assert plain.best is not None
    pinned = replace(PROBLEM, capabilities=replace(ABLE, pins={TRAINING: Pin(tp=1, pp=1, dp=1)}))
    found = answer(pinned, widest=ABLE, advise=False)
    assert found.comparison is not None
    assert found.comparison.own == PINNED
    assert found.best is found.comparison.view
    assert found.comparison.other is not None
    assert found.comparison.other.step_s == pytest.approx(plain.best.step_s)


def test_the_page_has_the_order_of_the_terminal() -> None:
    """Verdict, the plan with the pins, then the best without and where they differ."""
    pinned = replace(PROBLEM, capabilities=replace(ABLE, pins={TRAINING: Pin(tp=1, pp=1, dp=1)}))
    found = answer(pinned, widest=ABLE, advise=False)
    assert found.comparison is not None
    titles = re.findall(r"<h2>(.*?)</h2>", plan_page.page(found, "job"))
    own = [f"The {PINNED}", "The plan with the pins", "The best plan without pins", "Where they differ"]
    assert [title for title in titles if title in own] == own
    assert tables.verdict(found.comparison) in plan_page.page(found, "job")


def test_the_json_reads_back_to_the_same_job_and_plan(plain: Answer, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json.of(plain, "a job", ["x"], ["y"])))
    saved = plan_json.read(path)
    assert plain.best is not None
    assert (saved.plan, saved.workload, saved.cluster) == (plain.best.plan, PROBLEM.workload, PROBLEM.cluster)
    assert saved.workflow == WORKFLOW


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "plan": {"type": "Plan"}}'])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(str(path))):
        plan_json.read(path)


def test_a_model_stage_has_one_colour_in_both_pictures(plain: Answer) -> None:
    assert plain.best is not None
    text = plan_page.page(plain, "job")
    names = {stage.model_stage for stage in plain.best.stages}
    timeline = {
        (name, fill) for name, fill in re.findall(r"<text[^>]*>[^<(]*\(([^)]*)\)</text><rect[^>]*fill=\"(#\w+)", text)
    }
    legend = {name.strip(): fill for fill, name in re.findall(r'color:(#\w+)">&#9632;</span> ([^<&]*)', text)}
    assert names <= {name for name, _ in timeline}
    assert names <= set(legend)
    assert all(legend[name] == fill for name, fill in timeline if name in names)
    assert len(set(legend.values())) == len(legend)
    assert set(legend) - names == {term for row in plain.best.memory for term, size in row.added.items() if size}


def test_the_page_stands_alone_and_draws_every_call_and_device_group(plain: Answer) -> None:
    text = plan_page.page(plain, "job <1>", ["assumed & said"])
    assert "job &lt;1&gt;" in text
    assert "assumed &amp; said" in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    assert plain.best is not None
    space = "{http://www.w3.org/2000/svg}"
    assert len(pictures[0].findall(f"{space}rect")) == len(plain.best.calls)
    parts = sum(size > 0 for row in plain.best.memory for size in (*row.stored.values(), *row.added.values()))
    assert len(pictures[1].findall(f"{space}rect")) == parts
    ends = [float(rect.attrib["x"]) + float(rect.attrib["width"]) for rect in pictures[0].iter(f"{space}rect")]
    assert max(ends) <= html.WIDTH
