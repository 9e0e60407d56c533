"""Resharding cases that went wrong in public systems, through the library: packings, copies, optimizers, streams."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from nereus.core import NereusError, SettingsError
from nereus.engine.groups import Group
from nereus.engine.library import (
    Options,
    Region,
    Shard,
    describe,
    grouped,
    interleaved,
    module_tensors,
    optimizer_shards,
    restore_optimizer,
    stacked,
    stream_name,
    stream_seed,
    stream_shard,
    target_shards,
)
from tests.support.library import bare, empty, move, rows
from tests.support.threads import each_rank

H = 3


def numbered(*shape: int) -> torch.Tensor:
    """Every element its flat index."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def ran(size: int, act: Callable[[Group], Any]) -> list[Any]:
    """`act` on every rank; the first error is raised."""
    found = each_rank(size, act)
    for result in found:
        if isinstance(result, NereusError):
            raise result
    return found


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


class Stages:
    """A model of two layers and a user's own parameter, cut by PP or TP, with one optimizer a rank."""

    SHAPES: Mapping[str, tuple[int, ...]] = {"0.w": (4, 2), "0.b": (4,), "1.w": (4, 2), "1.b": (4,), "1.scale": ()}

    def __init__(self, tp: int, pp: int, rank: int) -> None:
        self.tp, self.rank = tp, rank % tp
        layers = range(2) if pp == 1 else range(rank, rank + 1)
        names = [name for name in self.SHAPES if int(name[0]) in layers] if rank < tp * pp else []
        self.parameters = {name: nn.Parameter(torch.zeros(self.place(name)[1].shape)) for name in names}

    def place(self, name: str, _: Any = None) -> tuple[tuple[int, ...], Region]:
        shape = self.SHAPES[name]
        return shape, Region.chunk(shape, 0, self.tp, self.rank) if shape else Region.whole(shape)


def restored(
    group: Group, old: Mapping[str, Shard], stages: Stages, kind: type[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer | None, dict[str, Shard]]:
    """The optimizer of `stages` after a transition, with the shards to go on from."""
    tensors, _ = describe(old, group)
    new = target_shards(stages.parameters, tensors, stages.place)
    move(group, old, new)
    optimizer = restore_optimizer(kind, stages.parameters, tensors, bare(new)) if stages.parameters else None
    return optimizer, optimizer_shards(stages.parameters, optimizer, stages.place, MARKS) if optimizer else {}


MARKS = ("tensor_model_parallel", "partition_dim", "sequence_parallel", "shared", "allreduce")


def filled(stages: Stages) -> Stages:
    for name, parameter in stages.parameters.items():
        whole = numbered(*stages.SHAPES[name]) + 1
        region = stages.place(name)[1]
        parameter.data.copy_(whole[tuple(map(slice, region.start, region.stop))])
    return stages


def grouped_adam(stages: Stages) -> torch.optim.Optimizer | None:
    p = stages.parameters
    groups: list[dict[str, Any]] = [
        {"params": [p[name] for name in p if name.endswith("w")], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p[name] for name in p if name.endswith("b")], "weight_decay": 0.0, "lr": 1e-2, "betas": (0.8, 0.9)},
    ]
    if "1.scale" in p:
        groups.append({"params": [p["1.scale"]], "lr": 5e-4, "name": "user"})
    return torch.optim.AdamW(groups) if p else None


def test_o05_groups_go_by_name_and_keep_their_options() -> None:
    def act(group: Group) -> list[tuple[Any, ...]]:
        stages = filled(Stages(1, 2, group.rank))
        optimizer = grouped_adam(stages)
        shards = optimizer_shards(stages.parameters, optimizer, stages.place) if optimizer else {}
        seen = []
        for tp in (1, 2):
            stages = Stages(tp, 1, group.rank)
            optimizer, shards = restored(group, shards, stages, torch.optim.AdamW)
            names = {id(parameter): name for name, parameter in stages.parameters.items()}
            for each in optimizer.param_groups if optimizer else ():
                members = tuple(names[id(parameter)] for parameter in each["params"])
                seen.append((tp, members, each["lr"], each["weight_decay"], each["betas"], each.get("name")))
        return seen

    decay, none = ("0.w", "1.w"), ("0.b", "1.b")
    wanted = [
        (tp, *options)
        for tp in (1, 2)
        for options in (
            (decay, 1e-2, 0.1, (0.9, 0.999), None),
            (none, 1e-2, 0.0, (0.8, 0.9), None),
            (("1.scale",), 5e-4, 1e-2, (0.9, 0.999), "user"),
        )
    ]
    assert ran(2, act) == [wanted, wanted[3:]]


