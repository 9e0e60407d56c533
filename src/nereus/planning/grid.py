"""The candidates of one model-stage as columns: every degree and option that its model, job, pool and pins allow.

What is looked at:
- TP: degrees that cut the model, inside a node.
- PP up to the layers, and DP: powers of two; where DP may be any, every pair of them on up to `EXACT_POOL` devices, and
  beyond these PP that is a power of two or divides the layers, with DP at which the largest share of the batch that
  replicas share out shrinks (a mini-batch where a model is trained). A larger pool so never lacks a smaller one's rows.
- Micro-batch: powers of two up to the largest share, as far as they hold no more than `TOKENS` tokens of mean length
  (more of them fill no device better). For generation: how many sequences decode at once, the whole share or as many as
  a KV budget holds: powers of two down to a part in `BUDGETS` of the share, powers of four below.
- Recomputation, ZeRO, CP, EP, virtual pp ranks and offload as far as `Capabilities` lists them; sequence parallelism
  wherever the job can do it and TP is above 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product

import numpy as np

from nereus.core import Candidate, Capabilities, Layout, ModelStage, Pin, Stage
from nereus.core.plan import RECOMPUTE
from nereus.cost.memory import sequences_kv_bytes
from nereus.cost.rows import Bools, Ints, Rows, expert_devices
from nereus.planning.legal import legal_tp
from nereus.planning.packing import Packing
from nereus.planning.problem import Problem
from nereus.planning.refusals import Refusals

EXACT_POOL = 64
TOKENS = 1 << 15
BUDGETS = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows of one model-stage with the slots that each needs, counted from the front; a slot is a node or a device.

    `name` numbers what tells plans apart: equal for rows with the same degrees.
    """

    model_stage: ModelStage
    rows: Rows
    slots: Ints
    name: Ints

    def candidate(self, row: int) -> Candidate:
        """A row in full."""
        rows = self.rows
        return Candidate(
            self.model_stage,
            Layout(int(rows.tp[row]), int(rows.pp[row])),
            int(rows.dp[row]),
            int(rows.micro_batch[row]),
            RECOMPUTE[rows.recompute[row]],
            int(rows.kv_bytes[row]),
            bool(rows.offload[row]),
            int(rows.zero[row]),
            int(rows.cp[row]),
            int(rows.ep[row]),
            bool(rows.sequence_parallel[row]),
            int(rows.vpp[row]),
        )

    def label(self, row: int) -> str:
        """A row with all that tells it from its neighbours."""
        candidate = self.candidate(row)
        words = [str(candidate), *(f"{n}{d}" for n, d in (("cp", candidate.cp), ("ep", candidate.ep)) if d > 1)]
        words += [f"vpp{candidate.vpp}"] * (candidate.vpp > 1) + [f"zero{candidate.zero}"] * (candidate.zero > 0)
        words += ["sp"] * candidate.sequence_parallel
        words += [f"recompute {candidate.recompute}"] * (candidate.recompute != "none")
        return " ".join(words + ["offload"] * candidate.offload)


@dataclass(frozen=True, slots=True)
class _Degrees:
    """Columns of one entry for every (tp, cp, pp, dp), with what packing says about each."""

    tp: Ints
    cp: Ints
    pp: Ints
    dp: Ints
    slots: Ints
    node: Ints
    cp_spans: Bools
    pp_spans: Bools
    dp_spans: Bools


