"""Layouts, specs and how tensor parallelism cuts a tensor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import Cut, Head, Layout, ModelSpec, ModelStage, SettingsError, Stage, TensorSpec, Where
from tests.core.values import ACTOR_TRAINING, SPEC


def test_model_stage_reads_what_it_prints() -> None:
    assert str(ACTOR_TRAINING) == "actor/training"
    assert ModelStage.parse("actor/training") == ACTOR_TRAINING


@pytest.mark.parametrize("text", ["actor", "actor/", "/training", "actor/sleeping", ""])
def test_model_stage_refuses_other_text_and_names_the_stages(text: str) -> None:
    with pytest.raises(SettingsError, match="generation, inference, training"):
        ModelStage.parse(text)


def test_stages_are_ordered_as_a_step_runs() -> None:
    assert sorted(Stage, key=lambda stage: stage.order) == [Stage.GENERATION, Stage.INFERENCE, Stage.TRAINING]


@pytest.mark.parametrize(("tp", "pp"), [(0, 1), (1, 0), (-1, 1)])
def test_layout_refuses_degrees_below_one(tp: int, pp: int) -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        Layout(tp, pp)


def test_layout_refuses_a_wrong_number_of_stage_layers() -> None:
    with pytest.raises(SettingsError, match="must name 2 layer counts"):
        Layout(1, 2, (4,))


def test_stage_layers_must_cover_the_model() -> None:
    with pytest.raises(SettingsError, match="sum to 5, the model has 4"):
        Layout(1, 2, (3, 2)).layers_of(0, 4)


def test_uneven_layers_go_to_the_first_pp_ranks() -> None:
    layout = Layout(1, 3)
    assert [list(layout.layers_of(rank, 7)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


@given(st.integers(1, 5), st.integers(1, 20))
def test_every_layer_has_exactly_one_pp_rank(pp: int, layers: int) -> None:
    held = [layer for rank in range(pp) for layer in Layout(1, pp).layers_of(rank, layers)]
    assert held == list(range(layers))


def test_common_layout_is_the_gcd_of_each_degree() -> None:
    assert Layout(4, 2).common(Layout(6, 3)) == Layout(2, 1)


def test_tied_embeddings_live_at_both_ends() -> None:
    tied = TensorSpec("embed", (16, 4), Where.BOTH_ENDS)
    assert [Layout(1, 3).holds(tied, rank, 6) for rank in range(3)] == [True, False, True]


@given(st.integers(1, 12), st.integers(1, 12))
def test_plain_cut_covers_the_dim_once(tp: int, blocks: int) -> None:
    tensor = TensorSpec("w", (blocks * 3, 5), Where.FIRST, cut=Cut(0, blocks))
    ranges = [tensor.interval(tp, rank) for rank in range(tp)]
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(blocks * 3))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 3


@given(st.integers(1, 12), st.integers(1, 12))
def test_padded_cut_stores_equal_shards_and_owns_each_row_once(tp: int, rows: int) -> None:
    tensor = TensorSpec("embed", (rows, 4), Where.FIRST, cut=Cut(0, rows, padded=True))
    owned = [index for rank in range(tp) for index in range(*tensor.interval(tp, rank))]
    assert owned == list(range(rows))
    shapes = {tensor.local_shape(tp, rank) for rank in range(tp)}
    assert len(shapes) == 1
    assert shapes.pop()[0] * tp >= rows


def test_few_kv_heads_are_replicated_in_blocks() -> None:
    tensor = TensorSpec("k", (8, 4), Where.FIRST, cut=Cut(0, 2, replicated=True))
    assert [tensor.interval(4, rank) for rank in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_tensor_refuses_a_dim_its_blocks_do_not_divide() -> None:
    with pytest.raises(SettingsError, match="dim of 7 in 2 blocks"):
        TensorSpec("w", (7, 4), Where.FIRST, cut=Cut(0, 2))


def test_layer_tensors_need_a_layer_and_others_refuse_one() -> None:
    with pytest.raises(SettingsError, match="layer None"):
        TensorSpec("w", (4,), Where.LAYER)
    with pytest.raises(SettingsError, match="layer 3"):
        TensorSpec("w", (4,), Where.FIRST, layer=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 6, "kv_heads": 4}, "6 heads are not a multiple of 4"),
        ({"dtype": "int4"}, "valid: fp64, fp32"),
        ({"head": Head.SCALAR, "tied_embeddings": True}, "cannot be tied"),
    ],
)
def test_spec_refuses_impossible_sizes(changes: dict[str, object], message: str) -> None:
    sizes = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    with pytest.raises(SettingsError, match=message):
        ModelSpec(**{**sizes, "ffn_hidden": 128, "vocab": 16, **changes})  # type: ignore[arg-type]


def test_spec_is_a_dense_causal_model_by_default() -> None:
    assert (SPEC.experts, SPEC.head, SPEC.dtype) == (0, Head.LM, "fp32")