def test_o01_o07_steps_are_scalars_and_the_next_update_changes_the_new_parameters() -> None:
    def act(group: Group) -> Any:
        stages = filled(Stages(1, 2, group.rank))
        optimizer = grouped_adam(stages)
        for _ in range(3 if optimizer else 0):
            for parameter in stages.parameters.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()  # type: ignore[union-attr]
        shards = optimizer_shards(stages.parameters, optimizer, stages.place) if optimizer else {}
        old = [weakref.ref(parameter) for parameter in stages.parameters.values()]
        stages = Stages(2, 1, group.rank)
        adam, new = restored(group, shards, stages, torch.optim.AdamW)
        assert adam is not None
        del shards, optimizer, parameter
        gc.collect()
        assert all(ref() is None for ref in old), "the old parameters are free"
        values = {name: parameter.detach().clone() for name, parameter in stages.parameters.items()}
        for parameter in stages.parameters.values():
            step = adam.state[parameter]["step"]
            assert (step.shape, step.dtype, step.device.type, step.item()) == ((), torch.float32, "cpu", 3.0)
            parameter.grad = torch.ones_like(parameter)
        adam.step()
        assert all(adam.state[parameter]["step"] == 4 for parameter in stages.parameters.values())
        return {name: not torch.equal(values[name], p) for name, p in stages.parameters.items()}, new.keys()

    for changed, names in ran(2, act):
        assert changed == dict.fromkeys(Stages.SHAPES, True)
        assert {name for name in names if "@" not in name} == set(Stages.SHAPES)


def test_o03_o04_moments_and_masters_keep_their_dtypes_and_values() -> None:
    odd = 1.0009765625  # bf16 cannot hold it

    def act(group: Group) -> Any:
        full = nn.Parameter(numbered(8, 2).to(torch.bfloat16))
        adam = torch.optim.Adam([full], lr=1e-3)
        adam.state[full] = {
            "step": torch.tensor(300.0),
            "exp_avg": torch.full((8, 2), odd),
            "exp_avg_sq": numbered(8, 2) * odd,
            "master": full.detach().float() + 1e-3,
        }
        shape, whole = (8, 2), Region.whole((8, 2))
        shards = optimizer_shards({"w": full}, adam, lambda *_: (shape, whole)) if group.rank == 0 else {}
        for tp in (2, 4):
            tensors, _ = describe(shards, group)
            box = Region.chunk(shape, 0, tp, group.rank)
            mine = {"w": nn.Parameter(torch.zeros(box.shape, dtype=torch.bfloat16))} if group.rank < tp else {}
            new = target_shards(mine, tensors, lambda *_, box=box: (shape, box))
            move(group, shards, new)
            adam = restore_optimizer(torch.optim.Adam, mine, tensors, bare(new)) if mine else adam
            shards = optimizer_shards(mine, adam, lambda *_, box=box: (shape, box)) if mine else {}
        return adam.state[mine["w"]], mine["w"].detach()

    for rank, (state, parameter) in enumerate(ran(4, act)):
        assert parameter.dtype == torch.bfloat16
        assert state["step"].item() == 300
        assert {state[key].dtype for key in ("step", "exp_avg", "exp_avg_sq", "master")} == {torch.float32}
        assert (state["exp_avg"] == odd).all()
        assert torch.equal(state["exp_avg_sq"], (numbered(8, 2) * odd)[2 * rank : 2 * rank + 2])
        assert torch.equal(state["master"], parameter.float() + 1e-3)
        assert not torch.equal(state["master"].to(torch.bfloat16).float(), state["master"])


