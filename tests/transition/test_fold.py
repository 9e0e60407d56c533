"""Parts that are alike are ordered once: the whole is as valid, as large and as certain as if ordered in one piece."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import (
    EMU,
    Calibration,
    Cluster,
    Device,
    DeviceKind,
    EMUSet,
    InfeasibleError,
    Layout,
    Link,
    Plan,
    TransitionDAG,
    expand,
)
from nereus.engine.transports.memory import execute
from nereus.transition import connect, estimate, peak_bytes, stored_bytes
from nereus.transition.budget import Budget
from nereus.transition.fold import Alike, Space, fold
from nereus.transition.lots import Needs, lots_of
from nereus.transition.site import Site
from tests.support.models import ACTOR, REWARD, assign, full_bytes, plan, units
from tests.support.small import DEGREES, SCHEMAS
from tests.support.worlds import assert_holds, filled

LINKS = {"intra": Link(4e9, 1e-6), "inter": Link(1e9, 1e-5)}
EITHER = [pytest.param(4.0, id="far"), pytest.param(1.0, id="near")]


def shifted(plans: Sequence[tuple[Plan, int]]) -> EMUSet:
    """The units of each plan, its devices counted from a base."""
    return EMUSet(
        tuple(
            EMU(a.candidate.model_stage, a.candidate.layout, tuple(base + device for device in devices))
            for each, base in plans
            for a in each.assignments
            for devices in a.units
        )
    )


def random_part(rng: random.Random, devices: int) -> Plan:
    """Some model-stages on some of the devices."""
    chosen = []
    for ms in [ms for ms in SCHEMAS if rng.random() < 0.7]:
        tp, pp = rng.choice([each for each in DEGREES if each[0] * each[1] <= devices])
        pool = rng.sample(range(devices), devices)
        chosen.append(assign(ms, Layout(tp, pp), *pool[: rng.randint(1, devices // (tp * pp)) * tp * pp]))
    return plan(*chosen)


@dataclass(frozen=True, slots=True)
class Case:
    """A change of several parts, of few kinds."""

    start: EMUSet
    goal: EMUSet
    capacity: dict[int, int]
    node_of: dict[int, int]
    far: float

    def connected(self) -> TransitionDAG | InfeasibleError:
        """The transition, or why there is none."""
        try:
            return connect(self.start, self.goal, SCHEMAS, Budget(self.capacity), Site(self.node_of, far=self.far))
        except InfeasibleError as error:
            return error

    @property
    def cluster(self) -> Cluster:
        """The devices; where nodes are unknown, all are on one."""
        ids = sorted(self.start.devices | self.goal.devices)
        devices = tuple(Device(device, self.node_of.get(device, 0), "any") for device in ids)
        return Cluster(devices, {"any": DeviceKind("any", 1 << 40, {}, 1.0)}, LINKS)


def random_case(seed: int) -> Case:
    """Parts of one to three kinds, nodes of one to six devices, some devices without a node, any room to spare."""
    rng = random.Random(seed)
    kinds: list[tuple[int, Plan, Plan]] = []
    for _ in range(rng.randint(1, 3)):
        devices = rng.choice([1, 2, 3, 4, 6])
        before = random_part(rng, devices)
        kinds.append((devices, before, before if rng.random() < 0.3 else random_part(rng, devices)))
    order = [kind for kind in kinds for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.5:
        rng.shuffle(order)
    node_of: dict[int, int] = {}
    starts, goals, base = [], [], 0
    for number, (devices, before, after) in enumerate(order):
        starts.append((before, base))
        goals.append((after, base))
        node_of |= {base + device: number for device in range(devices) if rng.random() < 0.98}
        base += devices
    start, goal = shifted(starts), shifted(goals)
    both = {ms for ms in SCHEMAS if start.of(ms) and goal.of(ms)}
    start, goal = (EMUSet(tuple(unit for unit in units if unit.model_stage in both)) for units in (start, goal))
    now, then = stored_bytes(start, SCHEMAS), stored_bytes(goal, SCHEMAS)
    slack = rng.choice([0.0, 0.0, 1.0, 1.1, 1.3, 2.0])
    capacity = {device: int(slack * max(now[device], then[device])) for device in {*now, *then} if slack}
    nodes = node_of if rng.random() < 0.6 else {}
    return Case(start, goal, capacity, nodes, 4.0 if nodes and rng.random() < 0.6 else 1.0)


def by_rules(case: Case, in_one_piece: bool = False) -> TransitionDAG | InfeasibleError:
    """The order by rules alone, for what is spared beyond them may take longer; `in_one_piece`: without parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["nereus.transition.compile"], "spared", lambda dag, *_: dag)
        if in_one_piece:
            patch.setattr(sys.modules["nereus.transition.compile"], "fold", lambda *_: ())
        return case.connected()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_parts_lead_where_one_piece_leads_and_the_bound_is_the_same(seed: int) -> None:
    case = random_case(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["nereus.transition.compile"], "spared", lambda dag, *_: dag)  # whatever it moves
        dag, whole = by_rules(case), by_rules(case, in_one_piece=True)
    if isinstance(dag, InfeasibleError) or isinstance(whole, InfeasibleError):
        assert type(dag) is type(whole)
        return
    assert dag.bound_bytes == whole.bound_bytes <= dag.span_bytes <= whole.span_bytes
    world = filled(case.start, SCHEMAS)
    traffic = execute(dag, SCHEMAS, world, case.capacity)
    assert_holds(world, case.goal, SCHEMAS)
    peaks = peak_bytes(dag, SCHEMAS)
    assert traffic.peak_bytes == {device: peaks.get(device, 0) for device in traffic.peak_bytes}
    moved, moved_whole = (estimate(each, SCHEMAS, case.cluster, Calibration()).moved_bytes for each in (dag, whole))
    assert moved == traffic.received_bytes.total()
    assert case.capacity or moved == moved_whole


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_found_of_one_copy_is_what_all_primitives_say(seed: int) -> None:
    case = random_case(seed)
    dag = case.connected()
    if isinstance(dag, InfeasibleError):
        return
    apart = replace(dag)
    assert not apart.lots
    assert apart == dag == pickle.loads(pickle.dumps(dag)) == case.connected()
    assert dag.idle == (not dag.primitives)
    folded, expanded = (estimate(each, SCHEMAS, case.cluster, Calibration()) for each in (dag, apart))
    assert folded.seconds == pytest.approx(expanded.seconds)
    assert replace(folded, seconds=0.0, critical_path=()) == replace(expanded, seconds=0.0, critical_path=())
    assert set(folded.critical_path) <= {primitive.id for primitive in dag.primitives}


