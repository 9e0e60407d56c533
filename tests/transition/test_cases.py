"""Resharding cases that went wrong in public systems, through whole transitions of the engine in one process.

Every case also goes back to where it began and through a random chain of five layouts; after each transition every
shard equals an oracle's cut, exactly once written, and no rank receives more than it lacks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from nereus.core import (
    EMU,
    Cut,
    Destroy,
    EMUSet,
    Kind,
    Layout,
    SettingsError,
    StateSchema,
    TensorSpec,
    TransitionDAG,
    TransitionError,
    Where,
    expand,
)
from nereus.engine.transports.memory import Array, Shards, World, execute
from nereus.trainer.config import OptimizerConfig
from nereus.trainer.table import shares
from nereus.transition import compile
from tests.oracles.cut import cut, lacks_bytes
from tests.support.models import ACTOR, TRAINED, assign, plan
from tests.support.worlds import assert_holds

PARAM = {Kind.PARAM: "fp32"}
UNCUT = Cut()
Full = dict[tuple[str, Kind], Array]


def schema(layers: int, *tensors: TensorSpec, dtypes: dict[Kind, str] = PARAM) -> StateSchema:
    return StateSchema(layers, tensors, dtypes)


def numbered(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Walk:
    """One model's state going from layout to layout on the devices 0, 1, 2...; begins as one whole copy."""

    def __init__(self, schema: StateSchema, full: Full | None = None) -> None:
        self.schema = schema
        self.units = expand(plan(assign(ACTOR, Layout(), 0)))
        self.full = full
        self.world = World()
        (unit,) = self.units
        self.world.positions[0, unit] = {key: array.copy() for key, array in self._cut(unit, 0).items()}

    def to(self, layout: Layout, dp: int = 1) -> list[Shards]:
        """Change the layout; the shards of each unit's positions, pp ranks first."""
        goal = plan(assign(ACTOR, layout, *range(layout.size * dp)))
        dag = compile(self.units, goal, {ACTOR: self.schema})
        lacking: Counter[int] = Counter()
        for unit in (unit for unit in dag.goal if unit not in dag.start.units):
            for device in unit.devices:
                lacking[device] += lacks_bytes(self.schema, dag.start.units, unit, device)
        traffic = execute(dag, {ACTOR: self.schema}, self.world)
        assert +traffic.received_bytes == +lacking
        assert traffic.sent_bytes.total() == traffic.received_bytes.total()
        self.units = dag.goal
        self.check()
        return [self.world.positions[device, unit] for unit in self.units for device in unit.devices]

    def check(self) -> None:
        """Exactly the units that exist, and every shard as the oracle cuts it."""
        assert set(self.world.positions) == {(device, unit) for unit in self.units for device in unit.devices}
        if self.full is None:
            assert_holds(self.world, self.units, {ACTOR: self.schema})
        for (device, unit), shards in self.world.positions.items():
            wanted = self._cut(unit, device)
            assert shards.keys() == wanted.keys()
            for key, array in wanted.items():
                assert shards[key].dtype == array.dtype
                assert np.array_equal(shards[key], array), f"{unit}, device {device}: {key}"

    def around(self, *layouts: Layout, seed: int = 0) -> None:
        """There and back for each layout, and a random chain of five."""
        chosen = random.Random(seed)
        for layout in (*layouts, *chosen.choices(layouts, k=5)):
            self.to(layout, chosen.choice((1, 2)))
        for layout in layouts:
            self.to(layout)
            self.to(Layout())

    def _cut(self, unit: EMU, device: int) -> Shards:
        if self.full is None:
            return cut(self.schema, unit, device)
        full = self.full
        return cut(self.schema, unit, device, lambda _, tensor, kind: full[tensor.name, kind])


def params(**values: Array) -> Full:
    return {(name, Kind.PARAM): value for name, value in values.items()}


def layer(name: str, shape: tuple[int, ...], index: int = 0, cut: Cut = UNCUT) -> TensorSpec:
    return TensorSpec(name, shape, Where.LAYER, index, cut)


def test_t01_column_shards_are_contiguous_columns() -> None:
    q, o = layer("q", (16, 8), cut=Cut(0, 4)), layer("o", (8, 16), cut=Cut(1, 4))
    walk = Walk(schema(1, q, o), params(q=numbered(16, 8), o=numbered(8, 16)))
    for tp in (2, 4):
        for rank, shards in enumerate(walk.to(Layout(tp))):
            width = 16 // tp
            assert np.array_equal(shards["o", Kind.PARAM], numbered(8, 16)[:, width * rank : width * (rank + 1)])
            assert shards["o", Kind.PARAM].flags.c_contiguous
            assert np.array_equal(shards["q", Kind.PARAM], numbered(16, 8)[width * rank : width * (rank + 1)])
    (shards,) = walk.to(Layout())
    assert np.array_equal(shards["o", Kind.PARAM], numbered(8, 16))
    walk.around(Layout(2), Layout(4))