def test_o06_what_is_there_moves_whether_it_is_trained_or_not() -> None:
    def act(group: Group) -> Any:
        stages = filled(Stages(1, 2, group.rank))
        p = stages.parameters
        adam = torch.optim.AdamW(list(p.values()), lr=1e-2)
        for name, parameter in p.items():
            if name != "1.scale":  # never has a gradient
                parameter.grad = None if name == "0.b" else torch.ones_like(parameter)
        if "0.b" in p:
            p["0.b"].requires_grad_(False)  # frozen from the start
        adam.step()
        if "1.w" in p:
            p["1.w"].requires_grad_(False)  # trained, then frozen
        stages = Stages(2, 1, group.rank)
        new, _ = restored(group, optimizer_shards(p, adam, Stages(1, 2, group.rank).place), stages, torch.optim.AdamW)
        assert new is not None
        return {n: (sorted(new.state.get(q, {})), q.requires_grad) for n, q in stages.parameters.items()}

    keys = ["exp_avg", "exp_avg_sq", "step"]
    wanted = {"0.w": (keys, True), "0.b": ([], False), "1.w": (keys, False), "1.b": (keys, True), "1.scale": ([], True)}
    assert ran(2, act) == [wanted, wanted]


@pytest.mark.parametrize(("momentum", "keys"), [(0.0, []), (0.9, ["momentum_buffer"])])
def test_o11_no_state_is_invented(momentum: float, keys: list[str]) -> None:
    def act(group: Group) -> Any:
        stages = filled(Stages(1, 2, group.rank))
        sgd = torch.optim.SGD(list(stages.parameters.values()), lr=1e-2, momentum=momentum)
        for parameter in stages.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        sgd.step()
        after = Stages(2, 1, group.rank)
        shards = optimizer_shards(stages.parameters, sgd, stages.place)
        new, _ = restored(group, shards, after, torch.optim.SGD)
        assert new is not None
        return [sorted(k for k, v in new.state.get(p, {}).items() if v is not None) for p in after.parameters.values()]

    assert ran(2, act) == [[keys] * 5] * 2


def test_o09_a_new_replica_has_the_rate_of_the_old_one_and_makes_the_same_update() -> None:
    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 50)

    def act(group: Group) -> Any:
        whole = ((4,), Region.whole((4,)))
        p = nn.Parameter(numbered(4))
        adam: torch.optim.Optimizer = torch.optim.Adam([p], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, rate)
        for _ in range(37 if group.rank == 0 else 0):
            p.grad = torch.ones(4)
            adam.step()
            schedule.step()
        shards = optimizer_shards({"w": p}, adam, lambda *_: whole) if group.rank == 0 else {}
        tensors, _ = describe(shards, group)
        new = target_shards({"w": p}, tensors, lambda *_: whole) if group.rank else {}
        move(group, shards, new)
        if group.rank:
            adam = restore_optimizer(torch.optim.Adam, {"w": p}, tensors, bare(new))
            torch.optim.lr_scheduler.LambdaLR(adam, rate, last_epoch=36)  # its first step leads to 37
        p.grad = torch.full((4,), 2.0)
        adam.step()
        return adam.param_groups[0]["lr"], p.detach()

    (old_rate, old), (new_rate, new) = ran(2, act)
    assert old_rate == new_rate == pytest.approx(1e-2 * 38 / 50)
    assert torch.equal(old, new)


def test_r04_marks_on_parameters_are_there_after_every_transition() -> None:
    def act(group: Group) -> Any:
        stages = filled(Stages(1, 2, group.rank))
        for name, parameter in stages.parameters.items():
            parameter.sequence_parallel = name.endswith("b")
            parameter.allreduce = True
            if name.endswith("w"):
                parameter.tensor_model_parallel, parameter.partition_dim = True, 0
            if name == "0.w":
                parameter.shared = "first and last"
        optimizer = grouped_adam(stages)
        assert optimizer is not None
        shards = optimizer_shards(stages.parameters, optimizer, stages.place, MARKS)
        seen = []
        for tp in (2, 1, 2):
            stages = Stages(tp, 1, group.rank)
            _, shards = restored(group, shards, stages, torch.optim.AdamW)
            for name, p in stages.parameters.items():
                seen.append((name, {mark: getattr(p, mark) for mark in MARKS if hasattr(p, mark)}))
        return seen

    def marks(name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"sequence_parallel": name.endswith("b"), "allreduce": True}
        if name.endswith("w"):
            found |= {"tensor_model_parallel": True, "partition_dim": 0}
        return found | ({"shared": "first and last"} if name == "0.w" else {})

    for rank, seen in enumerate(ran(2, act)):
        assert seen == [(name, marks(name)) for name in Stages.SHAPES] * (3 - rank)


