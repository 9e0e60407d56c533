"""Routes between placements of boxes: each lacking element once, from an owner; bad placements are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import SettingsError, TransitionError
from nereus.transition.boxes import Boxes, LogicalTensor, Placement, plan_routes
from nereus.transition.region import Region, pieces
from tests.support.boxes import canonical, carry_out, cut, lacks_items

RANKS = 6
DTYPES = ["float32", "bfloat16", "int16", "bool", "complex64"]
SLOWER = settings(max_examples=150, deadline=None)


@st.composite
def tilings(draw: st.DrawFn, region: Region, most: int) -> list[Region]:
    """Up to `most` boxes, some of them empty, that together hold a region and do not overlap."""
    if most == 1 or not region.start or draw(st.booleans()):
        return [region]
    dim = draw(st.integers(0, len(region.start) - 1))
    at = draw(st.integers(region.start[dim], region.stop[dim]))
    low, high = list(region.stop), list(region.start)
    low[dim] = high[dim] = at
    first = draw(st.integers(1, most - 1))
    left = draw(tilings(Region(region.start, tuple(low)), first))
    return left + draw(tilings(Region(tuple(high), region.stop), most - first))


@st.composite
def placed(draw: st.DrawFn, shape: Sequence[int]) -> Boxes:
    """One to three copies of a tensor; each rank holds a box of one of them or nothing."""
    ranks = draw(st.permutations(range(RANKS)))
    boxes: dict[int, Region] = {}
    for _ in range(draw(st.integers(1, 3))):
        free = [rank for rank in ranks if rank not in boxes]
        if free:
            tiles = draw(tilings(Region.whole(shape), len(free)))
            boxes.update(zip(free, tiles, strict=False))
    return boxes


@st.composite
def worlds(draw: st.DrawFn, placements: int = 2) -> tuple[dict[str, LogicalTensor], list[Placement]]:
    tensors: dict[str, LogicalTensor] = {}
    boxes: list[dict[str, Boxes]] = [{} for _ in range(placements)]
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype, cuts = draw(st.sampled_from(DTYPES)), [draw(placed(shape)) for _ in range(placements)]
        for copy in range(draw(st.integers(1, 3))):
            name = f"t{index}.{copy}"
            tensors[name] = LogicalTensor(name, shape, dtype)
            for found, chosen in zip(boxes, cuts, strict=True):
                found[name] = chosen
    return tensors, [Placement(found) for found in boxes]


@SLOWER
@given(worlds())
def test_each_rank_gets_what_it_lacks_once_and_nothing_else(
    world: tuple[dict[str, LogicalTensor], list[Placement]],
) -> None:
    tensors, (source, target) = world
    plan = plan_routes(tensors.values(), source, target)
    found, wanted = carry_out(plan, cut(tensors, source)), cut(tensors, target)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
    assert plan.received_bytes.total() == plan.sent_bytes.total() == lacks_items(tensors, source, target)


@SLOWER
@given(worlds(placements=4))
def test_there_and_back_and_a_chain_of_five_are_the_identity(
    world: tuple[dict[str, LogicalTensor], list[Placement]],
) -> None:
    tensors, (a, b, c, d) = world
    held = cut(tensors, a)
    for before, after in [(a, b), (b, a), (a, c), (c, d), (d, a)]:
        held = carry_out(plan_routes(tensors.values(), before, after), held)
    wanted = cut(tensors, a)
    assert held.keys() == wanted.keys()
    assert all(np.array_equal(held[key], wanted[key]) for key in wanted)


@given(worlds())
def test_the_plan_does_not_depend_on_the_order_of_ranks_in_the_description(
    world: tuple[dict[str, LogicalTensor], list[Placement]],
) -> None:
    tensors, placements = world
    turned = [
        Placement({name: dict(reversed(list(boxes.items()))) for name, boxes in p.boxes.items()}) for p in placements
    ]
    plans = [plan_routes(tensors.values(), before, after) for before, after in (placements, turned)]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[0].routes == plans[1].routes


@given(st.data())
def test_pieces_of_a_region_are_disjoint_cover_it_and_have_the_same_holders_throughout(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    holders = [(box, (rank,)) for rank, box in data.draw(placed(shape)).items()]
    count = np.zeros(shape, dtype=int)
    for piece, owners in pieces(Region.whole(shape), holders):
        index = tuple(map(slice, piece.start, piece.stop))
        count[index] += 1
        for box, (rank,) in holders:
            inside = np.zeros(shape, dtype=bool)
            inside[tuple(map(slice, box.start, box.stop))] = True
            assert inside[index].all() if rank in owners else not inside[index].any()
    assert (count == 1).all()


def thirds(shape: Sequence[int], ranks: Sequence[int]) -> Boxes:
    return {rank: Region.chunk(shape, 0, len(ranks), index) for index, rank in enumerate(ranks)}


def test_replicas_share_the_sending() -> None:
    tensors = [LogicalTensor(f"w{i}", (64, 8), "float32") for i in range(4)]
    source = Placement({t.name: {r: Region.whole(t.shape) for r in range(4)} for t in tensors})
    target = Placement({t.name: {r: Region.whole(t.shape) for r in range(4, 10)} for t in tensors})
    sent = plan_routes(tensors, source, target).sent_bytes
    assert sent.keys() == {0, 1, 2, 3}
    assert max(sent.values()) <= 1.25 * min(sent.values())


def test_one_large_tensor_is_cut_among_its_owners() -> None:
    big = LogicalTensor("embed", (1000, 4), "bfloat16")
    source = Placement({"embed": {r: Region.whole(big.shape) for r in range(4)}})
    sent = plan_routes([big], source, Placement({"embed": {9: Region.whole(big.shape)}})).sent_bytes
    assert set(sent.values()) == {2000}


def test_owners_on_the_same_node_are_asked_first() -> None:
    tensor = LogicalTensor("w", (8,), "float32")
    whole = Region.whole((8,))
    source, target = Placement({"w": {0: whole, 8: whole}}), Placement({"w": {1: whole, 9: whole}})
    plan = plan_routes([tensor], source, target, node_of={0: 0, 1: 0, 8: 1, 9: 1})
    assert {(route.source, route.target) for route in plan.routes} == {(0, 1), (8, 9)}


def test_identical_tensors_share_the_computation() -> None:
    def routes(count: int) -> int:
        tensors = [LogicalTensor(f"layer.{i}", (16, 4), "float32") for i in range(count)]
        source = Placement({t.name: thirds(t.shape, range(2)) for t in tensors})
        return len(plan_routes(tensors, source, Placement({t.name: thirds(t.shape, range(4)) for t in tensors})).routes)

    assert routes(4) == routes(400)


def test_a_scalar_goes_to_everyone_who_lacks_it() -> None:
    step = LogicalTensor("step", (), "float32")
    whole = Region.whole(())
    plan = plan_routes([step], Placement({"step": {0: whole}}), Placement({"step": {0: whole, 1: whole, 2: whole}}))
    assert plan.received_bytes == {1: 4, 2: 4}


W = LogicalTensor("w", (6, 2), "float32")
HALVES = Placement({"w": thirds((6, 2), range(2))})
sources_of = partial(plan_routes, [W])


def test_what_no_source_holds_is_named_with_the_rank_that_needs_it() -> None:
    part = Placement({"w": {0: Region.along((6, 2), 0, 0, 4)}})
    with pytest.raises(TransitionError, match=r"no source holds \[4:6, 0:2\] of w, which rank 1 needs"):
        sources_of(part, HALVES)


def test_a_target_that_leaves_a_part_out_is_refused() -> None:
    with pytest.raises(TransitionError, match=r"the target does not hold \[3:6, 0:2\] of w"):
        sources_of(HALVES, Placement({"w": {0: Region.along((6, 2), 0, 0, 3)}}))


def test_each_replica_of_the_target_must_be_complete() -> None:
    boxes = {0: Region.whole((6, 2)), 1: Region.along((6, 2), 0, 0, 3)}
    with pytest.raises(TransitionError, match="replica 1 of the target does not hold"):
        sources_of(HALVES, Placement({"w": boxes}, {0: 0, 1: 1}))


def test_a_tensor_that_vanishes_or_is_not_described_is_refused() -> None:
    moment = LogicalTensor("w/exp_avg", (6, 2), "float32")
    both = Placement({**HALVES.boxes, "w/exp_avg": HALVES.boxes["w"]})
    with pytest.raises(TransitionError, match=r"the target holds nothing of w/exp_avg; .*`dropped`"):
        plan_routes([W, moment], both, HALVES)
    assert plan_routes([W, moment], both, HALVES, dropped=["w/exp_avg"]).routes == ()
    with pytest.raises(TransitionError, match="places w/exp_avg, which is not described; described: w"):
        plan_routes([W], both, HALVES)


def test_boxes_outside_their_tensor_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(TransitionError, match=r"source, rank 3: \[0:7, 0:2\] does not lie in w of shape \(6, 2\)"):
        sources_of(Placement({"w": {3: Region((0, 0), (7, 2))}}), HALVES)
    with pytest.raises(TransitionError, match=r"rank 0: \[0:6\] does not lie in w"):
        sources_of(HALVES, Placement({"w": {0: Region.whole((6,))}}))
    with pytest.raises(SettingsError, match="dtype 'float12', valid: float64"):
        LogicalTensor("w", (2,), "float12")
    with pytest.raises(SettingsError, match="0 <= start <= stop"):
        Region((3,), (2,))


def test_fresh_tensors_are_made_where_no_source_has_them() -> None:
    known = [LogicalTensor(f"rng/{i}", (16,), "uint8", fresh=True) for i in range(4)]
    whole = Region.whole((16,))
    before = Placement({f"rng/{i}": {i: whole} for i in range(2)})
    after = Placement({f"rng/{i}": {i: whole} for i in range(4)})
    plan = plan_routes(known, before, after)
    assert plan.routes == ()
    assert plan.fresh == {2: ("rng/2",), 3: ("rng/3",)}
    assert plan_routes(known, after, before).fresh == {}


def test_the_canonical_fill_tells_tensors_apart() -> None:
    assert not np.array_equal(canonical(W), canonical(LogicalTensor("v", (6, 2), "float32")))
