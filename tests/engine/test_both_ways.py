"""A pair of ranks of which one reads the other's memory and answers with messages: neither takes one for the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from nereus.core import NereusError
from nereus.engine.exchange import Exchange
from nereus.engine.groups import GroupRegistry
from nereus.engine.messages import Part
from nereus.engine.transports.torch import Torch

SHAPE = (64, 1024)


@pytest.mark.parametrize("turn", range(5))
def test_what_is_read_and_what_is_sent_between_two_ranks_do_not_mix(turn: int) -> None:
    store = distributed.HashStore()
    readable = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    converted = (readable % 251).flip(0) + turn

    def run(rank: int) -> torch.Tensor:
        group = GroupRegistry(store, rank, 20).make("pair#1", (0, 1))
        into = torch.zeros(SHAPE)
        out = Part(readable, torch.float32) if rank == 0 else Part(converted, torch.bfloat16)
        inward = Part(into, torch.bfloat16 if rank == 0 else torch.float32)
        errors: list[NereusError] = []
        exchange = Exchange(Torch(group, 20), {1 - rank: [out]}, {1 - rank: [inward]}, 1 << 14, 1 << 18, errors.append)
        exchange.run(lambda: None)
        group.close()
        assert not errors
        return into

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1))
    assert torch.equal(first, converted.to(torch.bfloat16).to(torch.float32))
    assert torch.equal(second, readable)
