"""The mutations, area by area."""

from __future__ import annotations

from tests.mutations.engine import ENGINE
from tests.mutations.exchanges import EXCHANGES
from tests.mutations.folding import FOLDING
from tests.mutations.harness import Mutation
from tests.mutations.library import LIBRARY
from tests.mutations.orders import ORDERS
from tests.mutations.reading import READING
from tests.mutations.short_memory import SHORT_MEMORY

ALGORITHMS = (
    Mutation(
        "divide the loss by the local count",
        "algorithms/_losses.py",
        "surrogate = -free.minimum(clipped).sum()",
        'surrogate = -free.minimum(clipped).sum() / columns["response_mask"].sum()',
        "tests/algorithms/test_losses.py::test_gradient_is_the_same_for_any_micro_batches",
    ),
    Mutation(
        "count samples in the denominator",
        "algorithms/_base.py",
        'float(columns["response_lengths"].sum())',
        'float(len(columns["response_lengths"]))',
        "tests/algorithms/test_losses.py::test_denominator_is_the_number_of_response_tokens",
    ),
    Mutation(
        "whiten with the padding inside",
        "algorithms/_batch.py",
        "inside = values[mask]\n    return masked((values",
        "inside = values\n    return masked((values",
        "tests/algorithms/test_advantages.py::test_ppo_gives_generalised_advantages",
    ),
    Mutation(
        "pay the reward on the first token",
        "algorithms/_batch.py",
        'last = np.asarray(columns["response_lengths"]) - 1',
        'last = np.asarray(columns["response_lengths"]) * 0',
        "tests/algorithms/test_advantages.py::test_remax_subtracts_the_greedy_reward",
    ),
    Mutation(
        "pay the entropy bonus the wrong way round",
        "algorithms/_losses.py",
        "return surrogate - entropy_coefficient",
        "return surrogate + entropy_coefficient",
        "tests/algorithms/test_losses.py::test_loss_and_gradients_equal_a_loop_over_tokens",
    ),
)

TASKS = (
    Mutation(
        "skip one sample id",
        "tasks/jsonl.py",
        "divmod(index, len(self._training))",
        "divmod(index + (index > 5), len(self._training))",
        "tests/tasks/test_jsonl.py::test_every_epoch_has_each_training_row_once",
    ),
    Mutation(
        "train on a held-out digit",
        "tasks/counting.py",
        "if digit not in self.held_out_digits)",
        "if digit not in self.held_out_digits[1:])",
        "tests/tasks/test_counting.py::test_training_never_starts_from_a_held_out_digit_and_uses_every_other",
    ),
)

SHARDS = "tests/properties/test_transitions.py::test_every_shard_equals_the_oracle_and_nothing_moves_twice[0]"

