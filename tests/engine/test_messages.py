"""Messages and their staging buffer: both sides cut alike within the bounds, parts under way never overlap."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.engine.groups import as_bytes
from nereus.engine.messages import ALONE_BYTES, Message, Part, bundle_bytes, rounds
from nereus.engine.ring import Ring, padded


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


def view_of(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> Part:
    size = (*shape[:-1], 2 * shape[-1]) if shape and strided else shape
    whole = torch.zeros(size, dtype=dtype)
    return Part(whole[..., : shape[-1]] if shape and strided else whole, dtype)


SHAPES = {
    (700, 300): torch.float32,
    (3,): torch.bfloat16,
    (1, 40_001): torch.int8,
    (0, 4): torch.float32,
    (): torch.float64,
}


def test_both_sides_cut_a_pair_into_the_same_messages_within_the_bundle() -> None:
    out_parts, in_parts = (
        [view_of(shape, dtype, strided) for shape, dtype in SHAPES.items()] for strided in (False, True)
    )
    limit = bundle_bytes(1 << 20, 1)
    out, inward = rounds({1: out_parts}, {}, limit), rounds({}, {0: in_parts}, limit)

    def told(message: Message) -> list[tuple[torch.Size, torch.dtype]]:
        return [(part.view.shape, part.dtype) for part in message.parts]

    assert [[told(m) for _, m in one.sends] for one in out] == [[told(m) for _, m in one.receives] for one in inward]
    assert all(sum(message.bytes for _, message in one.sends) <= limit for one in out)
    for message in (message for one in out for _, message in one.sends):
        assert len(message.parts) == 1 or all(part.bytes < ALONE_BYTES for part in message.parts)
        start = 0
        for part in message.parts:
            assert start % part.dtype.itemsize == 0, "elements lie aligned"
            start += part.bytes
    assert sum(message.bytes for one in out for _, message in one.sends) == 700 * 300 * 4 + 6 + 40_001 + 8


def test_a_part_larger_than_the_bundle_is_cut_where_it_stays_contiguous() -> None:
    whole = Part(torch.arange(6 * 4096).reshape(1, 6, 4096), torch.int64)
    sent = [message.parts for one in rounds({0: [whole]}, {}, 2 * 4096 * 8) for _, message in one.sends]
    assert [part.view.shape for parts in sent for part in parts] == [(1, 2, 4096)] * 3
    assert all(part.plain for parts in sent for part in parts)
    assert torch.equal(torch.cat([part.view for parts in sent for part in parts], 1), whole.view)


def test_one_element_of_any_stride_travels_as_its_bytes() -> None:
    view = torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16)[1::2]
    assert Part(view, view.dtype).plain
    assert torch.equal(as_bytes(view).view(torch.bfloat16), torch.tensor([2.5], dtype=torch.bfloat16))
