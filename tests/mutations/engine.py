"""Mutations of the engine: how a transition is carried out, and what is left when it stops."""

from __future__ import annotations

from tests.mutations.harness import Mutation

FAULTS = "tests/engine/test_faults.py::"

ENGINE = (
    Mutation(
        "leave the old position behind when the new unit is let go of",
        "engine/positions.py",
        "        if replaced is not None:\n            self._old",
        "        if False:\n            self._old",
        FAULTS + "test_a_peer_killed_at_any_step_leaves_whole_units_and_nobody_waits[commit]",
    ),
    Mutation(
        "merge replicas that nobody compared",
        "engine/executor.py",
        "            if units:\n                found[model_stage]",
        "            if units and self._verify:\n                found[model_stage]",
        FAULTS + "test_replicas_that_differ_are_named_before_a_merge",
    ),
    Mutation(
        "take the hash of before for that of after",
        "engine/executor.py",
        "            after = self._digests(model_stage, dag.goal.of(model_stage))",
        "            after = wanted",
        FAULTS + "test_a_tensor_changed_on_the_way_has_another_hash",
    ),
    Mutation(
        "go on counting on the device what lies in host memory",
        "engine/positions.py",
        "        self._settle(position, made, self.host)",
        "        self._settle(position, made, self._ledger)",
        FAULTS + "test_units_that_swap_full_devices_go_through_host_memory",
    ),
    Mutation(
        "leave in host memory what a stopped transition put there",
        "engine/apply.py",
        '{"staged": self._worker.positions.restore()}',
        '{"staged": ()}',
        FAULTS + "test_what_lies_in_host_memory_comes_back_when_the_transition_stops",
    ),
    Mutation(
        "let a device that does not answer live on",
        "engine/crew.py",
        "        for device in owing:\n            self._lose(",
        "        for device in ():\n            self._lose(",
        FAULTS + "test_a_peer_that_stops_is_ended_at_its_one_deadline_and_is_the_one_to_be_blamed[receive, Merge]",
    ),
    Mutation(
        "leave padding as it was allocated",
        "engine/positions.py",
        ".narrow(shard.dim, owned, shard.shape[shard.dim] - owned).zero_()",
        ".narrow(shard.dim, owned, shard.shape[shard.dim] - owned).fill_(1)",
        "tests/engine/test_bug_reports.py",
    ),
    Mutation(
        "one queue for both directions of a pair",
        "engine/groups.py",
        "or self._batching or source < target else self._down",
        "or self._batching or source != target else self._down",
        "tests/engine/test_groups.py::test_both_directions_of_a_pair_have_a_queue_each_where_there_are_two",
    ),
    Mutation(
        "wait for a stopped device again after its deadline",
        "engine/executor.py",
        "progress.allowed_s, progress.passed_s)",
        "progress.allowed_s)",
        "tests/engine/test_deadlines.py",
    ),
    Mutation(
        "give a synchronisation the time of any command",
        "trainer/weights.py",
        "/ SLOWEST_BYTES_PER_S",
        "* 0.0",
        "tests/engine/test_deadlines.py::test_a_synchronisation_may_take_longer_for_more_bytes",
    ),
    Mutation(
        "pass parts on to every receiver, whichever node it is on",
        "transition/relays.py",
        "found.setdefault(_node(device, node_of), [])",
        "found.setdefault(None, [])",
        "tests/transition/test_relays.py::test_nothing_enters_a_node_twice_nor_where_it_is_already",
    ),
    Mutation(
        "synchronise weights after all updates",
        "trainer/job.py",
        "for call in updates if call.model_stage == source) - table.done",
        "for call in updates) - table.done",
        "tests/trainer/test_weights.py::test_a_device_that_takes_no_part_goes_on_with_other_work",
    ),
)
