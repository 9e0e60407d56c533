"""The staging buffer: parts never overlap while they are taken, and messages of a rank respect its bounds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.engine.library.messages import ALONE_BYTES, bundle_bytes, rounds
from nereus.engine.library.staging import Ring, padded
from nereus.transition.boxes import LogicalTensor, Placement, plan_routes
from nereus.transition.region import Region


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 30))
def test_parts_under_way_never_overlap_and_there_is_always_room_in_the_end(sizes: list[int], most_bytes: int) -> None:
    ring = Ring(sizes, most_bytes, torch.device("cpu"))
    assert ring.bytes <= max(max(sizes), most_bytes)
    under_way: list[tuple[torch.Tensor, int]] = []
    for number, size in enumerate(sizes):
        while not ring.has_room(size):
            part, value = under_way.pop(0)
            assert (part == value).all()
            ring.give_back(part.numel())
        part = ring.take(size)
        part.fill_(number)
        under_way.append((part, number))
    assert all((part == value).all() for part, value in under_way)
    if sum(sizes) <= most_bytes:
        assert len(under_way) == len(sizes)


def test_room_is_a_multiple_of_every_element_size() -> None:
    assert [padded(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_both_sides_cut_a_pair_into_the_same_messages_within_the_bundle() -> None:
    shapes = {"a": (700, 300), "b": (3,), "c": (40_001,), "d": ()}
    tensors = [
        LogicalTensor(name, shape, dtype)
        for (name, shape), dtype in zip(shapes.items(), ["float32", "bfloat16", "int8", "float64"], strict=True)
    ]
    source = Placement({t.name: {0: Region.whole(t.shape)} for t in tensors})
    plan = plan_routes(tensors, source, Placement({t.name: {1: Region.whole(t.shape)} for t in tensors}))
    limit = bundle_bytes(1 << 20, plan.most_peers)
    out, inward = rounds(plan, 0, limit), rounds(plan, 1, limit)
    assert [[m for _, m in one.sends] for one in out] == [[m for _, m in one.receives] for one in inward]
    assert all(sum(message.bytes for _, message in one.sends) <= limit for one in out)
    for message in (message for one in out for _, message in one.sends):
        assert len(message.parcels) == 1 or all(parcel.bytes < ALONE_BYTES for parcel in message.parcels)
        start = 0
        for parcel in message.parcels:
            assert start % plan.tensors[parcel.name].item_bytes == 0, "elements lie aligned"
            start += parcel.bytes
    assert sum(message.bytes for one in out for _, message in one.sends) == 700 * 300 * 4 + 6 + 40_001 + 8
