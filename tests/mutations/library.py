"""Mutations of the library: routes between boxes, messages, hashes, agreement."""

from __future__ import annotations

from tests.mutations.harness import Mutation

LIBRARY = (
    Mutation(
        "send a rank what it holds already",
        "transition/boxes.py",
        "for lacking in [box] if own is None else box.minus(own):",
        "for lacking in [box]:",
        "tests/transition/test_boxes.py::test_each_rank_gets_what_it_lacks_once_and_nothing_else",
    ),
    Mutation(
        "let a replica of the target stay incomplete",
        "transition/boxes.py",
        "        if missing is not None:",
        "        if missing is not None and not target.replicas:",
        "tests/transition/test_boxes.py::test_each_replica_of_the_target_must_be_complete",
    ),
    Mutation(
        "hash elements without their place",
        "engine/library/digest.py",
        "mix(mix(index.reshape(-1) + _signed(seed)) ^ bits)",
        "mix(bits)",
        "tests/engine/test_library_digest.py::test_the_hash_of_a_tensor_does_not_depend_on_its_cut_and_sees_a_swap[float32]",
    ),
    Mutation(
        "put narrow elements first in a message",
        "engine/messages.py",
        "key=lambda part: -part.dtype",
        "key=lambda part: part.dtype",
        "tests/engine/test_messages.py::test_both_sides_cut_a_pair_into_the_same_messages_within_the_bundle",
    ),
    Mutation(
        "say that all is done without asking the others",
        "engine/library/execute.py",
        "    peers.agree(work.run())",
        "    work.run()",
        "tests/engine/test_library_failures.py::"
        "test_an_error_while_packing_on_one_rank_is_an_error_on_all_and_the_group_goes_on",
    ),
)