Generators = Mapping[str, torch.Generator]


def streams(generators: Generators) -> dict[str, Shard]:
    return {name: stream_shard(generator) for name, generator in generators.items()}


def follow(group: Group, old: Generators, names: Sequence[str], seed: int, position: int) -> dict[str, torch.Generator]:
    """This rank's streams after a transition: those that existed go on, others start from (seed, name, position)."""
    states = {name: empty(stream_shard(torch.Generator())) for name in names}
    _, report = move(group, streams(old), states)
    found = {}
    for name, shard in states.items():
        found[name] = torch.Generator()
        if name in report.fresh:
            found[name].manual_seed(stream_seed(seed, name, position))
        else:
            found[name].set_state(shard.tensor)
    return found


def draws(generator: torch.Generator, count: int) -> list[float]:
    return [float(value) for value in torch.rand(count, generator=generator)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_l01_every_position_goes_on_with_its_own_stream_wherever_it_moves(order: tuple[int, ...]) -> None:
    def act(group: Group) -> tuple[list[float], list[float]]:
        position, later = group.rank, order.index(group.rank)
        mine = {stream_name("position", position): torch.Generator().manual_seed(100 + position)}
        draws(mine[stream_name("position", position)], 3)
        (after,) = follow(group, mine, [stream_name("position", later)], 0, 0).values()
        unbroken = torch.Generator().manual_seed(100 + later)
        draws(unbroken, 3)
        return draws(after, 5), draws(unbroken, 5)

    assert all(got == wanted for got, wanted in ran(4, act))


def test_l02_new_replicas_get_streams_of_their_own_the_same_on_every_run() -> None:
    def act(group: Group) -> list[float]:
        name = stream_name("dp", group.rank)
        mine = {name: torch.Generator().manual_seed(stream_seed(7, name))} if group.rank < 2 else {}
        for generator in mine.values():
            draws(generator, 3)
        return draws(follow(group, mine, [name], seed=7, position=40)[name], 4)

    found, again = ran(4, act), ran(4, act)
    assert found == again
    assert len({tuple(each) for each in found}) == 4
    for rank, each in enumerate(found[:2]):
        unbroken = torch.Generator().manual_seed(stream_seed(7, stream_name("dp", rank)))
        assert draws(unbroken, 7)[3:] == each
    assert stream_seed(7, "a", 40) != stream_seed(7, "a", 41) != stream_seed(8, "a", 41)


def test_l03_masks_are_equal_in_the_replicated_region_and_differ_in_the_cut_one() -> None:
    def names(tp: int, rank: int) -> list[str]:
        return [stream_name("data", "dp", 0), stream_name("model", "dp", 0, "tp", rank, "of", tp)]

    def act(group: Group) -> list[list[float]]:
        old = {}
        if group.rank < 2:
            old = {name: torch.Generator().manual_seed(stream_seed(3, name)) for name in names(2, group.rank)}
            for generator in old.values():
                draws(generator, 6)
        after = follow(group, old, names(4, group.rank), seed=3, position=1)
        return [draws(generator, 8) for generator in after.values()]

    found = ran(4, act)
    assert len({tuple(replicated) for replicated, _ in found}) == 1
    assert len({tuple(cut) for _, cut in found}) == 4
    unbroken = torch.Generator().manual_seed(stream_seed(3, stream_name("data", "dp", 0)))
    assert draws(unbroken, 14)[6:] == found[0][0]


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

    def act(group: Group) -> bool:
        flat = torch.arange(views * each, dtype=torch.float32) if group.rank == 0 else torch.zeros(views * each)
        shards = {f"v{i}": Shard(view) for i, view in enumerate(flat.view(views, each))}
        move(group, shards if group.rank == 0 else {}, shards if group.rank else {}, Options(timeout_s=30))
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
