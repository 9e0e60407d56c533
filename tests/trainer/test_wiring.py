"""Which groups units need, and that groups which stay are left alone."""

from __future__ import annotations

from nereus.algorithms.ppo import Ppo
from nereus.core import EMU, EMUSet, Layout, ModelStage, Workflow
from nereus.trainer.wiring import Route, Wiring, routes
from tests.settings.files import SPEC
from tests.trainer.fake_crew import FakeCrew

ACTOR = ModelStage.parse("actor/training")
ROLLOUT = ModelStage.parse("actor/generation")
REWARD = ModelStage.parse("reward/inference")
FLOW: Workflow = Ppo().workflow(dict.fromkeys(("actor", "critic", "reward", "reference"), SPEC))
GRID = EMU(ACTOR, Layout(2, 2), (4, 5, 6, 7))
ALONE = EMU(ROLLOUT, Layout(), (4,))


def wired(crew: FakeCrew, units: EMUSet, wiring: Wiring | None = None) -> Wiring:
    found = wiring or Wiring(FLOW, crew, 5.0)
    crew.sent.clear()
    found.wire(units)
    return found


def test_tp_groups_are_rows_and_pp_groups_columns_of_a_unit() -> None:
    assert routes(FLOW, EMUSet((GRID,))) == (
        Route("tp", ACTOR, (4, 5)),
        Route("tp", ACTOR, (6, 7)),
        Route("pp", ACTOR, (4, 6)),
        Route("pp", ACTOR, (5, 7)),
        Route("sync", ROLLOUT, (4, 5, 6, 7)),
    )


def test_dp_groups_join_equal_positions_in_unit_order_and_only_what_is_trained_has_them() -> None:
    trained = (EMU(ACTOR, Layout(2), (6, 3)), EMU(ACTOR, Layout(2), (0, 5)))
    scored = (EMU(REWARD, Layout(), (1,)), EMU(REWARD, Layout(), (2,)))
    found = routes(FLOW, EMUSet((*trained, *scored)))
    assert [route for route in found if route.axis == "dp"] == [Route("dp", ACTOR, (0, 6)), Route("dp", ACTOR, (5, 3))]
    assert not [route for route in found if route.model_stage == REWARD]


def test_synchronisation_joins_both_sides_and_needs_no_group_on_one_device() -> None:
    both = EMUSet((EMU(ACTOR, Layout(), (3,)), EMU(ROLLOUT, Layout(2), (2, 4))))
    assert Route("sync", ROLLOUT, (2, 3, 4)) in routes(FLOW, both)
    alone = EMUSet((EMU(ACTOR, Layout(), (4,)), ALONE))
    assert routes(FLOW, alone) == ()
    assert wired(FakeCrew(), alone).sync(ROLLOUT) == ""


def test_every_device_learns_the_groups_it_is_in() -> None:
    crew = FakeCrew()
    wiring = wired(crew, EMUSet((GRID, ALONE)))
    (made,) = {tuple(message.fields["groups"]) for _, message in crew.commands("groups.make")}
    assert [members for _, members in made] == [(4, 5), (6, 7), (4, 6), (5, 7), (4, 5, 6, 7)]
    bound = {device: message.fields["groups"] for device, message in crew.commands("bind")}
    names = dict(made)
    assert set(bound) == {4, 5, 6, 7}
    for device, groups in bound.items():
        assert groups.keys() == {(ACTOR, "tp"), (ACTOR, "pp"), (ROLLOUT, "sync")}
        assert all(device in names[name] for name in groups.values())
    assert names[wiring.sync(ROLLOUT)] == (4, 5, 6, 7)


def test_intact_groups_keep_their_names_and_new_ones_never_reuse_one() -> None:
    crew = FakeCrew()
    wiring = wired(crew, EMUSet((GRID, ALONE)))
    before = dict(wiring.names)
    wired(crew, EMUSet((GRID, EMU(ROLLOUT, Layout(), (3,)))), wiring)
    kept = {route for route in before if route.axis != "sync"}
    assert {route: wiring.names[route] for route in kept} == {route: before[route] for route in kept}
    (dropped,) = {tuple(message.fields["names"]) for _, message in crew.commands("groups.drop")}
    assert dropped == (before[Route("sync", ROLLOUT, (4, 5, 6, 7))],)
    first = set(before.values())
    wired(crew, EMUSet((GRID, ALONE)), wiring)
    assert wiring.names[Route("sync", ROLLOUT, (4, 5, 6, 7))] not in first


def test_after_a_reset_every_group_is_made_again_under_another_name() -> None:
    crew = FakeCrew()
    units = EMUSet((GRID, ALONE))
    wiring = wired(crew, units)
    before = dict(wiring.names)
    wiring.reset()
    assert {device for device, _ in crew.commands("groups.reset")} == crew.devices
    wired(crew, units, wiring)
    assert wiring.names.keys() == before.keys()
    assert not set(wiring.names.values()) & set(before.values())