def test_nodes_that_change_alike_are_ordered_once() -> None:
    before, after = plan(assign(ACTOR, Layout(4), *range(4))), plan(assign(ACTOR, Layout(2, 2), *range(4)))
    start, goal = (shifted([(each, 4 * node) for node in range(8)]) for each in (before, after))
    dag = connect(start, goal, SCHEMAS, site=Site({device: device // 4 for device in range(32)}))
    (lot,) = dag.lots
    assert lot.copies == tuple(tuple(range(base, base + 4)) for base in range(0, 32, 4))
    assert len(dag.primitives) == 8 * len(lot.dag.primitives)
    assert {lot.named(primitive.id) for primitive in lot.dag.primitives} <= {step.id for step in dag.primitives}


@pytest.mark.parametrize("far", EITHER)
@pytest.mark.parametrize(("holders", "readers"), [(3, 9), (4, 13), (5, 3), (2, 16), (1, 7)])
def test_new_replicas_take_as_many_rounds_as_in_one_piece(holders: int, readers: int, far: float) -> None:
    start = EMUSet(units(ACTOR, Layout(2), *range(2 * holders)))
    goal = EMUSet(units(ACTOR, Layout(2), *range(2 * (holders + readers))))
    node_of = {device: device // 2 for device in goal.devices}
    dag = connect(start, goal, SCHEMAS, site=Site(node_of, far=far))
    assert len(dag.lots) <= 3
    assert sum(len(lot.copies) for lot in dag.lots) == (min(holders, readers) if holders > 1 else 0)
    rounds = ceil(log2(1 + readers / holders))
    assert dag.span_bytes == rounds * full_bytes(SCHEMAS[ACTOR]) // 2 * far
    assert dag.certified or far > 1


def alike(capacity: dict[int, int], node_of: dict[int, int]) -> list[list[list[int]]]:
    """Devices of the lots of four pairs that do the same."""
    start = EMUSet(units(ACTOR, Layout(2), *range(8)))
    goal = EMUSet(units(ACTOR, Layout(1), *range(8)))
    used = stored_bytes(start, SCHEMAS)
    found: tuple[Alike, ...] = fold(start, goal, [ACTOR], SCHEMAS, Space(used, capacity, 0, node_of))
    return [part.devices.tolist() for part in found]


def test_parts_with_unequal_room_are_not_alike_unless_there_is_plenty() -> None:
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    size = full_bytes(SCHEMAS[ACTOR])
    assert alike({}, {}) == [pairs]
    assert alike(dict.fromkeys(range(8), size), {}) == [pairs]
    assert alike(dict.fromkeys(range(8), size) | {5: size - 8}, {}) == [[pairs[0], pairs[1], pairs[3]], [pairs[2]]]
    assert alike(dict.fromkeys(range(8), 4 * size) | {5: 5 * size}, {}) == [pairs]


def test_a_node_ties_and_its_arrangement_tells_apart() -> None:
    assert alike({}, {device: device // 4 for device in range(8)}) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    apart = {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 4}
    assert alike({}, apart) == [[[0, 1], [4, 5]], [[2, 3]], [[6, 7]]]


def needs(held: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Needs:
    return Needs(np.array(held), np.array(wanted))


def test_cells_that_read_nothing_stay_alone() -> None:
    assert lots_of(needs([[4, 4, 4]], [[2, 2, 0]]), np.zeros(3, dtype=np.int64)).max() <= 2
    assert sorted(lots_of(needs([[4, 4, 4]], [[2, 2, 2]]), np.zeros(3, dtype=np.int64)).tolist()) == [0, 1, 2]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_readers_have_a_holder_and_no_lot_takes_more_rounds_than_all(data: st.DataObject) -> None:
    cells = data.draw(st.integers(2, 30))
    sizes = st.lists(st.sampled_from([0, 0, 4, 8]), min_size=cells, max_size=cells)
    held, wanted = data.draw(sizes), data.draw(sizes)
    held[0] = held[0] or 4
    lots = lots_of(needs([held], [wanted]), np.arange(cells)).tolist()
    rounds = max(1, ceil(log2(1 + sum(wanted) / sum(held)) - 1e-9))
    for lot in set(lots):
        had, lacks = (sum(size for size, own in zip(each, lots, strict=True) if own == lot) for each in (held, wanted))
        assert lacks <= (2**rounds - 1) * had


def test_what_a_reader_leaves_over_serves_another() -> None:
    held, wanted = [4, 0, 4, 4, 4, 8, 8], [0, 0, 8, 8, 8, 8, 0]  # cell 6 has enough for two of cells 2 to 4
    lots = lots_of(needs([held], [wanted]), np.arange(7))
    assert all(sum(np.array(wanted)[lots == lot]) <= sum(np.array(held)[lots == lot]) for lot in set(lots.tolist()))


def test_more_devices_of_the_same_kind_make_no_more_work() -> None:
    before, after = (plan(assign(ACTOR, layout, *range(4))) for layout in (Layout(4), Layout(1, 2)))
    one = connect(expand(before), expand(after), SCHEMAS)
    for count in (4, 64):
        start, goal = (shifted([(each, 4 * node) for node in range(count)]) for each in (before, after))
        dag = connect(start, goal, SCHEMAS)
        assert [len(lot.dag.primitives) for lot in dag.lots] == [len(one.primitives)]


@pytest.mark.parametrize("far", EITHER)
def test_a_part_that_is_blocked_on_its_own_gets_help_from_others(far: float) -> None:
    sizes = {ms: full_bytes(SCHEMAS[ms]) for ms in (ACTOR, REWARD)}
    start = EMUSet((*units(ACTOR, Layout(1), 0, 2), *units(REWARD, Layout(1), 1, 3)))
    goal = EMUSet((*units(ACTOR, Layout(1), 1, 3), *units(REWARD, Layout(1), 0, 2)))
    capacity = dict.fromkeys((0, 1), max(sizes.values())) | dict.fromkeys((2, 3), sum(sizes.values()))
    nodes = {device: device // 2 for device in range(4)}
    node = [EMUSet(tuple(unit for unit in each.units if unit.devices[0] < 2)) for each in (start, goal)]
    with pytest.raises(InfeasibleError, match="bytes short"):
        connect(node[0], node[1], SCHEMAS, Budget(capacity), Site(nodes, far=far))
    assert (
        len(fold(start, goal, [ACTOR, REWARD], SCHEMAS, Space(stored_bytes(start, SCHEMAS), capacity, 0, nodes))) == 2
    )
    dag = connect(start, goal, SCHEMAS, Budget(capacity), Site(nodes, far=far))
    world = filled(start, SCHEMAS)
    execute(dag, SCHEMAS, world, capacity)
    assert_holds(world, goal, SCHEMAS)
    assert not dag.lots


def test_to_order_many_parts_makes_none_of_their_primitives() -> None:
    start = EMUSet(units(ACTOR, Layout(2), *range(64)))
    goal = EMUSet(units(ACTOR, Layout(1), *range(64)))
    room = dict.fromkeys(range(64), 4 * full_bytes(SCHEMAS[ACTOR]))
    dag = connect(start, goal, SCHEMAS, Budget(room), Site({device: device // 8 for device in range(64)}))
    assert dag.lots
    with pytest.raises(AttributeError):  # a slot that is not set
        object.__getattribute__(dag, "primitives")
    assert dag.primitives
