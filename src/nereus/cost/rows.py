"""Candidates of one model-stage as columns, one row each, so that thousands are priced at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from nereus.core import Assignment, Candidate
from nereus.core.plan import RECOMPUTE

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of equal length, known by identity: what follows from them is remembered.

    Layers are those of the first pp rank, of the fullest between, and of the last. With pp 1 the only rank is first and
    last at once and `layers_middle` is 0, as it is with pp 2. `*_spans` say whether a group of that kind leaves its
    node (the domain of the fast link): tp, neighbours in the pipeline, dp, ep, and cp. `node` is how many of its
    devices the node with fewest of them holds: so many ports between nodes work at once.
    """

    tp: Ints
    pp: Ints
    dp: Ints
    cp: Ints
    ep: Ints
    vpp: Ints
    zero: Ints
    micro_batch: Ints
    recompute: Ints  # the index in RECOMPUTE
    kv_bytes: Ints
    sequence_parallel: Bools
    offload: Bools
    layers_first: Ints
    layers_middle: Ints
    layers_last: Ints
    tp_spans: Bools
    pp_spans: Bools
    dp_spans: Bools
    ep_spans: Bools
    cp_spans: Bools
    node: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def __getitem__(self, rows: slice | Ints | Bools) -> Rows:
        """Some of the rows."""
        return Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def groups(self, row: int) -> tuple[int, ...]:
        """Which groups of a row leave their node, and its devices on the node with fewest."""
        columns = (self.tp_spans, self.pp_spans, self.dp_spans, self.ep_spans, self.cp_spans, self.node)
        return tuple(int(column[row]) for column in columns)

    @property
    def devices(self) -> Ints:
        """Devices that each row needs."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def size(self) -> Ints:
        """Devices of one unit."""
        return self.tp * self.pp * self.cp

    @classmethod
    def of(cls, candidates: Sequence[Candidate], layers: int, node_size: int) -> Rows:
        """Rows of candidates whose units are dealt to nodes of `node_size` devices in (dp, pp, cp, tp) order.

        With expert groups the order is (pp, dp, cp, tp): the replicas of a pp rank are neighbours. A node gets whole
        groups of tp × cp devices and keeps what they leave over; a group larger than it does not.
        """
        tp, pp, dp, cp, ep = (
            _ints(each)
            for each in zip(*((c.layout.tp, c.layout.pp, c.dp, c.cp, c.ep) for c in candidates), strict=True)
        )
        ends = [_layers(candidate, layers) for candidate in candidates]
        packed = _Packed.of(tp, cp, node_size)
        inner_spans = packed.split(tp * cp * np.where(ep > 1, dp, pp))
        leaves = tp * cp * pp * dp > packed.node
        return cls(
            tp, pp, dp, cp, ep,
            vpp=_ints(c.vpp for c in candidates),
            zero=_ints(c.zero for c in candidates),
            micro_batch=_ints(c.micro_batch for c in candidates),
            recompute=_ints(RECOMPUTE.index(c.recompute) for c in candidates),
            kv_bytes=_ints(c.kv_bytes for c in candidates),
            sequence_parallel=_bools(c.sequence_parallel for c in candidates),
            offload=_bools(c.offload for c in candidates),
            layers_first=_ints(end[0] for end in ends),
            layers_middle=_ints(end[1] for end in ends),
            layers_last=_ints(end[2] for end in ends),
            tp_spans=leaves & packed.split(tp),
            pp_spans=leaves & (pp > 1) & ((ep > 1) | inner_spans),
            dp_spans=leaves & (dp > 1) & ((ep == 1) | inner_spans),
            ep_spans=leaves & (ep > 1) & packed.split(expert_devices(tp, cp, dp, ep)),
            cp_spans=leaves & (cp > 1) & packed.split(tp * cp),
            node=packed.fewest(tp * cp * pp * dp),
        )  # fmt: skip

    @classmethod
    def placed(cls, assignment: Assignment, layers: int, nodes: Ints) -> Rows:
        """One row: an assignment where it lies; `nodes` are those of its devices, unit by unit."""
        candidate = assignment.candidate
        row = cls.of([candidate], layers, node_size=1 << 40)
        nodes = nodes.reshape(candidate.dp, candidate.layout.pp, candidate.cp, -1)
        if (nodes == nodes.flat[0]).all():
            return row
        tp, cp, pp, dp = (bool((nodes != first).any()) for first in (
            nodes[:, :, :, :1], nodes[:, :, :1], nodes[:, :1], nodes[:1],
        ))  # fmt: skip
        fewest = int(np.unique(nodes, return_counts=True)[1].min())
        sets = nodes.swapaxes(0, 1).reshape(-1, int(expert_devices(row.tp, row.cp, row.dp, row.ep)[0]))
        ep = candidate.ep > 1 and (tp or cp or bool((sets != sets[:, :1]).any()))
        return row.spanning(tp, pp, dp, ep, cp, fewest)

    def spanning(self, tp: bool, pp: bool, dp: bool, ep: bool, cp: bool, node: int) -> Rows:
        """The rows with groups that leave their nodes as said, whatever packing would do."""
        size = len(self)
        return replace(
            self,
            tp_spans=np.full(size, tp),
            pp_spans=np.full(size, pp),
            dp_spans=np.full(size, dp),
            ep_spans=np.full(size, ep),
            cp_spans=np.full(size, cp),
            node=np.full(size, node),
        )


@dataclass(frozen=True, slots=True)
class _Packed:
    """What equal nodes hold of groups that are dealt whole: `node` devices of each are used."""

    node: Ints

    @classmethod
    def of(cls, tp: Ints, cp: Ints, node_size: int) -> _Packed:
        """A group too large for a node is dealt in its tp groups, or without gaps."""
        piece = np.where(tp * cp <= node_size, tp * cp, np.where(tp <= node_size, tp, 1))
        return cls(node_size // piece * piece)

    def split(self, devices: Ints) -> Bools:
        """Whether any of many groups of so many devices, side by side, lies in two nodes."""
        return np.asarray(self.node % devices != 0)

    def fewest(self, devices: Ints) -> Ints:
        """How many of so many devices the last node holds."""
        rest = devices % self.node
        return np.where(rest, rest, np.minimum(devices, self.node))


LARGEST_CODE = int(np.iinfo(np.int64).max)
"""Codes of rows may not wrap around: beyond it they are numbered afresh."""


def distinct(columns: Sequence[Ints | Bools]) -> tuple[Ints, Ints]:
    """One row of each set that is equal in columns of no negative number, and to which set each row belongs."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        most = int(column.max(initial=0))
        if most:
            if code.max(initial=0) > LARGEST_CODE // (most + 1) - 1:
                code = np.unique(code, return_inverse=True)[1]
            code = code * (most + 1) + column
    order = code.argsort()
    ordered = code[order]
    new = np.ones(len(code), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    where = np.empty(len(code), dtype=np.int64)
    where[order] = np.cumsum(new) - 1
    return order[new], where


def expert_devices(tp: Ints, cp: Ints, dp: Ints, ep: Ints) -> Ints:
    """Neighbouring devices among which an expert group lies: hosts with experts order their ranks with pp outermost.

    Inside one tp × cp group where ep is no larger; all replicas where they do not fall into equal sets.
    """
    group = tp * cp
    replicas = np.maximum(ep // group, 1)
    equal = np.where(ep > group, ep % group, group % ep) + dp % replicas == 0
    return group * np.where(equal, replicas, dp)


def _layers(candidate: Candidate, layers: int) -> tuple[int, int, int]:
    counts = [len(candidate.layout.layers_of(rank, layers)) for rank in range(candidate.layout.pp)]
    return counts[0], max(counts[1:-1], default=0), counts[-1]


def _ints(values: object) -> Ints:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def _bools(values: object) -> Bools:
    return np.array(list(values), dtype=np.bool_)  # type: ignore[call-overload]
