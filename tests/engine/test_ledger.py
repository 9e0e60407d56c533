"""The ledger against an independent count of live storages."""

from __future__ import annotations

import gc

import pytest
import torch

from nereus.core import OutOfMemoryError
from nereus.engine.ledger import Ledger
from tests.oracles.storages import graph_storages, live_storages

MIB = 1 << 20


def test_a_storage_counts_once_however_often_it_is_held() -> None:
    ledger = Ledger(0)
    tensor = torch.zeros(1000)
    first = ledger.hold("state", tensor, tensor[:10])
    second = ledger.hold("buckets", tensor.view(10, 100))
    assert ledger.used_bytes == 4000
    first.release()
    first.release()
    assert ledger.used_bytes == 4000
    second.release()
    assert ledger.used_bytes == 0
    assert ledger.peak_bytes == 4000


def test_capacity_is_enforced_before_and_at_registration() -> None:
    ledger = Ledger(3, 10_000)
    held = ledger.hold("state", torch.zeros(2000))
    ledger.check("kv_cache", 2000)
    with pytest.raises(OutOfMemoryError, match="device 3: kv_cache needs 2,001 bytes, 8,000 of 10,000"):
        ledger.check("kv_cache", 2001)
    with pytest.raises(OutOfMemoryError):
        ledger.hold("kv_cache", torch.zeros(100), torch.zeros(1000))
    assert ledger.used_bytes == 8000, "a refused registration leaves nothing behind"
    held.release()


def test_an_unknown_category_is_refused() -> None:
    with pytest.raises(ValueError, match="valid: state"):
        Ledger(0).hold("weights", torch.zeros(1))


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.LayerNorm(64))]
    return torch.nn.Sequential(*layers)


def test_activations_agree_with_a_count_of_live_storages() -> None:
    torch.set_num_threads(1)
    ledger = Ledger(0)
    model = network()
    inputs = torch.randn(512, 64)
    state = ledger.hold("state", *model.parameters())
    known = live_storages()
    with ledger.activations():
        loss = model(inputs).square().mean()
    expected = {key: size for key, size in graph_storages(loss).items() if key not in known or size == inputs.nbytes}
    counted = ledger.used_bytes - sum(p.nbytes for p in model.parameters())
    assert counted == pytest.approx(sum(expected.values()), rel=0.1)
    assert counted > 10 * inputs.nbytes
    loss.backward()
    assert ledger.used_bytes == sum(p.nbytes for p in model.parameters()), "backward frees the activations"
    assert ledger.by_category()["activations"] == counted
    assert sum(ledger.by_category().values()) == ledger.peak_bytes
    ledger.reset_peak()
    assert ledger.peak_bytes == ledger.used_bytes
    state.release()


def test_state_gradients_and_graph_together_are_within_a_tenth_of_all_live_storages() -> None:
    torch.set_num_threads(1)
    gc.collect()
    before = set(live_storages())
    ledger = Ledger(0)
    model = network()
    inputs = torch.randn(512, 64)
    ledger.hold("state", *model.parameters())
    with ledger.activations():
        loss = model(inputs).square().mean()
    (loss * 1.0).backward(retain_graph=True)
    ledger.hold("gradients", *[p.grad for p in model.parameters() if p.grad is not None])
    found = live_storages() | graph_storages(loss)
    total = sum(size for key, size in found.items() if key not in before)
    assert ledger.used_bytes == pytest.approx(total, rel=0.1)


def test_activations_beyond_the_capacity_are_out_of_memory_and_freed() -> None:
    ledger = Ledger(1, 1 * MIB)
    model = network()
    with pytest.raises(OutOfMemoryError, match="activations"), ledger.activations():
        model(torch.randn(4096, 64))
    gc.collect()
    assert ledger.used_bytes == 0


def test_hooks_do_not_change_gradients() -> None:
    gradients = []
    for ledger in (None, Ledger(0)):
        model = network()
        inputs = torch.ones(8, 64)
        if ledger is None:
            model(inputs).sum().backward()
        else:
            with ledger.activations():
                loss = model(inputs).sum()
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_watched_tensor_counts_for_as_long_as_it_lives() -> None:
    ledger = Ledger(0, 5000)
    logits = torch.zeros(1000)
    ledger.watch("logits", logits)
    assert ledger.by_category()["logits"] == 4000
    with pytest.raises(OutOfMemoryError, match="logits needs 4,000"):
        ledger.watch("logits", torch.zeros(1000))
    del logits
    assert ledger.used_bytes == 0


def test_activations_of_an_update_that_ran_out_of_memory_are_let_go_of() -> None:
    ledger = Ledger(0, capacity_bytes=40_000)
    weight = torch.randn(16, 16, requires_grad=True)

    def attend() -> None:
        with ledger.activations():
            x = torch.randn(1, 1, 16, 16)
            for _ in range(100):  # attention saves its own output
                x = torch.nn.functional.scaled_dot_product_attention(x @ weight, x @ weight, x @ weight)

    with pytest.raises(OutOfMemoryError):
        attend()
    assert ledger.used_bytes == 0
