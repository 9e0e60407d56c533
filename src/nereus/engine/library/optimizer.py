"""A torch optimizer's state by the names of its parameters: taken apart into shards and put together again (D6.7).

`Optimizer.load_state_dict` is not used: it casts moments to the parameter's dtype and goes by index. What travels is
what is there: a parameter without state arrives without, frozen or not; no state is invented.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nereus.core import SettingsError
from nereus.engine.library.describe import Shard
from nereus.transition.boxes import LogicalTensor
from nereus.transition.region import Region

Place = Callable[[str, torch.Tensor], tuple[tuple[int, ...], Region]]
"""(name, parameter) → shape of the whole parameter, and this rank's box of it."""

STATE = "@"
"""Between a parameter's name and the key of a state tensor: `layers.0.q@exp_avg`."""


def optimizer_shards(
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    place: Place,
    marks: tuple[str, ...] = (),
) -> dict[str, Shard]:
    """Parameters and their state tensors, with everything else of the optimizer as attributes.

    State of the parameter's shape has its box; other state (step counters) is whole on every rank that has it. `marks`
    are names of attributes that the framework puts on its parameters.
    """
    groups = _groups(optimizer)
    found: dict[str, Shard] = {}
    for name, parameter in parameters.items():
        if STATE in name:
            raise SettingsError(f"parameter {name}: its name must not contain {STATE!r}")
        shape, region = place(name, parameter)
        state = optimizer.state.get(parameter, {})
        plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        attributes = {
            "group": groups.get(id(parameter)),
            "state": plain,
            "requires_grad": parameter.requires_grad,
            "marks": {mark: getattr(parameter, mark) for mark in marks if hasattr(parameter, mark)},
        }
        found[name] = Shard(parameter.detach(), shape, region, attributes)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                like = value.shape == parameter.shape
                found[name + STATE + key] = Shard(value, shape if like else None, region if like else None)
    return found


def target_shards(
    parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, LogicalTensor], place: Place
) -> dict[str, Shard]:
    """Where the values of new `parameters` and of their state arrive: the parameters themselves, and new tensors."""
    keys: dict[str, list[str]] = {}
    for full in tensors:
        name, mark, key = full.rpartition(STATE)
        if mark:
            keys.setdefault(name, []).append(key)
    found: dict[str, Shard] = {}
    for name, parameter in parameters.items():
        shape, region = place(name, parameter)
        found[name] = Shard(parameter.detach(), shape, region)
        for key in keys.get(name, ()):
            logical = tensors[name + STATE + key]
            box = region if logical.shape == shape else Region.whole(logical.shape)
            where = parameter.device if logical.shape == shape else torch.device("cpu")
            made = torch.empty(box.shape, dtype=getattr(torch, logical.dtype), device=where)
            found[name + STATE + key] = Shard(made, logical.shape, box)
    return found


def restore_optimizer(
    kind: type[torch.optim.Optimizer],
    parameters: Mapping[str, torch.Tensor],
    tensors: Mapping[str, LogicalTensor],
    held: Mapping[str, torch.Tensor],
    wrap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda _, state: state,
) -> torch.optim.Optimizer:
    """An optimizer over `parameters` with the groups and the state they had, by name.

    Copies nothing: state tensors are those of `held`, and values of parameters must already be in place. `wrap` makes
    of a local state tensor what the optimizer keeps beside a parameter (`dtensor.wrap`).
    """
    states: dict[str, dict[str, torch.Tensor]] = {}
    for full, tensor in held.items():
        name, _, key = full.rpartition(STATE)
        states.setdefault(name, {})[key] = tensor
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        attributes = tensors[name].attributes
        parameter.requires_grad_(attributes["requires_grad"])
        for mark, value in attributes["marks"].items():
            setattr(parameter, mark, value)
        if attributes["group"] is not None:
            key, options = attributes["group"]
            groups.setdefault(key, {**_tuples(options), "params": []})["params"].append(parameter)
    if not groups:
        raise SettingsError("no parameter belongs to an optimizer group")
    optimizer = kind([groups[key] for key in sorted(groups, key=_natural)])
    for name, parameter in parameters.items():
        own = {key: wrap(parameter, tensor) for key, tensor in states.get(name, {}).items()}
        state = {**tensors[name].attributes["state"], **own}
        if state:
            optimizer.state[parameter] = state
    return optimizer


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, list[Any]]:
    """id of a parameter → key of its group and the group's options. A group's own `name` is its key."""
    found: dict[int, list[Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        tensors = [key for key, value in options.items() if isinstance(value, torch.Tensor)]
        if tensors:
            raise SettingsError(f"optimizer group {index}: option {tensors[0]} is a tensor; only plain values travel")
        for parameter in group["params"]:
            found[id(parameter)] = [str(group.get("name", index)), options]
    return found


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON made lists of tuples; torch's options know only tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _natural(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdigit() else (1 << 30, key)
