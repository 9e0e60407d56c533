"""Fig. 6 with its own GPU numbers, and what the paper's composition costs against the least that must move."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest

from nereus.core import (
    Calibration,
    Cluster,
    Device,
    DeviceKind,
    EdgeKind,
    EMUSet,
    Layout,
    Link,
    ModelStage,
    Plan,
    StateSchema,
    TransitionDAG,
    expand,
)
from nereus.cost.state import schema as schema_of
from nereus.engine.transports.memory import execute
from nereus.families.models import named
from nereus.report import plan_json
from nereus.transition import compile, composed_bytes, estimate, minimum_bytes, peak_bytes, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.site import Site
from tests.oracles import least_bytes
from tests.support.models import ACTOR, CRITIC, REWARD, ROLLOUT, TRAINED, assign, even, full_bytes, plan
from tests.support.worlds import assert_holds, filled

SCHEMA = even(layers=16, rows=64, kinds=TRAINED)
NODE = 8
CLUSTER = Cluster(
    tuple(Device(i, (i - 1) // NODE, "any") for i in range(1, 97)),
    {"any": DeviceKind("any", 1, {}, 1.0)},
    {"intra": Link(1e9, 1e-5), "inter": Link(1e8, 1e-4)},
)
NODE_OF = {device.id: device.node for device in CLUSTER.devices}


def gpus(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


@dataclass(frozen=True)
class Row:
    """One change of a model-stage; numbers are multiples of one copy of its state."""

    name: str
    before: tuple[int, int]
    start: tuple[int, ...]
    after: tuple[int, int]
    goal: tuple[int, ...]
    composed: float
    minimum: float
    kept_order: float | None
    received: float
    """The most that one device receives."""
    peak: float
    """The most that one device holds."""

    @property
    def units(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        return tuple(  # type: ignore[return-value]
            [devices[i : i + t * p] for i in range(0, len(devices), t * p)]
            for (t, p), devices in ((self.before, self.start), (self.after, self.goal))
        )

    def plan(self, ms: ModelStage = ACTOR) -> tuple[Plan, Plan]:
        return plan(assign(ms, Layout(*self.before), *self.start)), plan(assign(ms, Layout(*self.after), *self.goal))


FIG_6_ACTOR = Row("actor", (2, 4), gpus(1, 32), (4, 2), gpus(1, 32) + gpus(49, 64), 8.0, 4.0, 5.0, 0.125, 0.25)
FIG_6_CRITIC = Row("critic", (1, 4), gpus(65, 96), (1, 2), gpus(49, 96), 16.0, 16.0, None, 0.5, 0.75)
FIG_6_REWARD = Row("reward", (4, 8), gpus(33, 64), (8, 2), gpus(33, 48), 3.0, 0.875, 0.96875, 0.0625, 0.09375)
ROWS = (
    Row("TP4 → TP8", (4, 1), gpus(1, 4), (8, 1), gpus(1, 8), 1.0, 0.5, 0.875, 0.125, 0.375),
    Row("TP8 → TP4 on the first 4", (8, 1), gpus(1, 8), (4, 1), gpus(1, 4), 1.0, 0.75, 0.875, 0.25, 0.375),
    Row("TP8 → TP4 on every second", (8, 1), gpus(1, 8), (4, 1), (1, 3, 5, 7), 1.0, 0.5, None, 0.125, 0.375),
    Row("TP8 → TP4 x DP2", (8, 1), gpus(1, 8), (4, 1), gpus(1, 8), 1.0, 1.0, 1.75, 0.125, 0.375),
    Row("TP4 x DP2 → TP8", (4, 1), gpus(1, 8), (8, 1), gpus(1, 8), 0.0, 0.0, 0.75, 0.0, 0.375),
    Row("TP2,PP2 → TP4", (2, 2), gpus(1, 4), (4, 1), gpus(1, 4), 1.0, 0.5, 0.75, 0.125, 0.5),
    Row("TP4 → TP2,PP2", (4, 1), gpus(1, 4), (2, 2), gpus(1, 4), 1.0, 0.5, 0.75, 0.125, 0.5),
    Row("TP2,PP2 → DP4", (2, 2), gpus(1, 4), (1, 1), gpus(1, 4), 3.0, 3.0, 3.0, 0.75, 1.25),
    Row("DP4 → TP2,PP2", (1, 1), gpus(1, 4), (2, 2), gpus(1, 4), 0.0, 0.0, 0.0, 0.0, 1.25),
    Row("DP4 → DP8", (1, 1), gpus(1, 4), (1, 1), gpus(1, 8), 4.0, 4.0, 4.0, 1.0, 2.0),
    Row("TP2,PP4: DP2 → DP4", (2, 4), gpus(1, 16), (2, 4), gpus(1, 32), 2.0, 2.0, 2.0, 0.125, 0.25),
    Row("§5.1, one replica: PP4 → TP2,PP4", (1, 4), gpus(1, 4), (2, 4), gpus(1, 8), 1.0, 0.5, 0.875, 0.125, 0.375),
    FIG_6_ACTOR,
    FIG_6_CRITIC,
    FIG_6_REWARD,
    Row(
        "reward on the 16 that hold most",
        (4, 8),
        gpus(33, 64),
        (8, 2),
        gpus(33, 40) + gpus(57, 64),
        3.0,
        0.75,
        None,
        0.0625,
        0.09375,
    ),
)


def copies(value: int, schema: StateSchema = SCHEMA) -> Fraction:
    return Fraction(value, full_bytes(schema))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_least_and_composed_bytes_are_the_oracles(row: Row) -> None:
    start, goal = row.units
    assert least_bytes.least(row.before, start, row.after, goal) == Fraction(row.minimum)
    assert least_bytes.composed(row.before, start, row.after, goal) == Fraction(row.composed)
    if row.kept_order is not None:
        assert least_bytes.in_named_order(row.before, start, row.after, goal) == Fraction(row.kept_order)
    before, after = (expand(each).blocks(ACTOR) for each in row.plan())
    assert copies(minimum_bytes(SCHEMA, before, after)) == Fraction(row.minimum)
    assert copies(composed_bytes(SCHEMA, before, after)) == Fraction(row.composed)


@pytest.mark.parametrize("node_of", [{}, NODE_OF], ids=["one pool", "nodes of 8"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_execution_moves_the_least_and_every_bit_arrives(row: Row, node_of: dict[int, int]) -> None:
    before, after = row.plan()
    dag = compile(expand(before), after, {ACTOR: SCHEMA}, site=Site(node_of))
    world = filled(dag.start, {ACTOR: SCHEMA})
    traffic = execute(dag, {ACTOR: SCHEMA}, world)
    assert_holds(world, dag.goal, {ACTOR: SCHEMA})
    assert copies(traffic.received_bytes.total()) == Fraction(row.minimum)
    assert copies(max(traffic.received_bytes.values(), default=0)) <= Fraction(row.received)
    assert copies(max(traffic.peak_bytes.values())) <= Fraction(row.peak)


def test_old_ranks_share_the_sending() -> None:
    before, after = ROWS[0].plan()
    dag = compile(expand(before), after, {ACTOR: SCHEMA})
    traffic = execute(dag, {ACTOR: SCHEMA}, filled(dag.start, {ACTOR: SCHEMA}))
    assert {device: copies(size) for device, size in traffic.sent_bytes.items()} == dict.fromkeys(range(1, 5), 0.125)


LLAMA = schema_of(named("llama-3.1-8b"), trained=True)
QWEN = schema_of(named("qwen3-0.6b"), trained=True)


@pytest.mark.parametrize(
    ("schema", "row", "minimum", "composed"),
    [
        (LLAMA, FIG_6_REWARD, 0.859, 3.0),
        (LLAMA, ROWS[-1], 0.718, 3.0),
        (LLAMA, FIG_6_ACTOR, 4.0, 8.0),
        (QWEN, ROWS[5], 0.370, 0.739),
        (QWEN, ROWS[6], 0.630, 1.0),
    ],
    ids=["reward", "reward, best 16", "actor", "tied, TP2,PP2 → TP4", "tied, TP4 → TP2,PP2"],
)
def test_models_of_real_sizes(schema: StateSchema, row: Row, minimum: float, composed: float) -> None:
    """Embedding and head lie on the end pp ranks alone, norms on every tp rank; a tied embedding has two copies."""
    before, after = row.plan()
    dag = compile(expand(before), after, {ACTOR: schema})
    found = estimate(dag, {ACTOR: schema}, CLUSTER, Calibration())
    assert float(copies(found.minimum_bytes, schema)) == pytest.approx(minimum, abs=0.002)
    assert float(copies(found.composed_bytes, schema)) == pytest.approx(composed, abs=0.002)
    assert found.moved_bytes <= 1.05 * found.minimum_bytes


WHOLE = ((ROLLOUT, FIG_6_ACTOR), (REWARD, FIG_6_REWARD), (CRITIC, FIG_6_CRITIC))
START, GOAL = (plan(*(row.plan(ms)[index].assignments[0] for ms, row in WHOLE)) for index in (0, 1))


def fig_6(schemas: dict[ModelStage, StateSchema], capacity: dict[int, int], nodes: bool = True) -> TransitionDAG:
    return compile(expand(START), GOAL, schemas, Budget(capacity), Site(NODE_OF if nodes else {}))


@pytest.mark.parametrize("nodes", [False, True])
def test_gpus_49_to_64_come_free_and_the_reward_unit_is_whole_on_33_to_48(nodes: bool) -> None:
    """Under the usual rank orders no two sub-units lie on 33-48 after the Split: state has to cross the border."""
    schemas = {ROLLOUT: SCHEMA, REWARD: SCHEMA, CRITIC: SCHEMA}
    dag = fig_6(schemas, {}, nodes)
    (unit,) = dag.goal.of(REWARD)
    assert (unit.layout, set(unit.devices)) == (Layout(8, 2), set(gpus(33, 48)))
    world = filled(dag.start, schemas)
    traffic = execute(dag, schemas, world)
    assert_holds(world, dag.goal, schemas)
    assert not [where for where, held in world.positions if held.model_stage == REWARD and where in gpus(49, 64)]
    assert copies(sum(traffic.received_bytes[device] for device in gpus(33, 48))) <= Fraction(0.875) * Fraction(21, 20)
    assert copies(traffic.received_bytes.total()) == Fraction("20.875")


def test_each_model_stage_takes_the_figures_primitives() -> None:
    dag = fig_6({ROLLOUT: SCHEMA, REWARD: SCHEMA, CRITIC: SCHEMA}, {})
    kinds = {ms: {step.name for step in dag.primitives if step.model_stage == ms} for ms, _ in WHOLE}
    assert kinds == {
        ROLLOUT: {"Split", "Extend", "Merge", "Destroy"},
        REWARD: {"Split", "Merge", "Destroy"},
        CRITIC: {"Split", "Extend", "Destroy"},
    }
    split = next(step for step in dag.primitives if step.model_stage == REWARD and step.name == "Split")
    assert [unit.layout for unit in split.targets] == [Layout(4, 2)] * 4
    assert {len(dag.goal.of(ms)) for ms, _ in WHOLE} == {6, 1, 24}


def test_actor_and_critic_extends_wait_for_the_reward_unit_to_leave() -> None:
    """With as much memory on GPUs 49-64 as each plan needs, nothing may be there twice."""
    schemas = {ROLLOUT: SCHEMA, REWARD: even(layers=16, rows=4096, kinds=TRAINED), CRITIC: SCHEMA}
    start, free = stored_bytes(expand(START), schemas), fig_6(schemas, {})
    goal = stored_bytes(free.goal, schemas)
    limits = {device: max(start[device], goal[device]) for device in gpus(49, 64)}
    assert any(start[device] + goal[device] > limit for device, limit in limits.items())
    dag = fig_6(schemas, limits)
    by_id = {step.id: step for step in dag.primitives}
    edges = [(by_id[e.earlier], by_id[e.later]) for e in dag.edges if e.kind is EdgeKind.RESOURCE]
    assert {(earlier.model_stage, earlier.name) for earlier, _ in edges} == {(REWARD, "Destroy")}
    assert {(later.model_stage, later.name) for _, later in edges} == {(ROLLOUT, "Extend"), (CRITIC, "Extend")}
    assert all(peak_bytes(dag, schemas)[device] <= limit for device, limit in limits.items())


def test_the_order_holds_when_it_is_executed_under_those_limits() -> None:
    schemas = {ROLLOUT: SCHEMA, REWARD: even(layers=16, rows=1024, columns=2, kinds=TRAINED), CRITIC: SCHEMA}
    units = (EMUSet(expand(START).units), fig_6(schemas, {}).goal)
    start, goal = (stored_bytes(each, schemas) for each in units)
    limits = {device: max(start[device], goal[device]) for device in gpus(49, 64)}
    dag = fig_6(schemas, limits)
    world = filled(dag.start, schemas)
    execute(dag, schemas, world, limits)
    assert_holds(world, dag.goal, schemas)


@pytest.mark.parametrize(("name", "wanted"), [("from", START), ("to", GOAL)])
def test_the_example_files_are_the_figure(name: str, wanted: Plan) -> None:
    saved = plan_json.read(Path(__file__).parents[2] / "examples" / "fig6" / f"{name}.json")
    layouts = [(a.candidate.model_stage, a.candidate.layout, a.units) for a in saved.plan.assignments]
    assert layouts == [(a.candidate.model_stage, a.candidate.layout, a.units) for a in wanted.assignments]
    assert {device.id: device.node for device in saved.cluster.devices} == NODE_OF
