"""Mutations of orders where memory is short: what is given up, what is proved, how a known way is followed."""

from __future__ import annotations

from tests.mutations.harness import Mutation

CHEAPEST = "tests/transition/test_cheapest.py::"
LEAST = CHEAPEST + "test_no_order_loses_less_than_the_cheapest"
WAITING = CHEAPEST + "test_model_stages_that_wait_for_each_other_are_told_without_an_order"
BRUTE_FORCE = (
    "tests/transition/test_order.py::test_a_target_is_infeasible_only_if_no_order_exists_and_then_staging_leads_there"
)

SHORT_MEMORY = (
    Mutation(
        "let units leave early for nothing",
        "transition/cheapest.py",
        "(cost + self.crowd.lost(old, built), more)",
        "(cost, more)",
        LEAST,
    ),
    Mutation(
        "expect more loss than there must be",
        "transition/cheapest.py",
        "step.lost_bytes + self._alone.lost(",
        "step.lost_bytes + 2 * self._alone.lost(",
        LEAST,
    ),
    Mutation(
        "let the last copy leave",
        "transition/cheapest.py",
        "(old.safe or built & old.others)",
        "True",
        LEAST,
    ),
    Mutation(
        "call the least what there was no time to compare",
        "transition/cheapest.py",
        "search.tries > 0)",
        "True)",
        CHEAPEST + "test_what_the_search_had_no_time_to_prove_is_not_called_the_least",
    ),
    Mutation(
        "never take the order that gives up least",
        "transition/sparing.py",
        "other if shorter else dag",
        "dag",
        CHEAPEST + "test_the_order_that_gives_up_least_is_taken_for_a_larger_share_of_bytes_than_of_time",
    ),
    Mutation(
        "take the order that gives up least however long it is",
        "transition/sparing.py",
        "other if shorter else dag",
        "other",
        "tests/transition/test_shortest.py::test_each_try_leads_to_a_shortest_order_that_no_other_finds",
    ),
    Mutation(
        "prove nothing by model-stages that wait for each other",
        "transition/deadlock.py",
        "            return True\n",
        "            return False\n",
        WAITING,
    ),
    Mutation(
        "forget the only unit of a model-stage that waits",
        "transition/deadlock.py",
        "    for old in each(crowd.old, singles):\n        _put(level, old)\n",
        "",
        WAITING,
    ),
    Mutation(
        "keep all units of a model-stage that waits",
        "transition/deadlock.py",
        "if olds & (olds - 1) == 0)",
        "if olds)",
        WAITING,
    ),
    Mutation(
        "keep none of several units of a model-stage that waits",
        "transition/deadlock.py",
        "any(_fits(crowd, new, singles | old.bit, _put(dict(level), old)) for old in each(crowd.old, olds))",
        "True",
        WAITING,
    ),
    Mutation(
        "ask for room beside whichever of several units stays",
        "transition/deadlock.py",
        "any(_fits(crowd, new, singles | old.bit, _put(dict(level), old)) for",
        "all(_fits(crowd, new, singles | old.bit, _put(dict(level), old)) for",
        WAITING,
    ),
    Mutation(
        "overtake on a known way without looking at what is left of it",
        "transition/following.py",
        "return _fits(run, first) and (",
        "return (",
        BRUTE_FORCE,
    ),
    Mutation(
        "wait for a group that is built together with another",
        "transition/run.py",
        "            part.risky.discard(id(other))\n",
        "",
        "tests/transition/test_shortest.py::test_no_group_that_has_started_is_still_said_to_lose_what_it_reads",
    ),
)
