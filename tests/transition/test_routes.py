"""Routes: every lacking range once, from an owner, without a funnel."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from nereus.core import EMU, Kind, Layout, Move, Plan, StateSchema, TransitionError, expand
from nereus.transition import aliased, local_copies, routes
from nereus.transition.flows import Job, dealt
from tests.oracles.cut import cut, lacks_bytes
from tests.oracles.senders import least_busiest_sender
from tests.support.models import ACTOR, TRAINED, decoder, even, full_bytes, units
from tests.support.pairs import random_assignment


def sent(moves: Sequence[Move]) -> Counter[int]:
    total: Counter[int] = Counter()
    for move in moves:
        total[move.source] += move.bytes * len(move.targets)
    return total


def received(moves: Sequence[Move]) -> Counter[int]:
    total: Counter[int] = Counter()
    for move in moves:
        for target in move.targets:
            total[target] += move.bytes
    return total


def random_units(seed: int) -> tuple[StateSchema, tuple[EMU, ...], tuple[EMU, ...]]:
    rng = random.Random(seed)
    schema = decoder(layers=rng.choice([3, 4, 5]), vocab=rng.choice([16, 17]), tied=rng.random() < 0.5)
    before, after = (
        tuple(EMU(ACTOR, a.candidate.layout, devices) for devices in a.units)
        for a in (random_assignment(rng, ACTOR, schema.layers, range(10)) for _ in range(2))
    )
    return schema, before, after


@pytest.mark.parametrize("seed", range(40))
def test_each_device_receives_what_it_lacks_and_no_sender_is_a_funnel(seed: int) -> None:
    schema, before, after = random_units(seed)
    moves = routes(schema, before, after)
    wanted = Counter({d: lacks_bytes(schema, before, unit, d) for unit in after for d in unit.devices})
    assert received(moves) == +wanted
    loads = sent(moves)
    if loads:
        mean = loads.total() / len(loads)
        assert max(loads.values()) <= 1.5 * max(mean, least_busiest_sender(schema, before, after))


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
@pytest.mark.parametrize("added", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2)])
def test_replicas_share_the_sending_within_half_of_the_mean(replicas: int, added: int, layout: Layout) -> None:
    size = layout.size
    sources = units(ACTOR, layout, *range(replicas * size))
    targets = units(ACTOR, layout, *range(100, 100 + added * size))
    loads = sent(routes(decoder(), sources, targets))
    for rank in range(size):
        same = [loads[unit.devices[rank]] for unit in sources]
        assert max(same) <= 1.5 * sum(same) / len(same)


def test_routes_do_not_depend_on_the_order_in_which_units_are_listed() -> None:
    schema, before, after = random_units(5)
    assert routes(schema, before, after) == routes(schema, before[::-1], after[::-1])


def test_replicated_kv_heads_are_counted_once_and_kept_where_they_are() -> None:
    schema = decoder(heads=8, kv_heads=2)
    four, eight = units(ACTOR, Layout(4), *range(4)), units(ACTOR, Layout(8), *(0, 4, 1, 5, 2, 6, 3, 7))
    moves = [move for move in routes(schema, four, eight, kinds=[Kind.PARAM]) if move.tensor == "layers.0.k"]
    whole = schema.tensors[[t.name for t in schema.tensors].index("layers.0.k")].elements * 2
    assert received(moves) == dict.fromkeys([4, 5, 6, 7], whole // 2)


def test_padding_never_moves() -> None:
    schema = decoder(vocab=17)
    whole, cut_8 = units(ACTOR, Layout(1), 0), units(ACTOR, Layout(8), *range(1, 9))
    rows = [(m.box.start, m.box.stop) for m in routes(schema, whole, cut_8, kinds=[Kind.MASTER]) if m.tensor == "embed"]
    assert sorted(rows) == [(0, 3), (3, 6), (6, 9), (9, 12), (12, 15), (15, 17)]
    back = [m for m in routes(schema, cut_8, whole, kinds=[Kind.MASTER]) if m.tensor == "embed"]
    assert sum(m.box.stop - m.box.start for m in back) == 17


def test_the_last_pp_rank_gets_its_copy_of_a_tied_embedding() -> None:
    schema = decoder(tied=True)
    moves = routes(schema, units(ACTOR, Layout(1, 1), 0), units(ACTOR, Layout(1, 2), 0, 1), kinds=[Kind.PARAM])
    assert [(m.source, m.targets) for m in moves if m.tensor == "embed"] == [(0, (1,))]


def test_owners_on_the_same_node_are_asked_first() -> None:
    sources, targets = units(ACTOR, Layout(1), 0, 8), units(ACTOR, Layout(1), 1, 9)
    moves = routes(decoder(), sources, targets, node_of={0: 0, 1: 0, 8: 1, 9: 1})
    assert {(m.source, m.targets) for m in moves} == {(0, (1,)), (8, (9,))}


def test_without_lacking_a_device_copies_from_itself_what_it_has() -> None:
    schema = decoder()
    training, rollout = units(ACTOR, Layout(2, 1), 0, 1), units(ACTOR, Layout(1, 1), 0)
    moves = routes(schema, training, rollout, kinds=[Kind.PARAM], lacking=False)
    assert received(moves) == {0: full_bytes(schema) * 2 // schema.element_bytes}
    own = sum(move.bytes for move in moves if move.source == 0)
    assert own == full_bytes(schema) // schema.element_bytes * 2 - lacks_bytes(schema, training, rollout[0], 0) // 7


def test_only_the_moves_of_one_device_are_expanded_on_request() -> None:
    schema, before, after = random_units(3)
    everything = routes(schema, before, after)
    for device in range(10):
        mine = [m for m in everything if device == m.source or device in m.targets]
        assert list(routes(schema, before, after, device=device)) == mine


def test_a_range_that_nobody_holds_is_named() -> None:
    with pytest.raises(TransitionError, match=r"no source holds indices 0 to .* sources: none"):
        routes(decoder(), (), units(ACTOR, Layout(1), 0))


@pytest.mark.parametrize("seed", range(20))
def test_aliased_tensors_are_those_whose_local_shard_stays_the_same(seed: int) -> None:
    schema, before, after = random_units(seed)
    for old in before:
        for new in after:
            for device in set(old.devices) & set(new.devices):
                was, now = cut(schema, old, device), cut(schema, new, device)
                same = {
                    name
                    for name, kind in was.keys() & now.keys()
                    if kind is Kind.PARAM
                    and was[name, kind].shape == now[name, kind].shape
                    and (was[name, kind] == now[name, kind]).all()
                }
                assert aliased(schema, old, new, device) == same
                copied = {move.tensor for move in local_copies(schema, old, new, device)}
                assert copied.isdisjoint(same)


def test_identical_layers_share_the_computation() -> None:
    """A deep model has as many flows as a shallow one, up to the pp cut."""
    counts = []
    for layers in (8, 64):
        schema = even(layers=layers, kinds=TRAINED)
        job = Job(units(ACTOR, Layout(2, 2), *range(4)), units(ACTOR, Layout(4, 1), *range(4)))
        counts.append(len(dealt(schema, job).flows()))
    assert counts[0] == counts[1]


def test_units_that_stay_as_they_are_receive_nothing() -> None:
    rng = random.Random(0)
    start = expand(Plan((random_assignment(rng, ACTOR, 4, range(6)),)))
    assert routes(decoder(), start.units, start.units) == ()
