"""Hashes of logical tensors: the same for every cut, another for every other order."""

from __future__ import annotations

import pytest
import torch

from nereus.engine.library import LogicalTensor, Region
from nereus.engine.library.digest import hash_box
from nereus.engine.packing import pack
from tests.support.shards import DTYPES, whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_of_a_tensor_does_not_depend_on_its_cut_and_sees_a_swap(dtype: str) -> None:
    tensor = LogicalTensor("w", (5, 6), dtype)
    full = whole(tensor)
    all_of_it = hash_box(full, Region.whole((5, 6)), (5, 6))
    for dim in (0, 1):
        parts = [Region.chunk((5, 6), dim, 4, index) for index in range(4)]
        assert sum(hash_box(full[box.within(Region.whole((5, 6)))], box, (5, 6)) for box in parts) % 2**64 == all_of_it
    swapped = full.clone()
    swapped[0], swapped[1] = full[1], full[0]
    assert hash_box(swapped, Region.whole((5, 6)), (5, 6)) != all_of_it
    assert hash_box(full.reshape(6, 5), Region.whole((6, 5)), (6, 5)) == all_of_it, "flat indices count"


def test_one_element_has_the_same_hash_whatever_its_stride() -> None:
    plain = torch.tensor([[3.0 + 4.0j]], dtype=torch.complex128)
    strided = torch.cat([plain, plain], dim=1)[:, ::2]
    assert strided.stride(-1) == 2
    box = Region.whole((1, 1))
    assert hash_box(strided, box, (1, 1)) == hash_box(plain, box, (1, 1))
    packed = torch.zeros(17, dtype=torch.uint8)
    pack(packed, [torch.ones(1, dtype=torch.uint8), strided])
    assert bytes(packed[1:].numpy().tobytes()) == plain.numpy().tobytes()
