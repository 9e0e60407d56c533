"""The sizes of a model (its *spec*) and how each of its tensors is cut by TP and PP."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nereus.core.errors import SettingsError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "fp8": 1}


class Head(StrEnum):
    """What the last pp rank computes: vocabulary logits, or one scalar a token (critic, reward)."""

    LM = "lm"
    SCALAR = "scalar"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only transformer. `experts` = 0 means dense."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    tied_embeddings: bool = False
    dtype: str = "fp32"
    head: Head = Head.LM
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 131_072
    gated: bool = True
    """Whether the feed-forward block has a gate (three matrices) or not (two)."""
    expert_hidden: int = 0
    """Feed-forward width of one expert; `ffn_hidden` is that of the dense layers."""
    shared_experts: int = 0
    """Experts that every token passes, beside `experts_per_token` chosen of `experts`."""
    dense_layers: int = 0
    """Leading layers with a dense feed-forward block in a model with experts."""
    query_rank: int = 0
    kv_rank: int = 0
    """Latent attention (DeepSeek): widths of the compressed query and of the cached keys and values; 0 without."""
    rope_head_dim: int = 0
    value_head_dim: int = 0
    """Latent attention: rotary part of a head, beside `head_dim` without, and width of a value head."""
    biases: bool = False
    """Whether every projection has a bias, router and experts included; `qkv_bias` is the first three only."""
    layer_norm: bool = False
    """Whether norms take the mean away and have a bias (GPT-2) instead of scaling only."""
    post_norms: bool = False
    """Whether attention and feed-forward have a norm behind them too (Gemma)."""
    sinks: bool = False
    """Whether each head has a learnt logit that takes attention away (gpt-oss)."""
    window: int = 0
    """Tokens that most layers attend to; 0: all. Every `full_every`-th layer attends to all."""
    full_every: int = 1
    learned_positions: bool = False
    """Whether positions are rows of a table of `max_positions` (GPT-2) instead of rotations."""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "max_positions")
        for field in sizes:
            if getattr(self, field) < 1:
                raise SettingsError(f"model spec: {field} is {getattr(self, field)}, must be at least 1")
        if self.heads % self.kv_heads:
            raise SettingsError(f"model spec: {self.heads} heads are not a multiple of {self.kv_heads} kv_heads")
        if self.dtype not in DTYPE_BYTES:
            raise SettingsError(f"model spec: dtype {self.dtype!r}, valid: {', '.join(DTYPE_BYTES)}")
        if self.experts and (self.expert_hidden < 1 or not 1 <= self.experts_per_token <= self.experts):
            raise SettingsError(
                f"model spec: {self.experts} experts of width {self.expert_hidden}, {self.experts_per_token} for each "
                "token: the width must be at least 1, experts_per_token from 1 to the number of experts"
            )
        if not 0 <= self.dense_layers <= self.layers:
            raise SettingsError(f"model spec: dense_layers {self.dense_layers}, must be 0 to {self.layers}")
        if self.head is Head.SCALAR and self.tied_embeddings:
            raise SettingsError("model spec: a scalar head cannot be tied to the embeddings")


class Where(StrEnum):
    """Which pp ranks hold a tensor that belongs to no layer."""

    LAYER = "layer"
    FIRST = "first"
    LAST = "last"
    BOTH_ENDS = "both_ends"
    """First and last pp rank hold a copy each of one logical tensor (tied embeddings)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor parallelism cuts one dim of a tensor into `blocks` indivisible blocks of equal size.

    `dim` None: every tp rank holds the whole tensor. `padded`: equal chunks of ceil(blocks / tp), the last ones
    padded with zero rows (vocabulary). `replicated`: with fewer blocks than tp ranks, rank r holds block
    r * blocks // tp (KV heads). Otherwise shares are ceil/floor, larger first.
    """

    dim: int | None = None
    blocks: int = 1
    padded: bool = False
    replicated: bool = False

    def share(self, tp: int, rank: int) -> tuple[int, int]:
        """The half-open range of blocks that tp rank `rank` of `tp` owns; may be empty for padded cuts."""
        if self.dim is None:
            return (0, self.blocks)
        if self.padded:
            chunk = -(-self.blocks // tp)
            return (min(rank * chunk, self.blocks), min((rank + 1) * chunk, self.blocks))
        if self.replicated and self.blocks < tp:
            block = rank * self.blocks // tp
            return (block, block + 1)
        small, extra = divmod(self.blocks, tp)
        start = rank * small + min(rank, extra)
        return (start, start + small + (rank < extra))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor: its Hugging Face name (global layer index), global shape, and how TP and PP place it."""

    name: str
    shape: tuple[int, ...]
    where: Where
    layer: int | None = None
    cut: Cut = Cut()
    partial_gradient: bool = False
    """True for a replicated tensor whose gradient is a different partial sum on each tp rank (q/k norms)."""
    experts: int = 0
    """Routed experts stacked in dim 0, which expert parallelism cuts; 0 for every other tensor."""

    def __post_init__(self) -> None:
        if (self.where is Where.LAYER) != (self.layer is not None):
            raise SettingsError(f"tensor {self.name}: layer {self.layer} does not go with where={self.where}")
        if self.cut.dim is not None and self.shape[self.cut.dim] % self.cut.blocks:
            raise SettingsError(f"tensor {self.name}: dim of {self.shape[self.cut.dim]} in {self.cut.blocks} blocks")

    def interval(self, tp: int, rank: int) -> tuple[int, int]:
        """Half-open range of indices of `cut.dim` (dim 0 when uncut) that tp rank `rank` owns."""
        if self.cut.dim is None:
            return (0, self.shape[0] if self.shape else 1)
        block = self.shape[self.cut.dim] // self.cut.blocks
        start, stop = self.cut.share(tp, rank)
        return (start * block, stop * block)

    def local_shape(self, tp: int, rank: int, ep: int = 1) -> tuple[int, ...]:
        """Shape of the tensor as stored on tp rank `rank`, padding rows included; experts cut `ep` ways are whole."""
        if self.experts and ep > 1:
            return (-(-self.experts // ep), *self.shape[1:])
        if self.cut.dim is None:
            return self.shape
        start, stop = self.interval(tp, rank)
        length = stop - start
        if self.cut.padded:
            length = -(-self.cut.blocks // tp) * (self.shape[self.cut.dim] // self.cut.blocks)
        return (*self.shape[: self.cut.dim], length, *self.shape[self.cut.dim + 1 :])

    @property
    def elements(self) -> int:
        """Number of elements of the logical tensor."""
        product = 1
        for size in self.shape:
            product *= size
        return product
