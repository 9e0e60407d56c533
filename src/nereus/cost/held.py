"""Parameters that a pp rank holds, and over how many devices ZeRO could shard them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nereus.core import ModelSpec
from nereus.cost.parameters import parameters
from nereus.cost.ranks import RECENT, Ranks
from nereus.cost.rows import Bools, Floats, Ints, Rows, distinct


@dataclass(frozen=True, slots=True)
class Held:
    """Elements on the fullest tp rank of one pp rank: routed experts, all others, and the largest layer's.

    Columns, shaped as `Ranks` and `Rows` broadcast. Padding of the vocabulary and a tied head's copy are counted.
    """

    dense: Floats
    experts: Floats
    layer: Floats
    dense_replicas: Ints
    expert_replicas: Ints

    @classmethod
    @lru_cache(maxsize=RECENT)
    def of(cls, spec: ModelSpec, rows: Rows, ranks: Ranks) -> Held:
        """What `ranks` of `rows` hold."""
        few, where = _cuts(rows)
        part = parameters(spec, rows.tp[few], rows.ep[few])

        def column(elements: Ints) -> Floats:
            return np.asarray(elements.astype(np.float64)[where])

        dense_layers, expert_layers = split_layers(spec, ranks)
        layer, replicas = column(part.dense_layer), rows.dp * rows.cp
        dense = dense_layers * layer + np.where(ranks.first, column(part.first_rank), 0.0)
        dense = dense + np.where(ranks.last, column(part.last_rank), 0.0)
        if spec.tied_embeddings:
            copy = column(-(-spec.vocab // rows.tp[few]) * spec.hidden)
            dense = dense + np.where(ranks.last & ~ranks.first, copy, 0.0)
        if not spec.experts:
            return cls(dense, np.zeros_like(dense), layer, replicas, replicas)
        outside, routed = column(part.outside_experts), column(part.routed_experts)
        dense = dense + expert_layers * outside
        layer = np.maximum((dense_layers > 0) * layer, (expert_layers > 0) * (outside + routed))
        expert_replicas = np.where(rows.ep > 1, np.maximum(replicas * rows.tp // rows.ep, 1), replicas)
        return cls(dense, expert_layers * routed, layer, replicas, expert_replicas)

    def elements(self, sharded: Bools) -> Floats:
        """Elements that a device holds; only its share of them where `sharded`."""
        if not sharded.any():
            return self.dense + self.experts
        dense: Floats = np.ceil(self.dense / np.where(sharded, self.dense_replicas, 1))
        if not self.experts.any():
            return dense
        return dense + np.ceil(self.experts / np.where(sharded, self.expert_replicas, 1))


@lru_cache(maxsize=RECENT)
def _cuts(rows: Rows) -> tuple[Ints, Ints]:
    """One row of each way to cut a layer, and which way each row has."""
    return distinct([rows.tp, rows.ep])


def split_layers(spec: ModelSpec, ranks: Ranks) -> tuple[Ints, Ints]:
    """Layers of a rank without and with experts; the dense ones lead."""
    dense = ranks.dense(spec)
    return dense, ranks.layers - dense
