"""Live, pending and old positions and the bytes they cost."""

from __future__ import annotations

import pytest
import torch

from nereus.core import EMU, Kind, Layout, ModelStage, OutOfMemoryError, Stage, TransitionError
from nereus.engine.ledger import Ledger
from nereus.engine.positions import Positions
from nereus.transition.routes import aliased
from tests.engine.fill import schema

ACTOR = ModelStage("actor", Stage.TRAINING)
SCHEMA = schema(layers=2)
OLD = EMU(ACTOR, Layout(2), (0, 1))
NEW = EMU(ACTOR, Layout(2, 2), (0, 1, 2, 3))


def positions(capacity_bytes: int | None = None) -> tuple[Positions, Ledger]:
    ledger = Ledger(0, capacity_bytes)
    return Positions(0, ledger, torch.device("cpu")), ledger


def test_a_position_stores_what_the_schema_says() -> None:
    held, ledger = positions()
    position = held.create(OLD, SCHEMA)
    assert position.stored_bytes == ledger.used_bytes == SCHEMA.stored_bytes(OLD, 0)
    assert position.tensors["embed", Kind.PARAM].dtype == torch.bfloat16
    with pytest.raises(TransitionError, match="already holds actor/training tp2"):
        held.create(OLD, SCHEMA)


def test_a_pending_position_shares_unchanged_tensors_until_the_old_one_is_destroyed() -> None:
    held, ledger = positions()
    old = held.create(OLD, SCHEMA)
    whole = ledger.used_bytes
    new = held.prepare("g", NEW, SCHEMA, old, aliased(SCHEMA, OLD, NEW, 0))
    assert new.tensors["0.q", Kind.EXP_AVG] is old.tensors["0.q", Kind.EXP_AVG]
    assert ledger.used_bytes == whole, "every tensor of the first pp rank was there already"
    assert held[ACTOR] is old
    held.commit("g")
    held.commit("g")
    assert held[ACTOR] is new
    assert held.find(OLD) is old
    assert held.destroy(OLD)
    assert not held.destroy(OLD)
    assert ledger.used_bytes == SCHEMA.stored_bytes(NEW, 0) < whole
    assert new.tensors["0.q", Kind.EXP_AVG].shape == (8, 8), "what is shared survives"


def test_abort_lets_go_of_what_is_pending_alone() -> None:
    held, ledger = positions()
    old = held.create(OLD, SCHEMA)
    before = ledger.used_bytes
    held.prepare("g", EMU(ACTOR, Layout(), (0,)), SCHEMA, old, ())
    assert ledger.used_bytes > before
    held.abort()
    held.commit("g")
    assert ledger.used_bytes == before
    assert held[ACTOR] is old


def test_an_allocation_beyond_the_capacity_changes_nothing() -> None:
    held, ledger = positions(SCHEMA.stored_bytes(OLD, 0) + 100)
    old = held.create(OLD, SCHEMA)
    with pytest.raises(OutOfMemoryError, match="device 0: state needs"):
        held.prepare("g", EMU(ACTOR, Layout(), (0,)), SCHEMA, old, ())
    assert ledger.used_bytes == old.stored_bytes
    held.clear()
    assert ledger.used_bytes == 0
    with pytest.raises(TransitionError, match=r"holds no position of actor/training, it holds: none"):
        _ = held[ACTOR]
