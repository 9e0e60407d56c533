"""Mutations of what is ordered once for all that is alike."""

from __future__ import annotations

from tests.mutations.harness import Mutation

TESTS = "tests/transition/test_fold.py::"
EVERY_COPY = TESTS + "test_what_is_found_of_one_copy_is_what_all_primitives_say"

FOLDING = (
    Mutation(
        "take parts with unequal room for alike",
        "transition/fold.py",
        "np.where(free < wanted, free, AMPLE)",
        "np.where(free < wanted, 0, AMPLE)",
        TESTS + "test_parts_with_unequal_room_are_not_alike_unless_there_is_plenty",
    ),
    Mutation(
        "take parts on unlike nodes for alike",
        "transition/fold.py",
        "np.where(node < 0, -1, rank[node])",
        "np.zeros_like(node)",
        TESTS + "test_a_node_ties_and_its_arrangement_tells_apart",
    ),
    Mutation(
        "leave all readers to the first holder",
        "transition/lots.py",
        "return self.ability * self.held - self.wanted",
        "return self.held",
        TESTS + "test_readers_have_a_holder_and_no_lot_takes_more_rounds_than_all",
    ),
    Mutation(
        "count what one copy moves",
        "transition/estimate.py",
        'links["intra"] += copies * sum(',
        'links["intra"] += sum(',
        EVERY_COPY,
    ),
    Mutation(
        "look for peaks in one copy",
        "transition/fit.py",
        "found |= lot.everywhere(_raised(lot.dag))",
        "found |= _raised(lot.dag)",
        EVERY_COPY,
    ),
    Mutation(
        "give all copies the same names",
        "core/transition.py",
        'self.mark = f"@{there[0]}"',
        'self.mark = f"@{here[0]}"',
        EVERY_COPY,
    ),
)
