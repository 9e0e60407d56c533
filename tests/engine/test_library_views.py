"""What a rank keeps, taken as views of what it holds."""

from __future__ import annotations

import torch

from nereus.engine.groups import Group
from nereus.engine.library import LogicalTensor, Placement, Region, allocate, plan_routes, reshard, staying
from tests.support.library import VERIFIED
from tests.support.shards import bits, cut, halves
from tests.support.threads import each_rank


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def test_what_stays_as_a_contiguous_part_can_be_taken_as_a_view() -> None:
    names = {"rows": (0, (8, 6)), "columns": (1, (8, 6)), "elsewhere": (0, (8, 6))}
    tensors = [LogicalTensor(name, shape, "bfloat16") for name, (_, shape) in names.items()]
    source = Placement({name: halves(dim, shape, 2) for name, (dim, shape) in names.items()})
    boxes = {
        name: {rank: Region.along(shape, dim, *bounds) for rank, bounds in enumerate(((0, 2), (6, 8), (2, 6)))}
        if name != "columns"
        else {rank: Region.along(shape, dim, *bounds) for rank, bounds in enumerate(((0, 2), (4, 6), (2, 4)))}
        for name, (dim, shape) in names.items()
    }
    boxes["elsewhere"] = halves(1, (8, 6), 3)
    plan = plan_routes(tensors, source, Placement(boxes))

    def act(group: Group) -> list[str]:
        mine = cut(plan.tensors, plan.source, group.rank)
        keep = staying(plan, mine, group.rank)
        new = allocate(plan.tensors, plan.target, group.rank, keep=keep)
        reshard(plan, mine, new, group, VERIFIED)
        wanted = cut(plan.tensors, plan.target, group.rank)
        assert all(bits(new[name]) == bits(tensor) for name, tensor in wanted.items())
        assert all(storage(view) == mine[name].untyped_storage().data_ptr() for name, view in keep.items())
        return list(keep)

    assert each_rank(3, act) == [["rows"], ["rows"], []]
