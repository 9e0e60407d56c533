"""AdamW by name against torch.optim, and what the layout must not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nereus.core import Kind
from nereus.trainer.config import OptimizerConfig
from nereus.trainer.decoder.optimizer import clip_scale, step

OPTIONS = OptimizerConfig(lr=0.01, weight_decay=0.1)


def state_of(params: dict[str, torch.Tensor], master: bool = False) -> dict[tuple[str, Kind], torch.Tensor]:
    state = {}
    for name, param in params.items():
        full = param.float() if master else param
        state[name, Kind.PARAM] = param.clone()
        state[name, Kind.EXP_AVG] = torch.zeros_like(full)
        state[name, Kind.EXP_AVG_SQ] = torch.zeros_like(full)
        if master:
            state[name, Kind.MASTER] = full.clone()
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_equal_torch_adamw(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    params = {"a": torch.randn(5, 7, dtype=dtype), "b": torch.randn(3, dtype=dtype)}
    state = state_of(params)
    reference = [torch.nn.Parameter(param.clone()) for param in params.values()]
    optimizer = torch.optim.AdamW(reference, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for update in range(5):
        gradients = {name: torch.randn_like(param) for name, param in params.items()}
        for parameter, gradient in zip(reference, gradients.values(), strict=True):
            parameter.grad = gradient * 0.5
        optimizer.step()
        step(state, gradients, OPTIONS, update, clip_scale=0.5)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-13
    for name, parameter in zip(params, reference, strict=True):
        torch.testing.assert_close(state[name, Kind.PARAM], parameter.detach(), rtol=0, atol=tolerance)
        torch.testing.assert_close(
            state[name, Kind.EXP_AVG], optimizer.state[parameter]["exp_avg"], rtol=0, atol=tolerance
        )


def test_masters_keep_what_half_precision_cannot_hold() -> None:
    params = {"a": torch.ones(16, dtype=torch.bfloat16)}
    state = state_of(params, master=True)
    tiny = replace(OPTIONS, lr=1e-4, weight_decay=0.0)
    for update in range(3):
        step(state, {"a": torch.ones(16)}, tiny, update)
    torch.testing.assert_close(state["a", Kind.MASTER], torch.full((16,), 1 - 3e-4), rtol=0, atol=1e-6)
    assert torch.equal(state["a", Kind.PARAM], state["a", Kind.MASTER].bfloat16())
    assert state["a", Kind.EXP_AVG].dtype is torch.float32
    for update in range(3, 60):
        step(state, {"a": torch.ones(16)}, tiny, update)
    assert (state["a", Kind.PARAM] < 1).all()


def test_an_update_of_shards_is_the_update_of_the_whole() -> None:
    torch.manual_seed(1)
    whole, gradient = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    state, shards = state_of({"a": whole}), [state_of({"a": part}) for part in whole.split(2)]
    for update in (0, 1, 2):
        step(state, {"a": gradient.clone()}, OPTIONS, update)
        for shard, part in zip(shards, gradient.split(2), strict=True):
            step(shard, {"a": part.clone()}, OPTIONS, update)
    joined = torch.cat([shard["a", Kind.PARAM] for shard in shards])
    torch.testing.assert_close(joined, state["a", Kind.PARAM], rtol=1e-14, atol=1e-15)


def test_clip_scale_bounds_the_norm() -> None:
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(9.0, None) == 1.0
