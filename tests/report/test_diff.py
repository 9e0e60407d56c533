"""What is shown of a transition: its numbers are those of an execution, and every picture holds every primitive."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from nereus.controller.outlook import Outlook
from nereus.core import (
    Calibration,
    Capabilities,
    ControllerState,
    InfeasibleError,
    Plan,
    expand,
)
from nereus.cost.state import schemas
from nereus.engine.transports.memory import execute
from nereus.planning.problem import Problem
from nereus.report import diff_page, diff_tree, trace
from nereus.report.diff import Asked, Diff, Wait, diff
from tests.cost.jobs import (
    ACTOR,
    CRITIC,
    GENERATION,
    REFERENCE,
    SMALL,
    TINY,
    WORKLOAD,
    assignment,
    cluster,
    grpo,
    plan,
    ppo,
)
from tests.oracles.cut import lacks_bytes
from tests.support.worlds import filled

FLOW = grpo(replace(TINY, heads=8, kv_heads=4, head_dim=4))
HELD = schemas(FLOW)
STAGE = "actor/training"
BEFORE = plan(
    assignment(GENERATION, tp=2, dp=2),
    assignment(REFERENCE, dp=2, first=4),
    assignment(ACTOR, tp=2, pp=2, first=4),
)
AFTER = plan(
    assignment(GENERATION, tp=4, dp=2),
    assignment(REFERENCE, dp=2, first=4),
    assignment(ACTOR, tp=4, first=2),
)


NO_CONTEXT = {"context.bytes": 0.0, "workspace.bytes": 0.0}


def asked(before: Plan = BEFORE, after: Plan = AFTER, memory_bytes: int = 10**9, **changes: object) -> Asked:
    pool = cluster(8, memory_bytes, nodes=2, constants=NO_CONTEXT)
    problem = Problem(FLOW, WORKLOAD, pool, Capabilities())
    return replace(Asked(("A", "B"), before, after, problem), **changes)  # type: ignore[arg-type]


SHOWN = diff(asked())


def text(shown: Diff, every: bool = False) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(diff_tree.render(shown, every))
    return captured.get()


def test_bytes_are_what_the_oracle_says_devices_lack() -> None:
    for row in SHOWN.moved:
        ms = next(ms for ms in HELD if str(ms) == row.model_stage)
        existing = SHOWN.dag.start.of(ms)
        lacking = sum(lacks_bytes(HELD[ms], existing, unit, d) for unit in SHOWN.dag.goal.of(ms) for d in unit.devices)
        assert row.moved_bytes == lacking
    assert SHOWN.total.link_bytes == {
        link: sum(row.link_bytes[link] for row in SHOWN.moved) for link in ("intra", "inter")
    }
    assert [row.model_stage for row in SHOWN.moved] == ["actor/generation", "actor/training"]


def test_bytes_by_link_follow_from_who_sends_to_whom() -> None:
    one_node = diff(asked(problem=replace(asked().problem, cluster=cluster(8, 10**9))))
    assert one_node.total.link_bytes == {"intra": one_node.total.moved_bytes, "inter": 0}
    assert SHOWN.total.link_bytes["inter"] > 0


def test_memory_is_what_an_execution_stores() -> None:
    world = filled(SHOWN.dag.start, HELD)
    before = {device: world.stored_bytes(device) for device in range(8)}
    traffic = execute(SHOWN.dag, HELD, world)
    for level in SHOWN.levels:
        for device in level.devices:
            assert level.before_bytes == before[device]
            assert level.peak_bytes == traffic.peak_bytes.get(device, before[device])
            assert level.after_bytes == world.stored_bytes(device)
    assert sorted(device for level in SHOWN.levels for device in level.devices) == list(range(8))


def test_the_clock_ends_with_the_critical_path_and_nothing_starts_before_what_it_waits_for() -> None:
    by_id = {step.id: step for step in SHOWN.steps}
    assert max(step.end_s for step in SHOWN.steps) == pytest.approx(SHOWN.seconds)
    assert by_id[SHOWN.critical_path[-1]].end_s == pytest.approx(SHOWN.seconds)
    assert {step.id for step in SHOWN.steps if step.critical} == set(SHOWN.critical_path)
    for step in SHOWN.steps:
        assert all(by_id[wait.id].end_s <= step.start_s for wait in step.after)
        assert step.start_s == (0 if step.cause is None else by_id[step.cause].end_s)
        shared = step.cause is not None and set(by_id[step.cause].devices) & set(step.devices)
        assert step.cause is None or shared or step.cause in {wait.id for wait in step.after}


def test_what_a_run_learnt_scales_the_clock_and_stands_beside_it() -> None:
    learnt = replace(asked().problem, calibration=Calibration(transition_scale=2.0, transition_overhead_s=0.5))
    slower = diff(asked(problem=learnt))
    assert slower.seconds == pytest.approx(2 * SHOWN.seconds + 0.5)
    assert max(step.end_s for step in slower.steps) == pytest.approx(2 * SHOWN.seconds)
    assert "0.5 s of it around them" in text(slower)


def test_a_wait_for_a_device_is_told_where_the_start_hangs_on_it_and_names_are_not_repeated() -> None:
    first, second = (replace(SHOWN.steps[0], id=f"{STAGE}/{name}", model_stage=STAGE, group=name) for name in "ab")
    held_up = replace(second, after=(), cause=first.id)
    by_id = {step.id: step for step in (first, second)}
    primitive = first.primitive
    assert diff_tree.waits([held_up], by_id) == [f"device: after {primitive} (a)"]
    assert diff_tree.waits([replace(held_up, group="a")], by_id) == [f"device: after {primitive}"]
    other = replace(held_up, model_stage="critic/training")
    assert diff_tree.waits([other], by_id) == [f"device: after {STAGE} {primitive} (a)"]
    waits = replace(held_up, after=(Wait(first.id, "state"),))
    assert diff_tree.waits([waits], by_id) == [f"state: after {primitive} (a)"]
    assert diff_tree.waits([waits, replace(waits, cause=second.id)], by_id)[1] == f"device: after {primitive}"


def test_the_critical_path_names_a_model_stage_where_it_begins_and_of_a_long_one_the_ends() -> None:
    ids = [f"{stage}/{n}" for n, stage in enumerate((STAGE, STAGE, "critic/training", STAGE))]
    steps = tuple(replace(SHOWN.steps[0], id=each, model_stage=each.rpartition("/")[0]) for each in ids)
    shown = replace(SHOWN, steps=steps, critical_path=tuple(ids))
    assert diff_tree.path(shown) == "actor/training/0 → 1 → critic/training/2 → actor/training/3"
    steps = tuple(replace(SHOWN.steps[0], id=f"{STAGE}/{n}", model_stage=STAGE) for n in range(20))
    shown = replace(SHOWN, steps=steps, critical_path=tuple(step.id for step in steps))
    ends = f"{STAGE}/0 → 1 → 2 → 3 → 4 → 5", f"{STAGE}/14 → 15 → 16 → 17 → 18 → 19"
    assert diff_tree.path(shown) == " → ".join([ends[0], "8 more", ends[1]])


def test_the_tree_names_each_kind_of_step_and_each_wait() -> None:
    shown = text(SHOWN)
    assert "actor/generation tp2 pp1 dp2 → tp4 pp1 dp2" in shown
    assert "reference/inference tp1 pp1 dp2 stays as it is" in shown
    assert "state: after" in shown
    assert "commit group actor/training/0" in shown
    assert "moved / M*" in shown


def test_all_shows_a_line_for_each_primitive() -> None:
    shown = text(SHOWN, every=True)
    kinds = Counter(step.primitive for step in SHOWN.steps)
    for kind, count in kinds.items():
        assert sum(f"── {kind} " in line for line in shown.splitlines()) == count


def test_a_resource_edge_is_shown_where_memory_is_short() -> None:
    """Generation may take devices 4 and 5 only when the reference has left them."""
    flow, actor = grpo(SMALL), assignment(ACTOR, tp=4)
    before = plan(assignment(GENERATION, first=7), assignment(REFERENCE, dp=2, first=4), actor)
    after = plan(assignment(GENERATION, dp=2, first=4), assignment(REFERENCE, first=6), actor)

    def between(memory_bytes: int) -> Diff:
        tight = asked(before, after, memory_bytes)
        return diff(replace(tight, problem=replace(tight.problem, workflow=flow)))

    roomy = between(10**9)
    assert not any(wait.kind == "resource" for step in roomy.steps for wait in step.after)
    most = max(level.peak_bytes for level in roomy.levels)
    tight = between(most)  # of which a tenth stays free
    assert max(level.peak_bytes for level in tight.levels) <= 0.9 * most
    waits = {wait.id for step in tight.steps for wait in step.after if wait.kind == "resource"}
    assert waits <= {step.id for step in tight.steps if step.primitive == "Destroy"}
    assert "resource: after 2 x reference/inference Destroy" in text(tight)
    arrows = [event["ph"] for event in json.loads(trace.planned(tight))["traceEvents"] if event.get("cat")]
    assert arrows == ["s", "f"] * (len(arrows) // 2) != []


def test_memory_that_is_too_small_is_named_with_what_would_do() -> None:
    needed = max(level.peak_bytes for level in SHOWN.levels)
    tight = asked(memory_bytes=needed)
    with pytest.raises(InfeasibleError, match="device") as caught:
        diff(tight)
    assert caught.value.short_bytes
    enough = max(int(word.replace(",", "")) for word in str(caught.value).split() if word.replace(",", "").isdigit())
    assert diff(asked(memory_bytes=enough)).steps


def test_a_way_that_memory_forbids_is_told_apart_from_a_plan_that_does_not_fit() -> None:
    """Two models swap devices: each plan fits, but there is no moment at which one of them could move."""
    flow, actor = grpo(SMALL), assignment(ACTOR, tp=4)
    before = plan(assignment(GENERATION, first=6), assignment(REFERENCE, first=7), actor)
    after = plan(assignment(GENERATION, first=7), assignment(REFERENCE, first=6), actor)

    def between(memory_bytes: int, host_bytes: int | None = None) -> Diff:
        tight = asked(before, after, memory_bytes, host_bytes=host_bytes)
        return diff(replace(tight, problem=replace(tight.problem, workflow=flow)))

    most = max(level.peak_bytes for level in between(10**9).levels)
    with pytest.raises(InfeasibleError, match=r"cannot start: device [67] is [\d,]+ bytes short") as caught:
        between(most)
    enough = int(re.findall(r"([\d,]+) \(", str(caught.value))[-1].replace(",", ""))
    assert between(enough).steps
    with pytest.raises(InfeasibleError, match="cannot start"):
        between(enough - 2)
    staged = between(most, host_bytes=10**9)
    (offload,) = [step for step in staged.steps if step.primitive == "Offload"]
    assert offload.host_bytes == offload.releases_bytes > 0
    assert re.search(r"── Offload tp1 pp1 on .* of host memory, frees", text(staged))
    assert "commit group" not in next(line for line in text(staged).splitlines() if "Offload" in line)
    assert "Offload" in diff_page.page(staged)
    with pytest.raises(InfeasibleError, match="staging in host memory included"):
        between(most, host_bytes=1)
    for host_bytes in (0, 10**9):
        pool = cluster(8, most, nodes=2, host_memory_bytes=host_bytes, constants=NO_CONTEXT)
        outlook = Outlook(flow, Capabilities(), schemas(flow), pool, WORKLOAD, Calibration(), 0.1, 8)
        state = ControllerState(before, expand(before), pool, pool, WORKLOAD)
        if host_bytes:
            proposal = outlook._proposal(state, after, before)
            assert "Offload" in {primitive.name for primitive in proposal.dag.primitives}
        else:
            with pytest.raises(InfeasibleError, match="no host memory to stage in was given"):
                outlook._proposal(state, after, before)


def test_new_replicas_that_pass_state_on_are_marked_and_the_order_stands_beside_its_bound() -> None:
    before = plan(assignment(GENERATION, first=0), assignment(REFERENCE), assignment(ACTOR))
    after = plan(assignment(GENERATION, dp=8), assignment(REFERENCE), assignment(ACTOR))
    shown = diff(asked(before, after))
    by_target = {unit.devices for step in shown.steps if step.primitive == "Extend" for unit in step.targets}
    for step in shown.steps:
        assert step.forwards == any(unit.devices in by_target for unit in step.sources)
    assert any(step.forwards for step in shown.steps)
    assert re.search(r"Extend .* passed on", text(shown))
    assert shown.over_bound is not None
    assert shown.over_bound >= 1
    assert "order: " in text(shown)
    assert shown.described()["order"] == {"over_bound": shown.over_bound, "certified": shown.over_bound == 1}


def test_positions_stay_on_the_nodes_of_the_plan_unless_they_may_cross() -> None:
    before = plan(*BEFORE.assignments[:2], assignment(ACTOR, tp=2, pp=2, dp=2))
    after = plan(*BEFORE.assignments[:2], assignment(ACTOR, tp=4, pp=2))
    for across in (False, True):
        shown = diff(asked(before, after, across=across))
        nodes = [{device // 4 for device in unit.devices[:4]} for unit in shown.dag.goal.of(ACTOR)]
        assert (nodes == [{0}]) != across
        assert (shown.total.moved_bytes == shown.total.minimum_bytes) == across
        assert ("M* lets positions cross nodes" in text(shown)) != across


def test_equal_plans_need_nothing() -> None:
    same = diff(asked(after=BEFORE))
    assert (same.seconds, same.steps, same.total.moved_bytes) == (0.0, (), 0)
    assert "no state moves" in text(same)
    assert "<svg" not in diff_page.page(same)


def test_units_on_lost_devices_are_no_sources() -> None:
    after = plan(*(replace(a, candidate=replace(a.candidate, dp=1), units=a.units[:1]) for a in BEFORE.assignments))
    shown = diff(asked(plan(*BEFORE.assignments), after, lost=frozenset({2, 3})))
    assert [step.primitive for step in shown.steps] == ["Destroy"]
    assert shown.step_s[0] is None
    with pytest.raises(InfeasibleError, match="actor/training: no unit exists"):
        diff(asked(lost=frozenset({5}), after=after))


def test_the_trace_has_one_lane_a_device_on_which_nothing_overlaps() -> None:
    found = json.loads(trace.planned(SHOWN))["traceEvents"]
    spans = [event for event in found if event["ph"] == "X"]
    wanted = Counter((step.id, device) for step in SHOWN.steps for device in step.devices)
    assert Counter((event["args"]["primitive"], event["tid"]) for event in spans) == wanted
    lanes = defaultdict(list)
    for event in spans:
        lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        ordered = sorted(lane)
        assert all(first[1] <= second[0] + 1e-6 for first, second in pairwise(ordered))
    assert {event["tid"] for event in found if event["ph"] == "M"} == set(lanes)


def test_the_page_stands_alone_and_shows_every_primitive() -> None:
    page = diff_page.page(SHOWN)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert all(step.id in page for step in SHOWN.steps)
    drawn = page.count("<rect")
    assert len({step.id for step in SHOWN.steps}) <= drawn <= sum(len(step.devices) for step in SHOWN.steps)


def test_a_page_of_thousands_of_primitives_stays_short_and_says_what_it_leaves_out() -> None:
    wait = Wait("an earlier one", "state")
    steps = tuple(replace(SHOWN.steps[0], id=f"step {n}", after=(wait,) * 500) for n in range(3000))
    page = diff_page.page(replace(SHOWN, steps=steps))
    assert len(page) < 1_000_000
    assert "2,600 more primitives" in page
    assert "494 more" in page
    assert 2 < page.count("<line") <= diff_page.TICKS + 1
    marks = re.findall(r'text-anchor="middle"[^>]*>([^<]+) s<', page)
    assert marks[0] == "0"
    assert {re.sub(r"[0.]", "", mark) for mark in marks[1:2]} <= {"1", "2", "5"}


def test_json_holds_the_goal_and_the_ratios() -> None:
    data = json.loads(json.dumps(SHOWN.described()))
    assert data["bytes"]["all"]["moved_over_minimum"] == SHOWN.total.moved_bytes / SHOWN.total.minimum_bytes
    assert len(data["goal"]["units"]) == len(expand(AFTER).units)
    assert data["step_s"]["after"] > 0


def apart(memory_bytes: int) -> tuple[Plan, Plan, Problem]:
    """The critic's embedding lies beside the actor's logits (last pp rank) before, and on another device after."""
    flow = ppo(replace(TINY, vocab=20_000))
    after = plan(*(assignment(ms, pp=2) for ms in flow.model_stages))
    critic = replace(after.of(CRITIC), units=((1, 0),))
    before = plan(*(critic if a.candidate.model_stage == CRITIC else a for a in after.assignments))
    pool = cluster(2, memory_bytes, constants={"context.bytes": 0.0, "workspace.bytes": 0.0})
    return before, after, Problem(flow, WORKLOAD, pool, Capabilities(), headroom=0.0)


def between_peaks() -> int:
    """A capacity that the plan before exceeds and the plan after does not."""
    before, after, problem = apart(10**12)
    model = problem.model()
    most, least = (max(peak.bytes for peak in model.peaks(each).values()) for each in (before, after))
    assert most > least
    return (most + least) // 2


def test_positions_that_the_plan_keeps_apart_do_not_meet_on_one_device() -> None:
    """Keeping the unit where it is would move nothing, but then its plan would not fit."""
    before, after, roomy = apart(10**12)
    assert not diff(Asked(("A", "B"), before, after, roomy)).steps
    shown = diff(Asked(("A", "B"), before, after, apart(between_peaks())[2]))
    assert [step.model_stage for step in shown.steps] == ["critic/training"] * len(shown.steps) != []
    assert shown.dag.goal.of(CRITIC)[0].devices == (0, 1)
    assert "positions are those that the plan names" in text(shown)


def test_the_controller_keeps_them_apart_too() -> None:
    before, after, problem = apart(between_peaks())
    outlook = Outlook(
        problem.workflow, Capabilities(), schemas(problem.workflow), problem.cluster, WORKLOAD, Calibration(), 0.0, 8
    )
    state = ControllerState(before, expand(before), problem.cluster, problem.cluster, WORKLOAD)
    proposal = outlook._proposal(state, after, before)
    assert proposal.units.of(CRITIC)[0].devices == (0, 1)
