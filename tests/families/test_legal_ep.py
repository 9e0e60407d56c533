"""Which degrees may cut a model by experts: one rule, one message."""

from __future__ import annotations

import pytest

from nereus.families import expert_fault, legal_ep
from nereus.families.models import named


@pytest.mark.parametrize(
    ("ranks", "valid"), [(1, (1,)), (4, (1, 2, 4)), (12, (1, 2, 4)), (256, (1, 2, 4, 8, 16, 32, 64, 128))]
)
def test_degrees_divide_the_ranks_and_the_experts(ranks: int, valid: tuple[int, ...]) -> None:
    assert legal_ep(named("Qwen3-30B-A3B"), ranks) == valid


def test_tensor_parallel_ranks_count_as_expert_ranks() -> None:
    assert expert_fault(named("Qwen3-30B-A3B"), ep=4, dp=1, cp=1, tp=4) is None


@pytest.mark.parametrize(
    ("model", "ep", "ranks", "message"),
    [
        ("Qwen3-30B-A3B", 48, (24, 2, 4), "ep 48 must divide dp * cp * tp = 24 * 2 * 4 = 192 and the 128 experts"),
        ("Qwen3-30B-A3B", 8, (1, 1, 4), "= 4 and the 128 experts: valid EP 1, 2, 4"),
        ("Mixtral-8x7B", 16, (16, 1, 1), "and the 8 experts: valid EP 1, 2, 4, 8"),
        ("Qwen3-8B", 2, (2, 1, 1), "ep 2, but qwen3 has no experts: valid EP 1"),
    ],
)
def test_a_degree_that_does_not_go_is_refused_with_the_valid_ones(
    model: str, ep: int, ranks: tuple[int, int, int], message: str
) -> None:
    dp, cp, tp = ranks
    assert message in str(expert_fault(named(model), ep, dp, cp, tp))


def test_a_dense_model_has_one_degree() -> None:
    assert legal_ep(named("Qwen3-8B"), 8) == (1,)
