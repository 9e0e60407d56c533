"""Mutations of how a rank reads its peer's memory, and of work beside other work on a device."""

from __future__ import annotations

from tests.mutations.harness import Mutation

ATTACH, SIDE = "tests/engine/test_attach.py::", "tests/engine/test_side_stream.py::"
REMOTE, EXECUTOR = "tests/engine/test_remote.py::", "tests/engine/test_executor.py::"

READING = (
    Mutation(
        "trust the number of a process",
        "engine/transports/attach.py",
        "        if self._seen.tobytes() != self._mark:",
        "        if False:",
        ATTACH + "test_another_process_is_read_until_it_ends_and_never_one_that_has_its_pid",
    ),
    Mutation(
        "read processes of another host or namespace",
        "engine/transports/attach.py",
        "    return any(first[0]) and first == second",
        "    return any(first[0])",
        ATTACH + "test_a_card_of_another_host_or_process_is_refused",
    ),
    Mutation(
        "take a short read for a whole one",
        "engine/transports/attach.py",
        "        if got != wanted:",
        "        if False:",
        ATTACH + "test_a_short_read_is_no_neighbour_and_an_error_later",
    ),
    Mutation(
        "wait for a device without a deadline",
        "engine/side_stream.py",
        "        if left_s() <= 0:",
        "        if left_s() <= 0 and done.query():",
        SIDE + "test_work_that_does_not_end_is_an_error_at_the_deadline",
    ),
    Mutation(
        "let go of memory that a kernel may still write",
        "engine/side_stream.py",
        "            tensor.record_stream(stream)",
        "            pass",
        SIDE + "test_memory_is_kept_where_the_work_fails_and_nobody_waits_for_the_device",
    ),
    Mutation(
        "read a position that is of another unit than was thought",
        "engine/positions.py",
        "if tensor is None or self.held.get(name) != shard:",
        "if tensor is None:",
        REMOTE + "test_tensors_that_do_not_lie_as_their_shards_say_are_not_shown",
    ),
    Mutation(
        "read from the start of a shard, wherever a part begins",
        "engine/remote.py",
        "(box.start - shard.start) * strides[box.dim]",
        "box.start * 0 * strides[box.dim]",
        REMOTE + "test_parts_arrive_where_they_belong_and_nothing_else_changes",
    ),
    Mutation(
        "let go of a source before all have said that they committed",
        "engine/progress.py",
        "if self.telling and isinstance(primitive, Destroy):",
        "if False:",
        EXECUTOR + "test_a_destroy_waits_until_all_have_said_that_they_committed",
    ),
    Mutation(
        "leave a batch open that has failed",
        "engine/groups.py",
        "                live._end_coalescing(*where)\n            raise",
        "                pass\n            raise",
        SIDE + "test_a_batch_that_fails_is_ended_all_the_same",
    ),
)