def test_t02_merged_rows_are_in_order_every_time() -> None:
    rows = np.repeat(np.arange(16, dtype=np.float32)[:, None], 4, axis=1)
    walk = Walk(schema(1, layer("w", (16, 4), cut=Cut(0, 16))), params(w=rows))
    for _ in range(20):
        walk.to(Layout(4))
        first, second = walk.to(Layout(2))
        assert first["w", Kind.PARAM][:, 0].tolist() == list(range(8))
        assert second["w", Kind.PARAM][:, 0].tolist() == list(range(8, 16))
        walk.to(Layout(4))
        (whole,) = walk.to(Layout())
        assert whole["w", Kind.PARAM][:, 0].tolist() == list(range(16))


def test_t03_kv_heads_are_kept_in_copies_where_tp_is_larger() -> None:
    kv = Cut(0, 2, replicated=True)
    spec = schema(
        1, layer("q", (32, 8), cut=Cut(0, 8)), layer("k", (8, 8), cut=kv), layer("v", (8, 8), cut=kv), dtypes=TRAINED
    )
    walk = Walk(spec)
    (unit,) = walk.units
    whole = walk.world.positions[0, unit]["k", Kind.PARAM].copy()
    walk.to(Layout(2))
    for tp, copies in ((4, 2), (8, 4)):
        for rank, shards in enumerate(walk.to(Layout(tp))):
            head = rank // copies
            assert np.array_equal(shards["k", Kind.PARAM], whole[4 * head : 4 * head + 4])
    for rank, shards in enumerate(walk.to(Layout(2))):
        assert np.array_equal(shards["k", Kind.PARAM], whole[4 * rank : 4 * rank + 4])
    walk.around(Layout(2), Layout(4), Layout(8))


