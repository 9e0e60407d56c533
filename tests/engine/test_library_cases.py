"""Resharding cases that went wrong in public systems, through the library: packings, copies, dtypes, buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from nereus.core import SettingsError
from nereus.engine.groups import Group
from nereus.engine.library import (
    Options,
    Region,
    Shard,
    grouped,
    interleaved,
    module_tensors,
    optimizer_shards,
    stacked,
)
from tests.support.library import bare, empty, move, numbered, ran, rows
from tests.support.threads import each_rank

H = 3


def whole_on(rank: int, group: Group, **tensors: torch.Tensor) -> dict[str, Shard]:
    return {name: Shard(tensor) for name, tensor in tensors.items()} if group.rank == rank else {}


def parts(views: Mapping[str, torch.Tensor], tp: int, rank: int) -> dict[str, Shard]:
    """Views of one rank's fused tensor as shards: every part is cut along its first dim."""
    found = {}
    for name, view in views.items():
        shape = (view.shape[0] * tp, *view.shape[1:])
        found[name] = Shard(view, shape, Region.chunk(shape, 0, tp, rank))
    return found


def fused_walk(
    full: torch.Tensor,
    cut: Callable[[int, int], torch.Tensor],
    views: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    degrees: Sequence[int],
) -> None:
    """Through TP degrees; on each, every rank's fused tensor is what `cut(tp, rank)` says."""

    def act(group: Group) -> None:
        held = {"fused": full.clone()} if group.rank == 0 else {}
        before = 1
        for tp in degrees:
            old = parts(views(held["fused"]), before, group.rank) if held else {}
            held = {"fused": torch.full_like(cut(tp, group.rank), -1)} if group.rank < tp else {}
            new = parts(views(held["fused"]), tp, group.rank) if held else {}
            move(group, old, new)
            if held:
                assert torch.equal(held["fused"], cut(tp, group.rank)), f"tp {tp}, rank {group.rank}"
            before = tp

    ran(max(degrees), act)