TRANSITIONS = (
    Mutation(
        "swap two routes",
        "transition/flows.py",
        "        return tuple(made)\n",
        """        if len(made) > 1:
            (a, b), cut = made[:2], lambda f: (f.tensors, f.row_elements, f.start, f.stop, f.source)
            made[:2] = [Flow(*cut(a), b.target), Flow(*cut(b), a.target)]
        return tuple(made)
""",
        SHARDS,
    ),
    Mutation(
        "drop exp_avg_sq from what moves",
        "transition/routes.py",
        "for kind in (schema.dtypes if kinds is None else kinds)}",
        "for kind in (schema.dtypes if kinds is None else kinds) if kind != Kind.EXP_AVG_SQ}",
        SHARDS,
    ),
    Mutation(
        "drop exp_avg_sq from what is copied on a device",
        "transition/routes.py",
        "        for kind, dtype in schema.dtypes.items():\n            size",
        "        for kind, dtype in list(schema.dtypes.items())[:3]:\n            size",
        SHARDS,
    ),
    Mutation(
        "send the next tp rank's shard",
        "transition/flows.py",
        "positions = _positions(job.sources, known.source_base)",
        "positions = {unit.devices[unit.devices.index(device) - 1]: position for unit in job.sources "
        "for device, position in _positions([unit], known.source_base).items()}",
        SHARDS,
    ),
    Mutation(
        "free the old position before the commit",
        "engine/positions.py",
        "        self._pending[group, unit] = position\n",
        "        self._pending[group, unit] = position\n        self._release(base) if base is not None else None\n",
        "tests/engine/test_positions.py::test_abort_lets_go_of_what_is_pending_alone",
    ),
    Mutation(
        "destroy a unit before what reads it has committed",
        "engine/progress.py",
        " and groups <= self.committed",
        "",
        "tests/engine/test_executor.py::test_a_destroy_waits_for_the_commit_of_what_reads_its_unit",
    ),
    Mutation(
        "leave every node's positions where the plan names them",
        "transition/deal.py",
        "if worth[has, takes].sum() >= min(worth.max(axis=1)[has].sum(), worth.max(axis=0)[takes].sum()):",
        "if True:",
        "tests/transition/test_place.py::test_nodes_change_places_whole_when_less_moves",
    ),
    Mutation(
        "let nodes of different kinds change places",
        "transition/place.py",
        "if len(number) > 1 else None",
        "if len(number) > 2 else None",
        "tests/transition/test_place.py::test_nodes_of_different_kinds_do_not_change_places",
    ),
    Mutation(
        "deal positions by what the plan names, whatever is held",
        "transition/deal.py",
        "preferred = tables * 2",
        "preferred = tables * 0",
        "tests/paper/test_fig6.py::test_an_execution_moves_the_least_and_every_bit_arrives",
    ),
    Mutation(
        "gather on the devices that stay only in the paper's composition",
        "transition/minimum.py",
        "block.layout.size // sub.size * copy",
        "copy",
        "tests/paper/test_fig6.py::test_least_and_composed_bytes_are_the_oracles",
    ),
    Mutation(
        "let groups that lie otherwise on nodes share their flows",
        "transition/exchanges.py",
        "units), places, nodes, lacking)",
        "units), places, lacking)",
        "tests/transition/test_alike.py::test_loads_are_the_sums_of_the_moves_of_each_primitive",
    ),
    Mutation(
        "ask owners on any node",
        "transition/routes.py",
        "node_of=dag.node_of)",
        "node_of=None)",
        "tests/transition/test_alike.py::test_loads_are_the_sums_of_the_moves_of_each_primitive",
    ),
    Mutation(
        "count nobody's staging buffers",
        "transition/estimate.py",
        "with_groups(buffers, cluster)",
        "{}",
        "tests/transition/test_alike.py::test_peaks_count_staging_buffers_and_the_communication_group",
    ),
    Mutation(
        "forget how many devices are alike",
        "transition/minimum.py",
        "return common * int((table * dealt).sum())",
        "return int((table * dealt).sum())",
        "tests/transition/test_alike.py::test_the_least_bytes_by_classes_are_those_of_single_devices",
    ),
    Mutation(
        "leave positions where the plan names them unless nothing is held",
        "transition/deal.py",
        "if same and _cannot_be_better(held, overlap):",
        "if same:",
        "tests/transition/test_place.py::test_as_good_as_trying_every_order",
    ),
    Mutation(
        "take the greedy deal for the best one",
        "transition/minimum.py",
        "if _cannot_be_better(table, supply, demand, dealt):",
        "if True:",
        "tests/transition/test_alike.py::test_a_greedy_deal_is_taken_only_where_it_is_the_best",
    ),
    Mutation(
        "take kinds that are cut otherwise for one family",
        "transition/classes.py",
        "(*each.intervals.values(), *each.holders.values())",
        "(*each.holders.values(),)",
        SHARDS,
    ),
)

TRAINER = (
    Mutation(
        "skip one sample id of a job",
        "trainer/job.py",
        "ids = np.arange(self.position, self.position + work.sequences, dtype=np.int64)",
        "ids = np.arange(self.position, self.position + work.sequences, dtype=np.int64) + (self.step > 0)",
        "tests/trainer/test_job.py::test_sample_ids_are_used_once_each_and_in_order",
    ),
    Mutation(
        "divide a loss by the count of the unit's own share",
        "trainer/calls.py",
        "scale=scale, update=count",
        "scale=scale * len(rows) / len(mine), update=count",
        "tests/trainer/test_calls.py::test_every_unit_is_told_the_scale_of_the_whole_mini_batch",
    ),
    Mutation(
        "count a mini-batch only when its commit is confirmed",
        "trainer/calls.py",
        """        table.updates[call.name] = number + 1
        tickets = {}
        for unit in units:
            tickets |= self._submit(unit, Message("update.commit", {"call": call.name, "unit": unit, "update": count}))
        self._take(call, tickets, (yield tickets))
""",
        """        tickets = {}
        for unit in units:
            tickets |= self._submit(unit, Message("update.commit", {"call": call.name, "unit": unit, "update": count}))
        self._take(call, tickets, (yield tickets))
        table.updates[call.name] = number + 1
""",
        "tests/trainer/test_calls.py::test_an_update_counts_from_its_commit_on_even_if_nobody_confirms_it",
    ),
    Mutation(
        "read the moments of a checkpoint from its parameters",
        "trainer/checkpoint.py",
        'get_slice(f"{kind}/{tensor.name}")',
        "get_slice(f\"{Kind.MASTER if kind.startswith('exp') else kind}/{tensor.name}\")",
        "tests/trainer/test_checkpoint.py::test_what_one_layout_wrote_every_other_layout_reads[scalar]",
    ),
    Mutation(
        "keep the groups after a transition that stopped",
        "trainer/job.py",
        "            self._wiring.reset()\n",
        "",
        "tests/trainer/test_job.py::test_a_stopped_transition_makes_every_group_again_for_the_units_that_are_left",
    ),
)

PLANNING = TRANSITIONS + EXCHANGES + ORDERS + SHORT_MEMORY + FOLDING
MUTATIONS = ALGORITHMS + TASKS + PLANNING + ENGINE + READING + LIBRARY + TRAINER
