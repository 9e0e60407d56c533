"""Hashes of state: copies that differ anywhere are told apart, digests do not depend on the layout."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import EMU, Cut, Kind, Layout, StateSchema, TensorSpec, Where
from nereus.engine import digest
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.digest import digests, hashes, marks_of, quick_hash
from nereus.engine.executor import SLOWEST_HASHED_BYTES_PER_S, logical_digests
from nereus.engine.positions import Position
from tests.engine.crews import TRAINING
from tests.engine.fill import local, schema


def held(spec: StateSchema, units: list[EMU], thorough: bool) -> dict[int, tuple[EMU, object]]:
    marks = marks_of(spec, units)
    return {
        device: (unit, hashes(Position(unit, spec, local(spec, unit, device)), device, marks, thorough))
        for unit in units
        for device in unit.devices
    }


def test_the_digest_of_a_tensor_is_the_same_in_every_layout() -> None:
    spec = schema()
    found = []
    for layout, copies in ((Layout(), 2), (Layout(2), 1), (Layout(4), 1), (Layout(1, 3), 1), (Layout(2, 2), 2)):
        size = layout.size
        units = [EMU(TRAINING, layout, tuple(range(n * size, (n + 1) * size))) for n in range(copies)]
        found.append(digests(spec, marks_of(spec, units), held(spec, units, thorough=True)))
    assert found[0].keys() == {(tensor.name, kind) for tensor in spec.tensors for kind in spec.dtypes}
    assert all(other == found[0] for other in found)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    st.lists(st.integers(1, 16), min_size=0, max_size=3),
    st.booleans(),
    st.data(),
)
def test_a_bit_changed_is_seen_whatever_the_strides(
    dtype: torch.dtype, shape: list[int], strided: bool, data: st.DataObject
) -> None:
    wide = [*shape[:-1], 2 * shape[-1]] if shape and strided else shape
    whole = torch.randint(1, 120, wide, generator=torch.Generator().manual_seed(0)).to(dtype)
    view = whole[..., ::2] if shape and strided else whole
    before = quick_hash(view)
    assert quick_hash(view.clone()) == before, "strides do not matter"
    flat = view.clone(memory_format=torch.contiguous_format).reshape(-1).as_strided((view.numel(),), (1,))
    index = data.draw(st.integers(0, flat.numel() - 1))
    flat.view(torch.uint8)[index * flat.element_size()] ^= 1
    assert quick_hash(flat.view(view.shape)) != before


def test_slices_in_another_order_have_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SLICE_BYTES", 24)
    view = torch.arange(24.0).view(8, 3)
    assert quick_hash(view) == quick_hash(view.clone())
    assert quick_hash(view) != quick_hash(torch.cat([view[2:4], view[:2], view[4:]]))


def test_hashing_has_more_time_for_more_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waited(Exception):
        pass

    def call(_: Crew, devices: Iterable[int], message: Message, timeout_s: float) -> dict[int, Message]:
        raise Waited(timeout_s)

    monkeypatch.setattr(Crew, "call", call)
    rows = 1 << 20
    tensor = TensorSpec("w", (rows, 1 << 12), Where.LAYER, 0, Cut(0, rows))
    spec = StateSchema(1, (tensor,), {Kind.PARAM: "fp32"})
    with pytest.raises(Waited) as caught:
        logical_digests(Crew({}, ""), spec, [EMU(TRAINING, Layout(2), (0, 1))], 60.0)
    assert caught.value.args[0] == 60.0 + (8 << 30) / SLOWEST_HASHED_BYTES_PER_S