def test_t06_groups_of_query_heads_with_their_key_and_value_are_cut_by_group_and_exported() -> None:
    full = numbered(16, H)  # q0 q1 k0 v0, q2 q3 k1 v1; two rows a head

    def views(fused: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return dict(zip("qkv", grouped(fused, (4, 2, 2)), strict=True))

    fused_walk(full, lambda tp, rank: full.chunk(tp)[rank], views, [1, 2, 1])

    def export(group: Group) -> dict[str, torch.Tensor]:
        old = parts(views(full.chunk(2)[group.rank].clone()), 2, group.rank)
        apart = {"q": torch.empty(8, H), "k": torch.empty(4, H), "v": torch.empty(4, H)}
        shaped = {name: tensor.view(2, -1, H) for name, tensor in apart.items()}
        move(group, old, {name: Shard(view) for name, view in shaped.items()} if group.rank == 0 else {})
        return apart

    q, k, v = ran(2, export)[0].values()
    assert torch.equal(q, full[[0, 1, 2, 3, 8, 9, 10, 11]])
    assert torch.equal(k, full[[4, 5, 12, 13]])
    assert torch.equal(v, full[[6, 7, 14, 15]])


def test_t07_parts_fused_on_each_rank_come_together_part_by_part() -> None:
    q, k, v = numbered(8, H), numbered(4, H) + 100, numbered(4, H) + 200

    def cut(tp: int, rank: int) -> torch.Tensor:
        return torch.cat([part.chunk(tp)[rank] for part in (q, k, v)])

    def views(fused: torch.Tensor) -> Mapping[str, torch.Tensor]:
        tp = 16 // fused.shape[0]
        return dict(zip("qkv", stacked(fused, (8 // tp, 4 // tp, 4 // tp)), strict=True))

    fused_walk(cut(1, 0), cut, views, [2, 1, 4, 1])


def test_t08_gate_and_up_are_cut_apart_also_into_three() -> None:
    gate, up = numbered(6, H), numbered(6, H) + 100

    def cut(tp: int, rank: int) -> torch.Tensor:
        return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])

    def views(fused: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return dict(zip(("gate", "up"), stacked(fused, (fused.shape[0] // 2,) * 2), strict=True))

    fused_walk(cut(1, 0), cut, views, [2, 3, 1])
    with pytest.raises(SettingsError, match=r"parts of \[4, 4\] rows make 8, the tensor has 12"):
        stacked(cut(1, 0), (4, 4))


def test_t09_alternating_rows_are_cut_by_pairs_or_refused() -> None:
    full = numbered(8, H)
    fused_walk(
        full,
        lambda tp, rank: full.chunk(tp)[rank],
        lambda fused: dict(zip(("gate", "up"), interleaved(fused), strict=True)),
        [2, 4, 1],
    )
    with pytest.raises(SettingsError, match="3 rows are not whole groups of 2"):
        interleaved(torch.zeros(3, H))  # F = 3 on two ranks


def test_t14_empty_shards_keep_dtype_and_dims_and_lose_nothing() -> None:
    full = {"six": numbered(6, 2).to(torch.bfloat16), "three": numbered(3, 2).to(torch.float8_e4m3fn)}
    sizes = {"six": (4, [2, 2, 2, 0]), "three": (8, [1, 1, 1, 0, 0, 0, 0, 0])}

    def act(group: Group) -> dict[str, torch.Tensor]:
        start = {name: Shard(full[name]) for name in full} if group.rank == 7 else {}
        spread = {
            name: empty(rows(full[name], ranks, group.rank)) for name, (ranks, _) in sizes.items() if group.rank < ranks
        }
        move(group, start, spread)
        two = {name: empty(rows(full[name], 2, group.rank)) for name in full} if group.rank < 2 else {}
        move(group, spread, two)
        return {**{f"spread {name}": shard.tensor for name, shard in spread.items()}, **bare(two)}

    found = ran(8, act)
    for name, (ranks, lengths) in sizes.items():
        held = [found[rank][f"spread {name}"] for rank in range(ranks)]
        assert [tensor.shape for tensor in held] == [(length, 2) for length in lengths]
        assert {tensor.dtype for tensor in held} == {full[name].dtype}
        got = torch.cat([found[rank][name].view(torch.uint8) for rank in range(2)])
        assert torch.equal(got, full[name].view(torch.uint8))


def test_t15_a_column_bias_is_cut_a_row_bias_is_whole_and_added_once() -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    full = {"up": up.weight, "up_bias": up.bias, "down": down.weight, "down_bias": down.bias}
    cuts = {"up": 0, "up_bias": 0, "down": 1}

    def placed(tp: int, rank: int) -> dict[str, Shard]:
        if rank >= tp:
            return {}
        return {
            name: rows(tensor.detach(), tp, rank, cuts[name]) if name in cuts else Shard(tensor.detach().clone())
            for name, tensor in full.items()
        }

    def act(group: Group) -> list[torch.Tensor]:
        outputs = []
        old = placed(1, group.rank)
        for tp in (2, 4, 1):
            new = {name: empty(shard) for name, shard in placed(tp, group.rank).items()}
            move(group, old, new)
            old = new
            partial = torch.zeros(5, 8, dtype=torch.float64)
            if new:
                w = bare(new)
                partial = torch.relu(x @ w["up"].t() + w["up_bias"]) @ w["down"].t()
                assert w["down"].is_contiguous()
                assert torch.equal(w["down_bias"], down.bias.detach())
            group.all_reduce(partial)
            outputs.append(partial + down.bias.detach())
        return outputs

    wanted = down(torch.relu(up(x))).detach()
    for outputs in ran(4, act):
        for output in outputs:
            torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)


def test_r01_copies_of_a_norm_move_when_equal_and_are_refused_by_name_when_not() -> None:
    def act(group: Group, spoil: bool) -> Any:
        norm = nn.Parameter(torch.ones(8))
        adam = torch.optim.Adam([norm], lr=0.1)
        for step in range(10):
            norm.grad = numbered(8) / (step + 1)  # the sum over the sequence-parallel ranks, equal on both
            adam.step()
        if spoil and group.rank == 1:
            adam.state[norm]["exp_avg"][3] *= 1.5
        old = optimizer_shards({"norm": norm}, adam, lambda _, p: (tuple(p.shape), Region.whole(p.shape)))
        new = {name: empty(shard) for name, shard in old.items()} if group.rank == 2 else {}
        old = old if group.rank < 2 else {}
        move(group, old, new)
        return adam.state[norm]["exp_avg"], bare(new)

    found = ran(3, lambda group: act(group, False))
    assert torch.equal(found[2][1]["norm@exp_avg"], found[0][0])
    for error in each_rank(3, lambda group: act(group, True)):
        assert "copies of norm@exp_avg [0:8] differ: ranks [0] and [1]" in str(error)


@pytest.mark.parametrize(
    "view",
    [lambda: numbered(6, 4).t(), lambda: numbered(4, 18)[:, 3:15:2], lambda: numbered(4, 1).expand(4, 6)],
    ids=["transposed", "columns", "expanded"],
)
def test_x01_views_of_any_strides_are_sent_right(view: Callable[[], torch.Tensor]) -> None:
    assert not view().is_contiguous()

    def act(group: Group) -> torch.Tensor:
        old = whole_on(0, group, w=view())
        new = {"w": empty(rows(view().contiguous(), 2, group.rank - 1, dim=1))} if group.rank else {}
        move(group, old, new)
        return bare(new).get("w", torch.empty(4, 0))

    assert torch.equal(torch.cat(ran(3, act), dim=1), view())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int16, torch.int64,
        torch.bool, torch.uint16, torch.complex64,
    ],
)  # fmt: skip
@pytest.mark.parametrize("dim", [0, 1])
def test_x02_every_dtype_is_exact_to_the_bit(dtype: torch.dtype, dim: int) -> None:
    random = torch.Generator().manual_seed(0)
    most, shape = 2 if dtype is torch.bool else 256, (6, 4 * dtype.itemsize)
    full = torch.randint(0, most, shape, dtype=torch.uint8, generator=random).view(dtype)

    def act(group: Group) -> torch.Tensor:
        new = {"w": empty(rows(full, 2, group.rank, dim))}
        move(group, {"w": rows(full, 2, group.rank)}, new)
        return new["w"].tensor

    found = ran(2, act)
    assert {tensor.dtype for tensor in found} == {dtype}
    assert torch.equal(torch.cat([tensor.view(torch.uint8) for tensor in found], dim), full.view(torch.uint8))


def test_x04_views_of_one_buffer_cost_what_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    views, each = 48, 500_000
    sent = []
    post = Group.post

    def counted(self: Group, sends: Any, receives: Any) -> Any:
        sent.append(sum(buffer.numel() for _, buffer in sends))
        return post(self, sends, receives)

    monkeypatch.setattr(Group, "post", counted)

    options = Options(timeout_s=30, read_memory=False)  # what is sent is counted

    def act(group: Group) -> bool:
        flat = torch.arange(views * each, dtype=torch.float32) if group.rank == 0 else torch.zeros(views * each)
        shards = {f"v{i}": Shard(view) for i, view in enumerate(flat.view(views, each))}
        move(group, shards if group.rank == 0 else {}, shards if group.rank else {}, options)
        return bool(torch.equal(flat, torch.arange(views * each, dtype=torch.float32)))

    assert ran(2, act) == [True, True]
    assert 96_000_000 <= sum(sent) <= 96_000_000 * 1.001


class Router(nn.Module):
    """A router with a bias that training changes, fp32 beside bf16 weights, and a table that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.tied = nn.Linear(4, 8, bias=False, device="meta")
        self.tied.weight = self.gate.weight
        self.register_buffer("expert_bias", torch.zeros(8))
        self.register_buffer("inv_freq", 1 / (10_000 ** (numbered(4) / 4)), persistent=False)


def test_e01_e02_persistent_buffers_move_with_their_dtype_and_computed_ones_stay() -> None:
    def act(group: Group) -> Router:
        torch.manual_seed(group.rank)
        router = Router()
        if group.rank == 0:
            router.expert_bias += 1.0009765625
        shards = {name: Shard(tensor.detach()) for name, tensor in module_tensors(router).items()}
        assert set(shards) == {"gate.weight", "expert_bias"}, "one name for a tied parameter, no computed buffer"
        move(group, shards if group.rank == 0 else {}, shards if group.rank else {})
        return router

    old, new = ran(2, act)
    assert torch.equal(old.gate.weight, new.gate.weight)
    assert new.tied.weight is new.gate.weight
    assert new.expert_bias.dtype == torch.float32
    assert (new.expert_bias == 1.0009765625).all()
    assert torch.equal(new.inv_freq, 1 / (10_000 ** (numbered(4) / 4)))
