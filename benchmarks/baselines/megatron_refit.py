"""Megatron-core's in-memory resharding (its planner and executor) between two live models.

Its own gloo service needs CUDA streams, but the service is pluggable: this one sends and receives on the CPU. It moves
parameters alone, so both Adam moments are registered as parameters; ranks keep their places, as it has no assignment.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
from torch import distributed

from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import State, Units, filled, wrong


class Service:
    """What its executor calls to move a tensor: posts everything, then waits."""

    def __init__(self) -> None:
        self.sends: list[tuple[int, torch.Tensor, int]] = []
        self.receives: list[tuple[int, torch.Tensor, int]] = []

    def submit_send_with_id(self, task: int, tensor: torch.Tensor, peer: int) -> None:
        """To a peer, or to this rank itself."""
        self.sends.append((task, tensor, peer))

    def submit_recv_with_id(self, task: int, tensor: torch.Tensor, peer: int) -> None:
        """From a peer, or from this rank itself."""
        self.receives.append((task, tensor, peer))

    def run(self) -> None:
        """Carry out all that was submitted."""
        rank = distributed.get_rank()
        own = {task: tensor for task, tensor, peer in self.sends if peer == rank}
        works = [distributed.isend(tensor, peer, tag=task) for task, tensor, peer in self.sends if peer != rank]
        for task, tensor, peer in self.receives:
            if peer == rank:
                tensor.copy_(own[task])
            else:
                works.append(distributed.irecv(tensor, peer, tag=task))
        for work in works:
            work.wait()
        self.sends, self.receives = [], []


class Work:
    """Two models with memory of their own; the plan is made before the clock starts."""

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.rank, self.scenario = rank, scenario
        self.before = _module(scenario, scenario.source, filled(scenario.size, scenario.source, rank), rank)
        empty = {key: torch.full_like(part, -1.0) for key, part in filled(scenario.size, scenario.target, rank).items()}
        self.after = _module(scenario, scenario.target, empty, rank)
        self.plan = build_centralized_reshard_plan(self.before, self.after)

    def reset(self) -> None:
        """The target is overwritten."""

    def run(self) -> None:
        """Its executor, over the service."""
        execute_reshard_plan(self.plan, self.before, self.after, Service())

    def wrong(self) -> list[str]:
        """Of the target."""
        state: State = {self.after.keys[name]: part.detach() for name, part in self.after.named_parameters()}
        return wrong(state, self.scenario.size, self.scenario.target, self.rank)


def _module(scenario: Scenario, units: Units, state: State, rank: int) -> Any:
    """A tree of modules as its planner walks it: layers numbered within the stage, with their global number beside."""
    root = torch.nn.Module()
    root.keys = {}
    tensors = {tensor.name: tensor for tensor in scenario.size.tensors}
    numbers = [tensor.layer for tensor, _, _ in units.held(scenario.size, rank) if "layers" in tensor.name]
    first = min((number for number in numbers if number is not None), default=0)
    for (name, kind), part in state.items():
        tensor, path = tensors[name], name.split(".")
        if path[0] == "layers":
            path[1] = str(int(path[1]) - first)
        at = root
        for depth, each in enumerate(path):
            if not hasattr(at, each):
                at.add_module(each, torch.nn.Module())
            at = getattr(at, each)
            if depth == 1:
                at.layer_number = int(each) + first + 1
        parameter = torch.nn.Parameter(part, requires_grad=False)
        if tensor.dim is not None:
            parameter.tensor_model_parallel, parameter.partition_dim = True, tensor.dim
        at.register_parameter(kind, parameter)
        root.keys[".".join((*path, kind))] = (name, kind)
    root.pg_collection = SimpleNamespace(**_groups(units, rank), ep=None, expt_tp=None)
    return root


def _groups(units: Units, rank: int) -> dict[str, Any]:
    """Its tp, pp and dp groups; every rank makes all of them in one order."""
    tp, size = units.tp, units.tp * units.pp
    members = {
        "tp": [list(unit[first : first + tp]) for unit in units.devices for first in range(0, size, tp)],
        "pp": [list(unit[first::tp]) for unit in units.devices for first in range(tp)],
        "dp": [[unit[index] for unit in units.devices] for index in range(size)],
    }
    found: dict[str, Any] = {}
    for name, lists in members.items():
        for ranks in lists:
            group = distributed.new_group(ranks)
            if rank in ranks:
                found[name] = group
    return found
