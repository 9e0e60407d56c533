"""The parallel decoder against the unsharded transformers model: outputs, gradients, global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nereus.core import Head, Layout, NereusError
from nereus.engine.ledger import Ledger
from nereus.trainer.decoder.batch import MicroBatch
from nereus.trainer.decoder.gradients import square_norm
from nereus.trainer.decoder.model import Decoder
from nereus.trainer.decoder.parallel import Hooks, UnitGroups
from nereus.trainer.decoder.pipeline import forward, train
from tests.support.ranks import run_unit
from tests.trainer.decoder import oracle

ONE, PAIR, LINE, SQUARE = Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2)
UNEVEN = Layout(1, 2, (1, 2))
EMPTY_MIDDLE = Layout(1, 3, (2, 0, 1))
REPLICATED_KV = Layout(4, 1)
THIRDS = Layout(3, 1)

CASES = [
    ("llama", ONE),
    ("llama", PAIR),
    ("llama", UNEVEN),
    ("llama", SQUARE),
    ("llama", REPLICATED_KV),
    ("llama-tied", ONE),
    ("llama-tied", LINE),
    ("llama-tied", SQUARE),
    ("llama-tied", EMPTY_MIDDLE),
    ("llama-thirds", THIRDS),
    ("qwen2", PAIR),
    ("qwen2", REPLICATED_KV),
    ("qwen2", SQUARE),
    ("qwen3", PAIR),
    ("qwen3", REPLICATED_KV),
    ("qwen3-tied", SQUARE),
    ("qwen3", Layout(4, 2)),
]
LM_OUTPUTS = ("log_probs", "entropy")


def policy_loss(outputs: Mapping[str, torch.Tensor], batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (outputs["log_probs"] * batch.columns["weight"]).sum() + 0.5 * (outputs["entropy"] ** 2).sum()
    return loss, {"loss": loss, "tokens": batch.response_lengths.sum()}


def value_loss(outputs: Mapping[str, torch.Tensor], batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = ((outputs["values"] - batch.columns["weight"]) ** 2).sum() + outputs["scores"].sum()
    return loss, {"loss": loss}


class Case:
    """A model, its reference, and decoders for any layout."""

    def __init__(self, name: str, dtype: str = "fp32", head: Head = Head.LM, **options: Any) -> None:
        self.model, family, self.spec = oracle.build(name, dtype, head)
        self.tensors = family.tensors(self.spec)
        self.full = oracle.full_state(self.model, self.tensors)
        self.options = options
        wide = torch.float64 if dtype == "fp64" else torch.float32
        self.batches = oracle.batches(self.spec.vocab, dtype=wide)

    def decoder(self, layout: Layout, pp_rank: int, tp_rank: int, groups: UnitGroups) -> Decoder:
        params = oracle.cut(self.full, self.tensors, layout, pp_rank, tp_rank, self.spec.layers)
        return Decoder(self.spec, self.tensors, layout, pp_rank, tp_rank, params, groups, **self.options)

    def forward(self, layout: Layout, wanted: tuple[str, ...]) -> list[list[dict[str, torch.Tensor]]]:
        return run_unit(layout, lambda p, t, g: forward(self.decoder(layout, p, t, g), self.batches, wanted))

    def train(self, layout: Layout, wanted: tuple[str, ...], loss: Any, scale: float = 0.25) -> list[Any]:
        def main(pp_rank: int, tp_rank: int, groups: UnitGroups) -> Any:
            decoder = self.decoder(layout, pp_rank, tp_rank, groups)
            gradients, sums = train(decoder, self.batches, wanted, loss, scale)
            return gradients, sums, square_norm(decoder, gradients)

        return run_unit(layout, main)


@pytest.mark.parametrize(("name", "layout"), [*CASES, ("llama-rope3", PAIR), ("llama-rope3", ONE)])
def test_log_probs_and_entropy_equal_the_unsharded_model(name: str, layout: Layout) -> None:
    case = Case(name)
    ranks = case.forward(layout, LM_OUTPUTS)
    for device, found in enumerate(ranks):
        if device < (layout.pp - 1) * layout.tp:
            assert found == []
            continue
        for batch, got in zip(case.batches, found, strict=True):
            expected = oracle.outputs(case.model, batch)
            for key in LM_OUTPUTS:
                torch.testing.assert_close(got[key], expected[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [ONE, PAIR, SQUARE])
def test_fp64_is_fp64_throughout(layout: Layout) -> None:
    case = Case("qwen3", "fp64")
    for batch, got in zip(case.batches, case.forward(layout, LM_OUTPUTS)[-1], strict=True):
        expected = oracle.outputs(case.model, batch)
        for key in LM_OUTPUTS:
            torch.testing.assert_close(got[key], expected[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", [ONE, PAIR, REPLICATED_KV])
def test_temperature_and_masked_tokens_shape_log_probs(layout: Layout) -> None:
    masked = (0, 5, 20, 36)
    case = Case("llama", temperature=0.7, masked_tokens=masked)
    for batch, got in zip(case.batches, case.forward(layout, LM_OUTPUTS)[-1], strict=True):
        expected = oracle.outputs(case.model, batch, 0.7, masked)
        for key in LM_OUTPUTS:
            torch.testing.assert_close(got[key], expected[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [ONE, PAIR, LINE, SQUARE])
def test_scalar_head_gives_values_and_scores(layout: Layout) -> None:
    case = Case("llama", head=Head.SCALAR)
    for batch, got in zip(case.batches, case.forward(layout, ("values", "scores"))[-1], strict=True):
        expected = oracle.outputs(case.model, batch)
        torch.testing.assert_close(got["values"], expected["values"], rtol=0, atol=1e-5)
        torch.testing.assert_close(got["scores"], expected["scores"], rtol=0, atol=1e-5)


def assert_gradients(case: Case, layout: Layout, ranks: list[Any], loss: Any, tolerance: float) -> None:
    """All tensors of a position together within `tolerance`, each within four times it (fp32 rounds both sides)."""
    expected = oracle.gradients(case.model, case.batches, loss, 0.25)
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in expected.values()))
    for device, (gradients, _, _) in enumerate(ranks):
        wanted = oracle.cut(expected, case.tensors, layout, *divmod(device, layout.tp), case.spec.layers)
        assert gradients.keys() == wanted.keys()
        errors = {key: (gradient - wanted[key]).double().norm().item() for key, gradient in gradients.items()}
        for key, error in errors.items():
            assert error <= 4 * tolerance * expected[key].norm(), f"{key} on position {device}: {error:.2e}"
        assert math.hypot(*errors.values()) <= tolerance * norm
    assert math.sqrt(sum(square for *_, square in ranks)) == pytest.approx(norm, rel=tolerance)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_and_their_norm_equal_the_unsharded_model_in_fp64(name: str, layout: Layout) -> None:
    case = Case(name, "fp64")
    ranks = case.train(layout, LM_OUTPUTS, policy_loss)
    assert_gradients(case, layout, ranks, policy_loss, 1e-11)
    tokens = sum(int(batch.response_lengths.sum()) for batch in case.batches)
    assert ranks[-1][1]["tokens"] == tokens
    assert all(not sums for _, sums, _ in ranks[: (layout.pp - 1) * layout.tp])


@pytest.mark.parametrize(("name", "layout"), [("llama", ONE), ("llama-tied", SQUARE), ("qwen3", REPLICATED_KV)])
def test_gradients_and_their_norm_equal_the_unsharded_model_in_fp32(name: str, layout: Layout) -> None:
    case = Case(name)
    assert_gradients(case, layout, case.train(layout, LM_OUTPUTS, policy_loss), policy_loss, 1e-6)


@pytest.mark.parametrize("layout", [ONE, SQUARE])
def test_scalar_head_gradients(layout: Layout) -> None:
    case = Case("qwen2", "fp64", Head.SCALAR)
    assert_gradients(case, layout, case.train(layout, ("values", "scores"), value_loss), value_loss, 1e-11)


@pytest.mark.parametrize("layout", [ONE, SQUARE])
def test_recomputing_changes_nothing(layout: Layout) -> None:
    kept = Case("qwen3").train(layout, LM_OUTPUTS, policy_loss)
    again = Case("qwen3", recompute="full").train(layout, LM_OUTPUTS, policy_loss)
    for (expected, *_), (got, *_) in zip(kept, again, strict=True):
        assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_the_layer_that_is_recomputed_is_seen_by_the_ledger() -> None:
    peaks = {}
    for recompute in ("none", "full"):
        case, ledger = Case("qwen3", recompute=recompute), Ledger(0)
        with ledger.activations():
            train(case.decoder(ONE, 0, 0, UnitGroups()), case.batches, LM_OUTPUTS, policy_loss, 1.0)
        peaks[recompute] = ledger.by_category()["activations"]
        layers = case.spec.layers
    # All that one layer saves is there at once, beside the inputs of the others.
    assert peaks["none"] / layers < peaks["full"] < peaks["none"]


@pytest.mark.parametrize("layout", [ONE, SQUARE])
def test_bf16_gradients_accumulate_in_fp32(layout: Layout) -> None:
    case = Case("llama-tied", "bf16")
    ranks = case.train(layout, LM_OUTPUTS, policy_loss)
    reference = oracle.build("llama-tied", "bf16")[0].float()
    expected = oracle.gradients(reference, case.batches, policy_loss, 0.25)
    for device, (gradients, _, _) in enumerate(ranks):
        wanted = oracle.cut(expected, case.tensors, layout, *divmod(device, layout.tp), case.spec.layers)
        for key, gradient in gradients.items():
            assert gradient.dtype is torch.float32
            assert (gradient - wanted[key]).norm() <= 0.1 * wanted[key].norm(), key


def test_fewer_micro_batches_than_pp_ranks() -> None:
    case = Case("llama-tied", "fp64")
    case.batches = case.batches[:1]
    layout = Layout(1, 3)
    assert_gradients(case, layout, case.train(layout, LM_OUTPUTS, policy_loss), policy_loss, 1e-11)


def test_no_micro_batch_gives_zero_gradients() -> None:
    case = Case("llama")
    case.batches = []
    for gradients, sums, square in case.train(LINE, LM_OUTPUTS, policy_loss):
        assert not any(gradient.any() for gradient in gradients.values())
        assert (sums, square) == ({}, 0.0)


def test_parameters_are_left_as_they_were() -> None:
    case = Case("llama")
    decoder = case.decoder(ONE, 0, 0, UnitGroups())
    before = {name: parameter.clone() for name, parameter in decoder.params.items()}
    train(decoder, case.batches, LM_OUTPUTS, policy_loss, 1.0)
    for name, parameter in decoder.params.items():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert not parameter.requires_grad


def test_forward_before_training_does_not_spoil_it() -> None:
    case = Case("llama")
    decoder = case.decoder(ONE, 0, 0, UnitGroups())
    forward(decoder, case.batches, LM_OUTPUTS)
    gradients, _ = train(decoder, case.batches, LM_OUTPUTS, policy_loss, 0.25)
    assert_gradients(case, ONE, [(gradients, {}, square_norm(decoder, gradients))], policy_loss, 1e-6)


def test_1f1b_holds_no_more_micro_batches_than_ranks_ahead_and_paces_each_half() -> None:
    case, layout = Case("llama"), Layout(1, 2)
    case.batches = case.batches * 2
    held: dict[int, list[int]] = {0: [], 1: []}
    axes: set[str] = set()

    def main(pp_rank: int, tp_rank: int, groups: UnitGroups) -> int:
        alive: set[int] = set()
        paces = []

        @contextmanager
        def communicating(axis: str) -> Iterator[None]:
            axes.add(axis)
            yield

        hooks = Hooks(pace=lambda: paces.append(len(alive)), communicating=communicating)
        params = oracle.cut(case.full, case.tensors, layout, pp_rank, tp_rank, case.spec.layers)
        decoder = Decoder(case.spec, case.tensors, layout, pp_rank, tp_rank, params, groups, hooks=hooks)
        blocks = decoder.blocks

        def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            made = blocks(x, *rest)
            key = id(made)
            alive.add(key)
            held[pp_rank].append(len(alive))
            made.register_hook(lambda _: alive.discard(key))
            return made

        decoder.blocks = counted  # type: ignore[method-assign, assignment]
        train(decoder, case.batches, LM_OUTPUTS, policy_loss, 1.0)
        return len(paces)

    assert run_unit(layout, main) == [2 * len(case.batches)] * 2
    assert max(held[0]) == 2
    assert max(held[1]) == 1
    assert axes == {"pp"}


def test_a_decoder_refuses_what_does_not_fit_its_position() -> None:
    case = Case("llama")
    params = oracle.cut(case.full, case.tensors, PAIR, 0, 0, case.spec.layers)
    with pytest.raises(NereusError, match="has shape"):
        Decoder(case.spec, case.tensors, ONE, 0, 0, params, UnitGroups())
    with pytest.raises(NereusError, match="groups is"):
        Decoder(case.spec, case.tensors, PAIR, 0, 0, params, UnitGroups())
    del params["model.norm.weight"]
    with pytest.raises(NereusError, match=r"model\.norm\.weight"):
        Decoder(case.spec, case.tensors, PAIR, 0, 0, params, UnitGroups())
    with pytest.raises(NereusError, match="scalar head"):
        case.forward(ONE, ("values",))
    with pytest.raises(NereusError, match="unknown, valid: log_probs"):
        case.forward(ONE, ("logits",))