@pytest.mark.parametrize("vocab", [17, 127, 31123])
def test_t11_padding_is_zero_and_never_reaches_the_vocabulary(vocab: int) -> None:
    hidden = 4 if vocab < 1000 else 1
    spec = TensorSpec("embed", (vocab, hidden), Where.FIRST, None, Cut(0, vocab, padded=True))
    walk = Walk(schema(1, spec, layer("w", (2, 2)), dtypes=TRAINED))
    (unit,) = walk.units
    whole = {kind: walk.world.positions[0, unit]["embed", kind].copy() for kind in TRAINED}
    chunk = -(-vocab // 8)
    for rank, shards in enumerate(walk.to(Layout(8))):
        for kind, values in whole.items():
            stored = shards["embed", kind]
            assert stored.shape == (chunk, hidden)
            logical = values[chunk * rank : chunk * (rank + 1)]
            assert np.array_equal(stored[: len(logical)], logical)
            assert not stored[len(logical) :].any()
            stored[len(logical) :] = 99  # whatever is written there must not come back
    (shards,) = walk.to(Layout())
    for kind, values in whole.items():
        assert shards["embed", kind].shape == (vocab, hidden)
        assert np.array_equal(shards["embed", kind], values)


def layered(count: int) -> tuple[StateSchema, Full]:
    """Layers that hold their own index; from ten on the order of names is not the order of layers."""
    tensors = [layer(f"layers.{i}.w", (4, 2), i, Cut(0, 4)) for i in range(count)]
    return schema(count, *tensors), {(t.name, Kind.PARAM): np.full((4, 2), t.layer, np.float32) for t in tensors}


def indices(shards: Shards) -> list[int]:
    """The layers a position holds, by content; each in the tensor that has its name."""
    for (name, _), array in shards.items():
        assert (array == int(name.split(".")[1])).all(), name
    return sorted(int(array.flat[0]) for array in shards.values())


def test_p01_layers_have_global_names_on_every_stage() -> None:
    walk = Walk(*layered(4))
    assert [indices(shards) for shards in walk.to(Layout(1, 2))] == [[0, 1], [2, 3]]
    assert [indices(shards) for shards in walk.to(Layout(1, 4))] == [[0], [1], [2], [3]]
    assert [indices(shards) for shards in walk.to(Layout())] == [[0, 1, 2, 3]]
    walk.around(Layout(1, 2), Layout(1, 4), Layout(2, 2), Layout(4, 1))


def test_p02_layers_go_in_numeric_order() -> None:
    walk = Walk(*layered(12))
    for pp in (3, 2, 4):
        each = 12 // pp
        wanted = [list(range(each * stage, each * (stage + 1))) for stage in range(pp)]
        assert [indices(shards) for shards in walk.to(Layout(1, pp))] == wanted
    walk.around(Layout(1, 2), Layout(1, 3), Layout(2, 2), Layout(1, 4))


def test_p03_uneven_stages_hold_every_layer_once() -> None:
    walk = Walk(*layered(7))
    layouts = [Layout(1, 2, (4, 3)), Layout(1, 2, (3, 4)), Layout(1, 3, (3, 2, 2))]
    for layout in layouts:
        assert layout.stage_layers is not None
        bounds = np.cumsum((0, *layout.stage_layers))
        wanted = [list(range(a, b)) for a, b in pairwise(bounds)]
        assert [indices(shards) for shards in walk.to(layout)] == wanted
    walk.around(*layouts, Layout(2, 2, (4, 3)))
    with pytest.raises(SettingsError):
        Walk(*layered(7)).to(Layout(1, 2, (4, 2)))


def ends(tied: bool) -> StateSchema:
    vocab = Cut(0, 16, padded=True)
    blocks = [layer(f"{i}.w", (4, 4), i, Cut(0, 4)) for i in range(4)]
    embed = TensorSpec("embed", (16, 4), Where.BOTH_ENDS if tied else Where.FIRST, None, vocab)
    rest = [TensorSpec("norm", (4,), Where.LAST)]
    rest += [] if tied else [TensorSpec("head", (16, 4), Where.LAST, None, vocab)]
    return schema(4, embed, *blocks, *rest, dtypes=TRAINED)


def test_p05_tied_embeddings_are_one_tensor_with_a_copy_at_either_end() -> None:
    walk = Walk(ends(tied=True))
    (unit,) = walk.units
    whole = {kind: walk.world.positions[0, unit]["embed", kind].copy() for kind in TRAINED}
    for pp in (2, 4):
        stages = walk.to(Layout(1, pp))
        for kind, values in whole.items():
            assert np.array_equal(stages[0]["embed", kind], values)
            assert np.array_equal(stages[-1]["embed", kind], values)
        assert all(("embed", Kind.PARAM) not in middle for middle in stages[1:-1])
    (shards,) = walk.to(Layout())
    assert [name for name, kind in shards if kind is Kind.PARAM].count("embed") == 1
    walk.around(Layout(1, 2), Layout(1, 4), Layout(2, 2))


def test_p08_an_untied_head_and_the_last_norm_are_on_the_last_stage_alone() -> None:
    walk = Walk(ends(tied=False))
    for pp in (2, 1, 4):
        stages = walk.to(Layout(1, pp))
        for stage, shards in enumerate(stages):
            names = {name for name, _ in shards}
            assert ({"head", "norm"} <= names) == (stage == pp - 1)
            assert ("embed" in names) == (stage == 0)
    walk.around(Layout(1, 2), Layout(1, 4), Layout(2, 2))


def test_o04_masters_are_moved_not_made_from_the_parameters() -> None:
    spec = schema(2, layer("0.w", (8, 4), 0, Cut(0, 8)), layer("1.w", (8, 4), 1, Cut(1, 4)), dtypes=TRAINED)
    walk = Walk(spec)
    (unit,) = walk.units
    held = walk.world.positions[0, unit]
    as_float = (held["0.w", Kind.PARAM].astype(np.uint32) << 16).view(np.float32)
    assert not np.array_equal(held["0.w", Kind.MASTER], as_float), "the oracle's master is not the parameter"
    walk.around(Layout(2, 2), Layout(4, 1), Layout(1, 2))


def rates(updates: Sequence[int]) -> list[float]:
    return [OptimizerConfig(lr=1e-3, lr_end=1e-4, warmup_updates=50, total_updates=100).rate(n) for n in updates]


def test_o09_the_rate_depends_on_the_counter_that_moves_and_on_nothing_else() -> None:
    assert rates([38]) == rates([37, 38])[1:]
    assert rates([37]) != rates([38])


def test_l04_each_step_takes_the_next_samples_whatever_the_number_of_replicas() -> None:
    position, taken = 40, []
    for dp in (2, 4, 1, 2):
        parts = shares(8, dp)
        assert len(parts) == dp
        taken += [position + int(row) for part in parts for row in part]
        position += 8
    assert taken == list(range(40, 72))


def test_f02_the_last_copy_is_never_destroyed_and_no_copy_before_its_successor_stands() -> None:
    walk = Walk(*layered(4))
    dag = compile(walk.units, plan(assign(ACTOR, Layout(2), 1, 2)), {ACTOR: walk.schema})
    destroy = next(step for step in dag.primitives if isinstance(step, Destroy))
    first = (destroy, *(step for step in dag.primitives if step is not destroy))
    with pytest.raises(TransitionError, match="has committed"):
        execute(TransitionDAG(dag.start, dag.goal, first), {ACTOR: walk.schema}, walk.world)
    with pytest.raises((SettingsError, TransitionError), match="actor/training"):
        compile(walk.units, plan(), {ACTOR: walk.schema})
    walk.check()
    assert isinstance(walk.units, EMUSet)
