"""The mutations, area by area."""

from __future__ import annotations

from tests.mutations.harness import Mutation

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

MUTATIONS = ALGORITHMS + TASKS
