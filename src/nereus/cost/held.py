"""Parameters that a pp rank holds, and over how many devices ZeRO could shard them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nereus.core import ModelSpec
from nereus.cost.parameters import parameters
from nereus.cost.ranks import RECENT, Ranks
from nereus.cost.rows import Bools, Floats, Ints, Rows


@dataclass(frozen=True, slots=True)
class Held:
    """Elements on the fullest tp rank of one pp rank: routed experts, all others, and the largest layer's.

    Columns, shaped as `Ranks` and `Rows` broadcast. Padding of the vocabulary and a tied head's copy are counted.
    """

    dense: Ints
    experts: Ints
    layer: Ints
    dense_replicas: Ints
    expert_replicas: Ints

    @classmethod
    @lru_cache(maxsize=RECENT)
    def of(cls, spec: ModelSpec, rows: Rows, ranks: Ranks) -> Held:
        """What `ranks` of `rows` hold."""
        part = parameters(spec, rows.tp, rows.ep)
        dense_layers, expert_layers = split_layers(spec, ranks)
        copy = -(-spec.vocab // rows.tp) * spec.hidden if spec.tied_embeddings else 0
        dense = dense_layers * part.dense_layer
        if spec.experts:
            dense = dense + expert_layers * part.outside_experts
        dense = dense + np.where(ranks.first, part.first_rank, 0)
        dense = dense + np.where(ranks.last, part.last_rank + np.where(ranks.first, 0, copy), 0)
        layer = part.dense_layer
        if spec.experts:
            routed = part.outside_experts + part.routed_experts
            layer = np.maximum((dense_layers > 0) * layer, (expert_layers > 0) * routed)
        replicas = rows.dp * rows.cp
        expert_replicas = np.where(rows.ep > 1, np.maximum(replicas * rows.tp // rows.ep, 1), replicas)
        return cls(dense, expert_layers * part.routed_experts, layer, replicas, expert_replicas)

    def elements(self, sharded: Bools) -> Floats:
        """Elements that a device holds; only its share of them where `sharded`."""
        if not sharded.any():
            return (self.dense + self.experts).astype(np.float64)
        dense: Floats = np.ceil(self.dense / np.where(sharded, self.dense_replicas, 1))
        return dense + np.ceil(self.experts / np.where(sharded, self.expert_replicas, 1))


def split_layers(spec: ModelSpec, ranks: Ranks) -> tuple[Ints, Ints]:
    """Layers of a rank without and with experts; the dense ones lead."""
    dense = ranks.dense(spec)
    return dense, ranks.layers - dense
