"""Tiny random transformers models, and log-probs, entropies, values and gradients computed with them alone.

Sequences go through the model one by one without padding, so that nothing is shared with the code under test.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from nereus.core import Head, Layout, ModelSpec, TensorSpec, plugins
from nereus.core.ports import Family
from nereus.trainer.decoder.batch import MicroBatch

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 37,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-rope3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama-thirds": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}),
}
_TORCH_NAMES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def build(name: str, dtype: str = "fp32", head: Head = Head.LM) -> tuple[Any, Family, ModelSpec]:
    """A random model in evaluation mode, its family and its spec."""
    family_name, changes = MODELS[name]
    config = AutoConfig.for_model(family_name, **{**SIZES, **changes, "num_labels": 1})
    torch.manual_seed(7)
    kind = AutoModelForCausalLM if head is Head.LM else AutoModelForSequenceClassification
    model = kind.from_config(config, attn_implementation="sdpa").to(_TORCH_NAMES[dtype]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.3
            parameter.copy_(1 + noise if parameter.dim() == 1 and parameter.mean() > 0.5 else noise)
    if dtype == "fp64":
        _without_fp32_casts(model)
    family: Family = plugins.make("nereus.families", family_name, {})
    spec = replace(family.spec(config.to_dict()), dtype=dtype, head=head)
    return model, family, spec


def full_state(model: Any, tensors: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
    """The model's tensors by logical name."""
    state = model.state_dict()
    return {tensor.name: state[tensor.name].detach() for tensor in tensors}


def cut(
    full: Mapping[str, torch.Tensor],
    tensors: tuple[TensorSpec, ...],
    layout: Layout,
    pp_rank: int,
    tp_rank: int,
    layers: int,
) -> dict[str, torch.Tensor]:
    """The local tensors of a position, written without the loader."""
    found = {}
    for tensor in tensors:
        if layout.holds(tensor, pp_rank, layers):
            local = full[tensor.name]
            if tensor.cut.dim is not None:
                start, stop = tensor.interval(layout.tp, tp_rank)
                local = local.narrow(tensor.cut.dim, start, stop - start)
                missing = tensor.local_shape(layout.tp, tp_rank)[tensor.cut.dim] - local.shape[tensor.cut.dim]
                if missing:
                    local = torch.cat([local, local.new_zeros(missing, *local.shape[1:])])
            found[tensor.name] = local.clone(memory_format=torch.contiguous_format)
    return found


def batches(vocab: int, sizes: tuple[int, ...] = (2, 3, 1), dtype: torch.dtype = torch.float32) -> list[MicroBatch]:
    """Micro-batches of different widths with unequal prompts and responses; `weight` is a column of the loss."""
    generator = torch.Generator().manual_seed(3)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    made = []
    for index, size in enumerate(sizes):
        prompts, responses = integers(1, 6, size), integers(1, 6 + 2 * index, size)
        tokens = torch.zeros(size, int((prompts + responses).max()), dtype=torch.int64)
        for row in range(size):
            tokens[row, : prompts[row] + responses[row]] = integers(0, vocab, int(prompts[row] + responses[row]))
        weight = torch.randn(size, int(responses.max()), generator=generator, dtype=torch.float64).to(dtype)
        made.append(MicroBatch(tokens, prompts, responses, {"weight": weight}))
    return made


def outputs(
    model: Any, batch: MicroBatch, temperature: float = 1.0, masked: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """log_probs and entropy, or values and scores, of a micro-batch from the transformers model."""
    found: dict[str, list[torch.Tensor]] = {}
    for row in range(len(batch.tokens)):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        tokens = batch.tokens[row : row + 1, : prompt + response]
        places = slice(prompt - 1, prompt + response - 1)
        if hasattr(model, "score"):
            values = model.score(model.model(tokens).last_hidden_state)[0, :, 0]
            _collect(found, values=_padded(values[places], batch.response_width), scores=values[-1])
            continue
        logits = model(tokens).logits[0, places] / temperature
        logits = logits.index_fill(1, torch.tensor(masked, dtype=torch.int64), float("-inf"))
        log_p = logits.log_softmax(-1)
        picked = log_p.gather(1, tokens[0, prompt:].unsqueeze(1)).squeeze(1)
        entropy = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0)).sum(-1)
        width = batch.response_width
        _collect(found, log_probs=_padded(picked, width), entropy=_padded(entropy, width))
    return {name: torch.stack(rows) for name, rows in found.items()}


def gradients(
    model: Any, micro_batches: list[MicroBatch], loss: Callable[..., Any], scale: float
) -> dict[str, torch.Tensor]:
    """The gradient of scale × the summed loss by parameter name."""
    model.zero_grad()
    for batch in micro_batches:
        (loss(outputs(model, batch), batch)[0] * scale).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _collect(found: dict[str, list[torch.Tensor]], **rows: torch.Tensor) -> None:
    for name, row in rows.items():
        found.setdefault(name, []).append(row)


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(width - len(values))])


def _without_fp32_casts(model: Any) -> None:
    """transformers computes norms and rotary tables in fp32 whatever the model's dtype; here in fp64."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return result

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size, theta = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = types.MethodType(rotary, module)
