"""Mutations of the order of a transition: forwarding, memory, staging, the bound, the search."""

from __future__ import annotations

from tests.mutations.harness import Mutation

TESTS = "tests/transition/test_order.py::"
TREE = TESTS + "test_new_replicas_forward_in_a_doubling_tree[8]"
SWAP = TESTS + "test_only_copies_that_have_to_swap_full_devices_go_through_host_memory"
EVERY_ORDER = TESTS + "test_every_order_that_the_edges_allow_fits_and_keeps_a_copy"
BRUTE_FORCE = TESTS + "test_a_target_is_infeasible_only_if_no_order_exists_and_then_staging_leads_there"
OPTIMAL = "tests/transition/test_optimal.py::test_the_shortest_order_is_between_the_bound_and_ours"
RULES = "tests/transition/test_shortest.py::test_each_try_leads_to_a_shortest_order_that_no_other_finds"

ORDERS = (
    Mutation(
        "never read what was built in this transition",
        "transition/run.py",
        "part.free((*sources, *made))",
        "part.free(sources)",
        TREE,
    ),
    Mutation(
        "forward before the commit",
        "transition/schedule.py",
        "        yield from (Edge(last[maker][-1].id, each.id, EdgeKind.STATE) for each in steps)\n",
        "        pass\n",
        TESTS + "test_a_forwarded_copy_waits_for_the_commit_of_the_group_that_makes_it",
    ),
    Mutation(
        "skip rules that make a difference",
        "transition/schedule.py",
        "rule.like(done, minds)",
        "True",
        "tests/transition/test_shortest.py::test_no_rule_that_is_skipped_and_no_order_that_is_given_up_is_shorter",
    ),
    Mutation(
        "try rules that seldom help whatever it takes",
        "transition/schedule.py",
        "<= saved * (limit - enough)",
        "<= 0.5 * (limit - enough)",
        "tests/transition/test_tries.py::test_rules_that_seldom_help_are_left_out_where_there_is_an_order",
    ),
    Mutation(
        "give up every order but the first",
        "transition/run.py",
        "self.late |= end >= self._limit_bytes",
        "self.late |= end < self._limit_bytes < inf",
        "tests/transition/test_shortest.py::test_no_rule_that_is_skipped_and_no_order_that_is_given_up_is_shorter",
    ),
    Mutation(
        "serve one small unit after another from a large one",
        "transition/run.py",
        "share = sum([len(holder.unit.devices) for holder in sources]) // len(build.acquires) - 1",
        "share = 0",
        TESTS + "test_a_large_unit_serves_several_small_ones_at_once",
    ),
    Mutation(
        "cross a slow link for every copy",
        "transition/holders.py",
        "return now < end and end + build.received_bytes < now + self.site.far * build.received_bytes",
        "return False",
        TESTS + "test_one_copy_crosses_a_slow_link_and_the_others_are_made_from_it",
    ),
    Mutation(
        "free the devices of a staged unit twice",
        "transition/leaving.py",
        "        if holder.offloaded:\n            return {}\n",
        "",
        SWAP,
    ),
    Mutation(
        "take over storage that was staged",
        "engine/transports/memory.py",
        "if source is None or staged else",
        "if source is None else",
        BRUTE_FORCE,
    ),
    Mutation(
        "stage whatever the host has",
        "transition/search.py",
        "return all(size >= 0 for size in left.values())",
        "return True",
        TESTS + "test_without_enough_host_memory_the_swap_is_refused_with_the_reason",
    ),
    Mutation(
        "acquire before the releases that make room",
        "transition/room.py",
        "                        step.wait_for(releaser, device)\n",
        "                        pass\n",
        EVERY_ORDER,
    ),
    Mutation(
        "destroy a unit before those that read it have committed",
        "transition/schedule.py",
        "    for build in reading:\n",
        "    for build in ():\n",
        EVERY_ORDER,
    ),
    Mutation(
        "give up where the greedy order ends",
        "transition/search.py",
        "        for strict in (False, True):",
        "        for strict in ():",
        BRUTE_FORCE,
    ),
    Mutation(
        "leave no room for buffers",
        "transition/room.py",
        "device: capacity[device] - buffer_bytes",
        "device: capacity[device]",
        TESTS + "test_buffers_for_receiving_count_and_are_free_afterwards",
    ),
    Mutation(
        "bound the span by one round too many",
        "transition/doubling.py",
        "return making.round_bytes * found",
        "return making.round_bytes * (found + 1)",
        BRUTE_FORCE,
    ),
    Mutation(
        "let units go that cost most to lose",
        "transition/leaving.py",
        "-self._loss(holder) / gain",
        "self._loss(holder) / gain",
        RULES,
    ),
    Mutation(
        "put all devices without a node on one",
        "transition/nodes.py",
        "node_of.get(device, -1 - device)",
        "node_of.get(device, -1)",
        TESTS + "test_a_device_without_a_node_is_alone_on_its_own",
    ),
    Mutation(
        "let units leave though groups may still lose what they read",
        "transition/leaving.py",
        "(not (part.open or part.risky) or self._may_leave",
        "(not part.open or self._may_leave",
        RULES,
    ),
    Mutation(
        "read units first whose room could be needed",
        "transition/holders.py",
        "idle = self._crowded if holder.crowded else",
        "idle =",
        RULES,
    ),
    Mutation(
        "let no unit leave while a group runs",
        "transition/leaving.py",
        "return self._run.rule.early and self.give_up_sources()",
        "return False",
        RULES,
    ),
    Mutation(
        "read new units after those of the start always",
        "transition/holders.py",
        "(self._new, self._old, self._crowded) if fresh else",
        "",
        RULES,
    ),
    Mutation(
        "let no small unit feed a large one in the bound",
        "transition/occupancy.py",
        "    for count in range(1, size):",
        "    for count in ():",
        TESTS + "test_no_bound_is_above_replicas_that_are_all_made_at_once",
    ),
    Mutation(
        "bound by the unit that is waited for longest",
        "transition/releasing.py",
        "min(after.get(unit, 0) for",
        "max(after.get(unit, 0) for",
        OPTIMAL,
    ),
    Mutation(
        "forget what is lost with a unit that leaves",
        "transition/decompose.py",
        "        build.price(self.pricing)\n        senders",
        "        senders",
        TESTS + "test_what_left_before_it_could_be_read_is_received_in_full",
    ),
    Mutation(
        "keep a group together whatever its sources have to send",
        "transition/decompose.py",
        "        return self._apart(build)\n",
        "        return []\n",
        TESTS + "test_a_group_falls_apart_where_what_it_still_reads_would_send_for_longer_than_it_receives",
    ),
    Mutation(
        "read nothing that a known way does not tell of",
        "transition/lead.py",
        "if there and not any(there):",
        "if not any(there):",
        TESTS + "test_a_lead_leaves_units_to_be_read_where_it_builds_nothing",
    ),
    Mutation(
        "copy whole goal units in the paper's composition",
        "transition/composed.py",
        "    return [*kept, *pieces], [*kept, *parts], [*kept, *goal]",
        "    return [*kept, *pieces], [*kept, *goal], [*kept, *goal]",
        "tests/transition/test_composed.py::test_split_gathers_copies_and_merge_moves_nothing",
    ),
)
