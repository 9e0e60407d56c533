"""Clipped losses against a loop over tokens; sums that can be split into any micro-batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from nereus.algorithms.grpo import Grpo
from nereus.algorithms.ppo import Ppo
from nereus.algorithms.remax import Remax
from nereus.core import SettingsError
from tests.algorithms import oracle

OPTIONS: dict[str, Any] = {"clip": 0.15, "entropy_coefficient": 0.02, "kl_coefficient": 0.3}
UPDATES = (
    (Ppo(**OPTIONS, value_clip=0.15), "update_actor"),
    (Ppo(**OPTIONS, value_clip=0.15), "update_critic"),
    (Grpo(**OPTIONS), "update_actor"),
    (Remax(**OPTIONS), "update_actor"),
)
each_update = pytest.mark.parametrize(("algorithm", "call"), UPDATES, ids=lambda x: x if isinstance(x, str) else x.name)


def step(algorithm: Any, seed: int, lengths: Any = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Columns of a step with its advantages, and outputs near the old ones, as fp64 tensors that want gradients."""
    c = oracle.columns(seed, samples=8, width=40 if lengths else 7)
    if lengths:
        c["response_lengths"] = np.array(lengths)
    c |= {name: value for name, value in algorithm.advantages(c).items() if not name.startswith("stat/")}
    random = np.random.default_rng(seed + 1)
    near = {"log_probs": "old_log_probs", "entropy": "old_log_probs", "values": "values"}
    outputs = {
        name: torch.tensor(c[old] + 0.2 * random.normal(size=c[old].shape), requires_grad=True)
        for name, old in near.items()
    }
    return c, outputs


def tensors(c: Any, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    mask = np.arange(c["response_tokens"].shape[1])[None, :] < c["response_lengths"][:, None]
    return {name: torch.as_tensor(value[rows]) for name, value in (c | {"response_mask": mask}).items()}


def gradients(loss: Any, outputs: Any) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
    return [torch.zeros_like(o) if g is None else g for g, o in zip(found, outputs.values(), strict=True)]


@each_update
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradients_equal_a_loop_over_tokens(algorithm: Any, call: str, seed: int) -> None:
    c, outputs = step(algorithm, seed)
    loss, _ = algorithm.loss(call, outputs, tensors(c))
    kl = 0.3 if isinstance(algorithm, Grpo) else 0.0
    expected = sum(oracle.token_losses(call, outputs, c, 0.15, 0.02, kl))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(gradients(loss, outputs), gradients(expected, outputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@each_update
@pytest.mark.parametrize("cuts", [(4,), (1, 2, 3, 4, 5, 6, 7), (1, 6), (3, 5)])
def test_gradient_is_the_same_for_any_micro_batches(algorithm: Any, call: str, cuts: tuple[int, ...]) -> None:
    c, outputs = step(algorithm, 3, lengths=(3, 17, 5, 40, 1, 2, 30, 9))
    denominator = algorithm.denominator(call, c)
    whole = gradients(algorithm.loss(call, outputs, tensors(c))[0] / denominator, outputs)
    parts = [torch.zeros_like(g) for g in whole]
    for start, stop in itertools.pairwise((0, *cuts, 8)):
        rows = slice(start, stop)
        width = int(c["response_lengths"][rows].max())
        narrow = {k: v[:, :width] if v.ndim == 2 else v for k, v in tensors(c, rows).items()}
        cut = {name: value[rows, :width] for name, value in outputs.items()}
        share = algorithm.loss(call, cut, narrow)[0] / denominator
        parts = [total + g for total, g in zip(parts, gradients(share, outputs), strict=True)]
    for found, wanted in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@each_update
def test_denominator_is_the_number_of_response_tokens(algorithm: Any, call: str) -> None:
    c, _ = step(algorithm, 3, lengths=(3, 17, 5, 40, 1, 2, 30, 9))
    assert algorithm.denominator(call, c) == 107.0


@each_update
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_whatever_stands_in_the_padding_changes_nothing(algorithm: Any, call: str, junk: float) -> None:
    c, outputs = step(algorithm, 4)
    clean, sums = algorithm.loss(call, outputs, tensors(c))
    outside = np.arange(7)[None, :] >= c["response_lengths"][:, None]
    dirty_columns = {
        k: np.where(outside, junk, v) if v.dtype == np.float64 and v.ndim == 2 else v for k, v in c.items()
    }
    dirty_outputs = {
        name: value.detach().masked_fill(torch.tensor(outside), junk).requires_grad_()
        for name, value in outputs.items()
    }
    dirty, dirty_sums = algorithm.loss(call, dirty_outputs, tensors(dirty_columns))
    assert dirty == clean
    assert dirty_sums == sums
    for found, wanted in zip(gradients(dirty, dirty_outputs), gradients(clean, outputs), strict=True):
        assert torch.equal(found, wanted)


def test_policy_sums_count_clipped_tokens_and_the_distance_from_the_old_policy() -> None:
    columns = {
        "response_mask": torch.tensor([[True, True, True, False]]),
        "old_log_probs": torch.zeros(1, 4, dtype=torch.float64),
        "advantages": torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float64),
    }
    ratios = torch.tensor([[1.5, 1.5, 1.1, 9.0]], dtype=torch.float64)
    outputs = {"log_probs": ratios.log(), "entropy": torch.tensor([[0.5, 0.25, 0.125, 7.0]], dtype=torch.float64)}
    loss, sums = Ppo(clip=0.2).loss("update_actor", outputs, columns)
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 1.1))
    assert sums["pg_clipfrac"] == 1
    assert sums["entropy"].item() == 0.875
    assert sums["ppo_kl"].item() == pytest.approx(-(ratios[0, :3].log().sum().item()))


@each_update
def test_reported_sums_carry_no_graph(algorithm: Any, call: str) -> None:
    c, outputs = step(algorithm, 2)
    _, sums = algorithm.loss(call, outputs, tensors(c))
    assert sums
    assert not any(value.requires_grad for value in sums.values())


def test_a_call_without_a_loss_is_refused() -> None:
    with pytest.raises(SettingsError, match="values"):
        Grpo().loss("values", {}, {})
