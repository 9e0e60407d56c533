"""The part of a decoder that one position holds, on plain local tensors.

A layout change builds a new `Decoder` around the new tensors; nothing is wrapped or registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nereus.core import Head, Layout, ModelSpec, NereusError, TensorSpec
from nereus.families import EMBED, LM_HEAD, NORM, SCORE
from nereus.trainer.decoder.parallel import Axis, Hooks, UnitGroups, enter, leave
from nereus.trainer.decoder.rope import RotaryTable, rotate
from nereus.trainer.decoder.vocabulary import HeadContext, VocabularyShard, embed, log_probs

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries [b, heads, L, d], keys, values [b, kv_heads, L, d]) to the attended values, shaped as the queries."""


class _Layer(NamedTuple):
    """The local tensors of one layer; None where the family has none."""

    input_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, params: Mapping[str, torch.Tensor], index: int) -> _Layer:
        """Layer `index` (global) out of all local tensors."""

        def take(name: str) -> torch.Tensor:
            return params[f"model.layers.{index}.{name}"]

        def maybe(name: str) -> torch.Tensor | None:
            return params.get(f"model.layers.{index}.self_attn.{name}")

        return cls(
            input_norm=take("input_layernorm.weight"),
            q=take("self_attn.q_proj.weight"),
            k=take("self_attn.k_proj.weight"),
            v=take("self_attn.v_proj.weight"),
            o=take("self_attn.o_proj.weight"),
            q_bias=maybe("q_proj.bias"),
            k_bias=maybe("k_proj.bias"),
            v_bias=maybe("v_proj.bias"),
            q_norm=maybe("q_norm.weight"),
            k_norm=maybe("k_norm.weight"),
            mlp_norm=take("post_attention_layernorm.weight"),
            gate=take("mlp.gate_proj.weight"),
            up=take("mlp.up_proj.weight"),
            down=take("mlp.down_proj.weight"),
        )


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention within the sequences; right padding needs no mask."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Decoder:
    """Position (pp_rank, tp_rank) of a unit. `temperature` and `masked_tokens` shape every log-prob it computes."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Sequence[TensorSpec],
        layout: Layout,
        pp_rank: int,
        tp_rank: int,
        params: Mapping[str, torch.Tensor],
        groups: UnitGroups,
        recompute: str = "none",
        hooks: Hooks = Hooks(),  # noqa: B008 -- frozen
        *,
        temperature: float = 1.0,
        masked_tokens: Sequence[int] = (),
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.pp_rank, self.tp_rank = pp_rank, tp_rank
        self.tensors = {t.name: t for t in tensors if layout.holds(t, pp_rank, spec.layers)}
        self.params = params
        self.hooks = hooks
        self.tp = Axis("tp", groups.tp, hooks)
        self.pp = Axis("pp", groups.pp, hooks)
        self.recompute = recompute
        self._check()
        self.first, self.last = pp_rank == 0, pp_rank == layout.pp - 1
        self.layers = [_Layer.of(params, index) for index in layout.layers_of(pp_rank, spec.layers)]
        self.dtype = DTYPES[spec.dtype]
        self.wide = torch.promote_types(torch.float32, self.dtype)
        self.device = next(iter(params.values())).device if params else torch.device("cpu")
        self.rotary = RotaryTable(spec, self.wide, self.device)
        self.heads, self.kv_heads = spec.heads // layout.tp, max(1, spec.kv_heads // layout.tp)
        self.table = EMBED if spec.tied_embeddings else LM_HEAD
        table = next(t for t in tensors if t.name == EMBED)
        self.shard = VocabularyShard.of(table, layout.tp, tp_rank)
        blocked = self.shard.blocked(masked_tokens, self.device)
        self._head = HeadContext(self.shard, blocked, temperature, self.wide, self.tp, hooks)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states of tokens [b, L]; first pp rank only."""
        return embed(tokens, self.params[EMBED], self.shard, self.tp)

    def blocks(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attends: Sequence[Attend] | None = None
    ) -> torch.Tensor:
        """Run the layers of this pp rank; `attends` replaces causal attention, one for each layer."""
        again = self.recompute == "full" and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            attend = attends[index] if attends else causal
            if again:
                # Reentrant, so that saved-tensor hooks around the update see the recomputed layer too.
                x = checkpoint(self._block, x, layer, cos, sin, attend, use_reentrant=True, preserve_rng_state=False)
            else:
                x = self._block(x, layer, cos, sin, attend)
        return x

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm; last pp rank only."""
        return self._norm(x, self.params[NORM])

    def log_probs(
        self, normed: torch.Tensor, targets: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs (and entropies) of targets [n] given normed hidden states [n, hidden]; last pp rank only."""
        return log_probs(normed, self.params[self.table], targets, self._head, with_entropy)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """This tp rank's logits [n, local vocabulary rows], padding rows included; last pp rank only."""
        return functional.linear(normed, self.params[self.table])

    def scalars(self, normed: torch.Tensor) -> torch.Tensor:
        """The scalar head's value of normed hidden states [n, hidden]; last pp rank only."""
        if self.spec.head is not Head.SCALAR:
            raise NereusError("values and scores need a model with a scalar head, this one has a language-model head")
        return functional.linear(normed, self.params[SCORE]).squeeze(-1).to(self.wide)

    def _block(
        self, x: torch.Tensor, layer: _Layer, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        h = enter(self._norm(x, layer.input_norm), self.tp)
        q = functional.linear(h, layer.q, layer.q_bias).view(batch, length, self.heads, -1)
        k = functional.linear(h, layer.k, layer.k_bias).view(batch, length, self.kv_heads, -1)
        v = functional.linear(h, layer.v, layer.v_bias).view(batch, length, self.kv_heads, -1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + leave(functional.linear(mixed.transpose(1, 2).reshape(batch, length, -1), layer.o), self.tp)
        h = enter(self._norm(x, layer.mlp_norm), self.tp)
        h = functional.silu(functional.linear(h, layer.gate)) * functional.linear(h, layer.up)
        return x + leave(functional.linear(h, layer.down), self.tp)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.wide:
            return functional.rms_norm(x, weight.shape, weight, self.spec.norm_eps)
        wide = functional.rms_norm(x.to(self.wide), weight.shape, weight.to(self.wide), self.spec.norm_eps)
        return wide.to(x.dtype)

    def _check(self) -> None:
        """The tensors must be exactly those of the position, and the groups those of the layout."""
        where = f"decoder position (pp {self.pp_rank}, tp {self.tp_rank}) of {self.layout}"
        if set(self.params) != set(self.tensors):
            raise NereusError(f"{where}: tensors differ from the layout's: {set(self.params) ^ set(self.tensors)}")
        for name, tensor in self.tensors.items():
            expected = tensor.local_shape(self.layout.tp, self.tp_rank)
            if tuple(self.params[name].shape) != expected:
                raise NereusError(f"{where}: {name} has shape {tuple(self.params[name].shape)}, needs {expected}")
        found = (self.tp.size, self.pp.size, self.tp.rank, self.pp.rank)
        wanted = (self.layout.tp, self.layout.pp, self.tp_rank, self.pp_rank)
        if found != wanted:
            raise NereusError(f"{where}: (tp, pp, tp rank, pp rank) of the groups is {found}, needs {wanted}")
        if self.recompute not in ("none", "full"):
            raise NereusError(f"{where}: recompute {self.recompute!r}, valid: none, full")
