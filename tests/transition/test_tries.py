"""Which rules are tried: how much each is worth where there is an order already."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import pytest

from nereus.transition import connect
from nereus.transition.budget import Budget
from nereus.transition.decompose import LocalDAG
from nereus.transition.room import Room
from nereus.transition.rule import Rule
from nereus.transition.run import Run, Stuck
from nereus.transition.schedule import GROUP_S, SAVED, TRIES
from nereus.transition.site import Site
from tests.support.small import SCHEMAS, random_case


def tried(seed: int, bytes_per_s: float) -> tuple[list[Rule], float, int]:
    """The rules that are tried, the time above the bound of the order found, and how many groups it has."""
    module = import_module("nereus.transition.schedule")
    real, rules = module._attempt, list[Rule]()

    def attempt(locals_: Sequence[LocalDAG], room: Room, site: Site, rule: Rule, *rest: object) -> tuple[Run, Stuck]:
        rules.append(rule)
        return real(locals_, room, site, rule, *rest)  # type: ignore[no-any-return]

    start, goal, capacity = random_case(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_attempt", attempt)
        patch.setattr(import_module("nereus.transition.compile"), "fold", lambda *_: ())
        patch.setattr(import_module("nereus.transition.compile"), "spared", lambda dag, *_: dag)
        dag = connect(start, goal, SCHEMAS, Budget(capacity), Site(bytes_per_s=bytes_per_s))
    return rules, dag.span_bytes - dag.bound_bytes, len(dag.groups)


@pytest.mark.parametrize("seed", [5, 26])
def test_rules_that_seldom_help_are_left_out_where_there_is_an_order(seed: int) -> None:
    every, gap_bytes, groups = tried(seed, 0.0)  # what time is worth is not known
    assert set(every) == {rule for _, rule in TRIES}
    some, *_ = tried(seed, 0.05 * gap_bytes / (groups * GROUP_S))  # a try takes a twentieth of what is above the bound
    assert set(some) == {rule for (_, rule), saved in zip(TRIES, SAVED, strict=True) if saved > 0.05}
