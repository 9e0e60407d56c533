"""Optimizer state by name: groups, moments, masters, steps, marks; cases that went wrong in public systems."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from nereus.engine.groups import Group
from nereus.engine.library import (
    Region,
    Shard,
    describe,
    optimizer_shards,
    restore_optimizer,
    target_shards,
)
from tests.support.library import bare, move, numbered, ran


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