@dataclass
class Grids:
    """Makes grids on nodes of `sizes` free devices; model-stages with equal choices share their degrees."""

    problem: Problem
    sizes: tuple[int, ...]
    refusals: Refusals = field(default_factory=Refusals)
    _degrees: dict[object, _Degrees] = field(default_factory=dict)
    _packings: dict[tuple[int, int], Packing] = field(default_factory=dict)
    _grids: dict[object, Grid] = field(default_factory=dict)

    @cached_property
    def devices(self) -> int:
        """Devices of all nodes."""
        return sum(self.sizes)

    def of(self, model_stage: ModelStage) -> Grid:
        """Every legal row of a model-stage."""
        problem, able = self.problem, self.problem.capabilities
        spec, pin = problem.workflow.spec(model_stage), able.pin(model_stage)
        whole, trained = _shared(problem, model_stage)
        tps = self._tps(model_stage, pin)
        pps = self._pps(model_stage, pin)
        large = [size for size in able.micro_batches if size > whole and model_stage.stage is not Stage.GENERATION]
        self.refusals.add(f"the largest share is {whole} sequences", large, lambda size: f"{model_stage} mb{size}")
        key = (tps, pps, pin.dp, whole, spec.layers, able.cp if trained else (1,))
        if key not in self._degrees:
            self._degrees[key] = self._deal(model_stage, tps, pps, able.cp if trained else (1,), pin, whole)
        sizes = self._sizes(model_stage, whole)
        alike = (key, tuple(sizes), trained, spec.layers, spec.experts, model_stage.stage is Stage.GENERATION)
        if alike not in self._grids or alike[-1]:
            variants = _Variants.of(able, pin, model_stage, trained, spec.experts, sizes)
            self._grids[alike] = self._grid(model_stage, self._degrees[key], variants, whole)
        return replace(self._grids[alike], model_stage=model_stage)

    def _sizes(self, model_stage: ModelStage, whole: int) -> Sequence[int]:
        """Micro-batches to look at, or KV budgets in sequences with 0 for none."""
        able, pin, work = self.problem.capabilities, self.problem.capabilities.pin(model_stage), self.problem.workload
        if model_stage.stage is Stage.GENERATION:
            return [0, *_powers(whole - 1)] if pin.micro_batch is None else [0, pin.micro_batch]
        if pin.micro_batch is not None:
            return [pin.micro_batch]
        length = work.prompt.mean + work.response.mean
        return able.micro_batches or [size for size in _powers(whole) if size == 1 or size * length <= TOKENS]

    def _tps(self, model_stage: ModelStage, pin: Pin) -> tuple[int, ...]:
        spec, valid = self.problem.workflow.spec(model_stage), legal_tp(self.problem, model_stage)
        largest = max(self.sizes)
        if pin.tp is None:
            for tp in _powers(largest):
                if tp not in valid:
                    words = f"{spec.heads} heads, {spec.kv_heads} KV heads: valid TP {', '.join(map(str, valid))}"
                    self.refusals.note(words, f"{model_stage} tp{tp}")
        return tuple(tp for tp in valid if tp <= largest and pin.tp in (None, tp))

    def _pps(self, model_stage: ModelStage, pin: Pin) -> tuple[int, ...]:
        able, layers = self.problem.capabilities, self.problem.workflow.spec(model_stage).layers
        if pin.pp is not None:
            wanted: Sequence[int] = (pin.pp,)
        elif able.pp:
            wanted = able.pp
        elif able.dp == "powers":
            wanted = _powers(self.devices)
        else:
            most = min(self.devices, max(layers, EXACT_POOL))
            wanted = [pp for pp in range(1, most + 1) if pp <= EXACT_POOL or pp & (pp - 1) == 0 or layers % pp == 0]
        deep = [pp for pp in wanted if pp > layers]
        self.refusals.add(f"the model has {layers} layers", deep, lambda pp: f"{model_stage} pp{pp}")
        return tuple(pp for pp in wanted if pp <= layers and (able.max_pp is None or pp <= able.max_pp))

    def _deal(
        self, model_stage: ModelStage, tps: Sequence[int], pps: Sequence[int], cps: Sequence[int], pin: Pin, whole: int
    ) -> _Degrees:
        """Every (tp, cp, pp, dp) that the nodes have room for and the batch has sequences for."""
        parts: list[_Degrees] = []
        choices = self._dps(model_stage, pin, whole)
        anywhere = self._anywhere(model_stage, pps, choices, pin, whole)
        for tp, cp in product(tps, cps):
            packing = self._packing(tp, cp)
            every = np.array([(pp, *packing.runs(pp).columns) for pp in pps], dtype=np.int64).reshape(-1, 4)
            few = tp * cp * every[:, :1] * choices <= EXACT_POOL
            which, replicas = np.nonzero((choices <= every[:, 1:2]) & (anywhere | few))
            if not len(which):
                continue
            (pp, _, pp_from, dp_from), dp = every[which].T, choices[replicas]
            parts.append(
                _Degrees(
                    np.full(len(dp), tp),
                    np.full(len(dp), cp),
                    pp,
                    dp,
                    slots=packing.nodes(dp * pp) if len(self.sizes) > 1 else dp * pp * cp * tp,
                    node=packing.fewest(dp * pp),
                    cp_spans=np.full(len(dp), not packing.whole),
                    pp_spans=(dp >= pp_from) & (pp > 1),
                    dp_spans=dp >= dp_from,
                )
            )
        if not parts:
            self._too_few(model_stage, tps, pps, pin)
            none, never = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
            return _Degrees(none, none, none, none, none, none, never, never, never)
        return _Degrees(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(_Degrees)))

    def _anywhere(self, model_stage: ModelStage, pps: Sequence[int], dps: Ints, pin: Pin, whole: int) -> Bools:
        """By PP and DP, which pairs are looked at on any number of devices."""
        able, layers = self.problem.capabilities, self.problem.workflow.spec(model_stage).layers
        pp, dp_ok = np.array(pps, dtype=np.int64)[:, None], dps > 0
        pp_ok = pp > 0
        if pin.pp is None and not able.pp:
            pp_ok = ((pp & (pp - 1)) == 0) | (layers % pp == 0)
        if pin.dp is None and able.dp == "any":
            dp_ok = _shrinking(whole, dps)
        return np.asarray(pp_ok & dp_ok)

    def _too_few(self, model_stage: ModelStage, tps: Sequence[int], pps: Sequence[int], pin: Pin) -> None:
        """Say what the smallest degrees need that nodes or pool do not have."""
        tp, pp, dp = min(tps, default=pin.tp or 1), min(pps, default=pin.pp or 1), pin.dp or 1
        name, devices = f"{model_stage} {Layout(tp, pp)} dp{dp}", tp * pp * dp
        if devices > self.devices:
            self.refusals.note(f"needs {devices} devices of {self.devices}", name)
        else:
            self.refusals.note(f"needs TP groups of {tp} inside a node; free in the nodes: {self.sizes}", name)

    def _packing(self, tp: int, cp: int) -> Packing:
        if (tp, cp) not in self._packings:
            self._packings[tp, cp] = Packing(self.sizes, tp, cp)
        return self._packings[tp, cp]

    def _dps(self, model_stage: ModelStage, pin: Pin, whole: int) -> Ints:
        """Replicas worth looking at, whatever the layout."""
        able, work = self.problem.capabilities, self.problem.workload
        most = min(self.devices, whole)
        every = np.arange(1, most + 1)
        if pin.dp is not None:
            every = np.array([pin.dp])
        elif able.dp == "powers":
            every = np.array(_powers(most))
        else:
            every = every[(every <= EXACT_POOL) | _shrinking(whole, every)]
        if not able.uneven_shares:
            even = (work.mini_batch % every == 0) & (work.sequences % every == 0)
            uneven = every[~even]
            words = f"does not divide the batch of {work.mini_batch} evenly"
            self.refusals.add(words, list(uneven), lambda dp: f"{model_stage} dp{dp}")
            every = every[even]
        if self.devices > whole and pin.dp is None:
            part = "a mini-batch" if whole == work.mini_batch else "the batch"
            beyond = range(whole + 1, self.devices + 1)
            self.refusals.add(f"{part} has {whole} sequences", beyond, lambda dp: f"{model_stage} dp{dp}")
        return every

    def _grid(self, model_stage: ModelStage, degrees: _Degrees, variants: _Variants, whole: int) -> Grid:
        """Every pair of degrees and variant that goes together."""
        share = -(-whole // np.maximum(degrees.dp, 1))
        wide = variants.micro_batch[None, :] > share[:, None]
        fits = variants.fits(degrees.tp, degrees.cp, degrees.pp, degrees.dp, share) & ~wide
        which, option = np.nonzero(fits)
        tp, cp, pp, dp = (column[which] for column in (degrees.tp, degrees.cp, degrees.pp, degrees.dp))
        micro_batch, ep = variants.micro_batch[option], variants.ep[option]
        kv_bytes, spec = np.zeros(len(which), dtype=np.int64), self.problem.workflow.spec(model_stage)
        first, middle, last = _layers(spec.layers, pp)
        if model_stage.stage is Stage.GENERATION:
            part, kinds = micro_batch > 0, self.problem.cluster.kinds.values()
            micro_batch = np.where(part, micro_batch, share[which])
            one = sequences_kv_bytes(spec, tp, first, self.problem.workload, kinds)
            kv_bytes = np.where(part, micro_batch * one, 0)
        pp_spans, dp_spans, cp_spans = (
            column[which] for column in (degrees.pp_spans, degrees.dp_spans, degrees.cp_spans)
        )
        self._deal_ranks(np.flatnonzero((ep > 1) & (pp > 1)), tp, cp, pp, dp, pp_spans, dp_spans)
        rows = Rows(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=variants.vpp[option], zero=variants.zero[option],
            micro_batch=micro_batch, recompute=variants.recompute[option], kv_bytes=kv_bytes,
            sequence_parallel=variants.sequence_parallel[option] & (tp > 1), offload=variants.offload[option],
            layers_first=first, layers_middle=middle, layers_last=last,
            tp_spans=np.zeros(len(tp), np.bool_), pp_spans=pp_spans, dp_spans=dp_spans,
            ep_spans=self._ep_spans(tp, cp, pp, dp, ep, cp_spans, dp_spans), cp_spans=cp_spans,
            node=degrees.node[which],
        )  # fmt: skip
        return Grid(model_stage, rows, degrees.slots[which], which)

    def _deal_ranks(self, rows: Ints, tp: Ints, cp: Ints, pp: Ints, dp: Ints, pp_spans: Bools, dp_spans: Bools) -> None:
        """Correct rows whose replicas of a pp rank are neighbours: pp and dp change places in the packing."""
        if not len(rows):
            return
        kinds, where = np.unique(np.array([tp, cp, dp])[:, rows], axis=1, return_inverse=True)
        runs = [self._packing(one, other).runs(width) for one, other, width in kinds.T.tolist()]
        apart, moved = (
            np.array([getattr(run, name) for run in runs], dtype=np.int64)[where.ravel()]
            for name in ("pp_from", "dp_from")
        )
        dp_spans[rows] = (dp[rows] > 1) & (pp[rows] >= apart)
        pp_spans[rows] = pp[rows] >= moved

    def _ep_spans(self, tp: Ints, cp: Ints, pp: Ints, dp: Ints, ep: Ints, cp_spans: Bools, dp_spans: Bools) -> Bools:
        """Whether any expert group leaves its node."""
        found = np.asarray((ep > 1) & (cp_spans | dp_spans))
        if not found.any():
            return found
        blocks = expert_devices(tp, cp, dp, ep) // (tp * cp)
        rows = np.flatnonzero(found & ~cp_spans)
        kinds, where = np.unique(np.array([tp, cp, blocks])[:, rows], axis=1, return_inverse=True)
        first = [self._packing(one, other).runs(width).pp_from for one, other, width in kinds.T.tolist()]
        groups = pp[rows] * dp[rows] // blocks[rows]
        found[rows] = (blocks[rows] > 1) & (groups >= np.array(first, dtype=np.int64)[where.ravel()])
        return found


def candidates(problem: Problem, model_stage: ModelStage, sizes: Sequence[int]) -> Iterator[Candidate]:
    """Every legal candidate of a model-stage on nodes of so many devices."""
    grid = Grids(problem, tuple(sizes)).of(model_stage)
    yield from (grid.candidate(row) for row in range(len(grid.rows)))


@dataclass(frozen=True, slots=True)
class _Variants:
    """Columns of what a candidate has beside its degrees. A micro-batch of 0 is the whole share (generation)."""

    micro_batch: Ints
    recompute: Ints
    zero: Ints
    ep: Ints
    vpp: Ints
    offload: Bools
    sequence_parallel: Bools
    budgets: bool
    even: bool

    @classmethod
    def of(
        cls,
        able: Capabilities,
        pin: Pin,
        model_stage: ModelStage,
        trained: bool,
        experts: int,
        sizes: Sequence[int],
    ) -> _Variants:
        """Every combination that the job can do; whether it goes with some degrees is asked later."""
        generation = model_stage.stage is Stage.GENERATION
        recompute = [RECOMPUTE.index(mode) for mode in able.recompute] if trained else [0]
        eps = [1, *(e for e in range(2, experts + 1) if experts % e == 0)] if able.expert_parallel and experts else [1]
        offloads = [False, True] if able.offload else [False]
        combined = list(
            product(sizes, recompute, able.zero if trained else (0,), eps, able.vpp if trained else (1,), offloads)
        )
        micro, again, zero, ep, vpp, offload = (np.array(column) for column in zip(*combined, strict=True))
        parallel = np.full(len(combined), able.sequence_parallel and not generation)
        even = not able.uneven_shares and not generation
        return cls(micro, again, zero, ep, vpp, offload, parallel, pin.micro_batch is None, even)

    def fits(self, tp: Ints, cp: Ints, pp: Ints, dp: Ints, share: Ints) -> Bools:
        """Which variants (columns) go with which degrees (rows)."""
        ok = np.ones((len(tp), len(self.ep)), dtype=np.bool_)
        if self.ep.max(initial=1) > 1:
            ok &= (tp * cp * dp)[:, None] % self.ep == 0
        if self.vpp.max(initial=1) > 1:
            ok &= (self.vpp == 1) | ((pp > 1)[:, None])
        if self.zero.max(initial=0) > 0:
            ok &= (self.zero == self.zero.min()) | ((dp * cp) > 1)[:, None]
        if (self.micro_batch == 0).any():
            part = self.micro_batch < share[:, None]
            if self.budgets:
                fourths = np.isin(self.micro_batch, [1 << power for power in range(0, 62, 2)])
                part &= fourths | (self.micro_batch * BUDGETS > share[:, None])
            ok &= (self.micro_batch == 0) | part
        if self.even:
            ok &= share[:, None] % np.maximum(self.micro_batch, 1) == 0
        return ok


def _shared(problem: Problem, model_stage: ModelStage) -> tuple[int, bool]:
    """Sequences that replicas share out at once, and whether the model-stage is trained (D5.8)."""
    trained = problem.workflow.updated(model_stage)
    return (problem.workload.mini_batch if trained else problem.workload.sequences), trained


def _shrinking(whole: int, dps: Ints) -> Bools:
    """Replicas at which the largest share of `whole` sequences is smaller than with one replica less."""
    return np.asarray((dps == 1) | (-(-whole // dps) < -(-whole // np.maximum(dps - 1, 1))))


def _layers(layers: int, pp: Ints) -> tuple[Ints, Ints, Ints]:
    """Layers of the first pp rank, of the fullest between, and of the last."""
    small, extra = np.divmod(layers, pp)
    middle = np.where(pp > 2, small + (extra > 1), 0)
    return small + (extra > 0), middle, np.where(pp == 1, layers, small)


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length())] if largest > 0 else []
