"""Transition DAGs refuse what could not be executed."""

from __future__ import annotations

import pytest

from nereus.core import Destroy, Edge, EdgeKind, EMUSet, Extend, Merge, SettingsError, Split, TransitionDAG
from nereus.core.transition import Primitive
from tests.core.values import unit

START = EMUSet((unit(0, 1, tp=2),))
GOAL = EMUSet((unit(0), unit(1), unit(2)))
SPLIT = Split("split", (unit(0, 1, tp=2),), (unit(0), unit(1)), group="a")
EXTEND = Extend("extend", (unit(0),), (unit(2),), group="b")
DESTROY = Destroy("destroy", (unit(0, 1, tp=2),), (), group="c")


def dag(primitives: tuple[Primitive, ...], *edges: tuple[str, str]) -> TransitionDAG:
    return TransitionDAG(START, GOAL, primitives, tuple(Edge(a, b, EdgeKind.STATE) for a, b in edges))


def test_a_valid_order_is_accepted() -> None:
    made = dag((SPLIT, EXTEND, DESTROY), ("split", "extend"), ("extend", "destroy"))
    assert made.predecessors() == {"split": set(), "extend": {"split"}, "destroy": {"extend"}}
    assert made.devices == {0, 1, 2}


def test_cyclic_waits_are_refused() -> None:
    with pytest.raises(SettingsError, match="wait for each other"):
        dag((SPLIT, EXTEND), ("split", "extend"), ("extend", "split"))


def test_a_primitive_that_waits_for_itself_is_refused() -> None:
    with pytest.raises(SettingsError, match="wait for each other"):
        dag((SPLIT,), ("split", "split"))


def test_an_order_that_breaks_an_edge_is_refused() -> None:
    with pytest.raises(SettingsError, match="extend is listed before split"):
        dag((EXTEND, SPLIT), ("split", "extend"))


def test_edges_to_unknown_primitives_are_refused() -> None:
    with pytest.raises(SettingsError, match="unknown primitives"):
        dag((SPLIT,), ("split", "ghost"))


def test_repeated_ids_are_refused() -> None:
    with pytest.raises(SettingsError, match="ids repeat"):
        dag((SPLIT, SPLIT))


def test_destroy_builds_nothing() -> None:
    with pytest.raises(SettingsError, match="Destroy has no targets"):
        Destroy("destroy", (unit(0),), (unit(1),), group="a")


def test_commit_groups_hold_acquiring_primitives_only() -> None:
    merge = Merge("merge", (unit(0), unit(1)), (unit(0, 1, tp=2),), group="b")
    groups = dag((SPLIT, EXTEND, merge, DESTROY)).groups
    assert {name: [p.id for p in members] for name, members in groups.items()} == {
        "a": ["split"],
        "b": ["extend", "merge"],
    }


def test_primitives_print_what_they_do() -> None:
    assert str(EXTEND) == "Extend(actor/training tp1 pp1 on [0]) -> actor/training tp1 pp1 on [2]"
    assert str(DESTROY).endswith("-> nothing")
