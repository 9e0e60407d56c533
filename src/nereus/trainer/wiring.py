"""Which process groups the units need; names carry an epoch, intact units keep theirs (D5.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nereus.core import EMUSet, ModelStage, Workflow
from nereus.engine.connection import Message
from nereus.engine.crew import Crew


class Route(NamedTuple):
    """What a group is for (`tp`, `pp`, `dp` of a model-stage, `sync`) and its devices in rank order."""

    axis: str
    model_stage: ModelStage
    members: tuple[int, ...]


@dataclass(slots=True)
class Wiring:
    """The groups that exist now, by route. `wire` makes what is missing and drops what is no longer needed."""

    workflow: Workflow
    crew: Crew
    timeout_s: float
    names: dict[Route, str] = field(default_factory=dict)
    epoch: int = 0

    def wire(self, units: EMUSet) -> None:
        """Make every group that `units` need, in one order on all workers."""
        wanted = routes(self.workflow, units)
        gone = [route for route in self.names if route not in wanted]
        self._send("groups.drop", {self.names.pop(route): route.members for route in gone})
        self.epoch += 1
        new = {route: f"{route.axis}:{route.model_stage}:{index}#{self.epoch}" for index, route in enumerate(wanted)}
        new = {route: name for route, name in new.items() if route not in self.names}
        self.names |= new
        self._send("groups.make", {name: route.members for route, name in new.items()})
        for device in sorted(units.devices):
            self.crew.call((device,), Message("bind", {"groups": self._bindings(device)}), self.timeout_s)

    def reset(self) -> None:
        """Drop every group of every worker, for when some have lost theirs: all must be made again."""
        self.crew.call(sorted(self.crew.ready()), Message("groups.reset"), self.timeout_s)
        self.forget()

    def forget(self) -> None:
        """Workers have dropped every group: all must be made again."""
        self.names.clear()

    def sync(self, target: ModelStage) -> str:
        """Name of the group that carries weight synchronisation to a model-stage; empty when one device does it all."""
        return next((n for route, n in self.names.items() if route[:2] == ("sync", target)), "")

    def _bindings(self, device: int) -> dict[tuple[ModelStage, str], str]:
        return {(route.model_stage, route.axis): name for route, name in self.names.items() if device in route.members}

    def _send(self, command: str, groups: Mapping[str, tuple[int, ...]]) -> None:
        devices = sorted({device for members in groups.values() for device in members} & self.crew.ready())
        if not devices:
            return
        if command == "groups.make":
            fields: dict[str, object] = {"groups": [(name, members) for name, members in groups.items()]}
        else:
            fields = {"names": list(groups)}
        self.crew.call(devices, Message(command, fields), self.timeout_s)


def routes(workflow: Workflow, units: EMUSet) -> tuple[Route, ...]:
    """Every group of two or more devices, in a fixed order."""
    found: list[Route] = []
    for ms in units.model_stages:
        mine = units.of(ms)
        for unit in mine:
            tp, pp = unit.layout.tp, unit.layout.pp
            found += [Route("tp", ms, tuple(unit.device(p, t) for t in range(tp))) for p in range(pp)]
            found += [Route("pp", ms, tuple(unit.device(p, t) for p in range(pp))) for t in range(tp)]
        if workflow.updated(ms):
            size = mine[0].layout.size
            found += [Route("dp", ms, tuple(unit.devices[index] for unit in mine)) for index in range(size)]
    for source, target in workflow.weight_syncs:
        devices = {device for ms in (source, target) for unit in units.of(ms) for device in unit.devices}
        found.append(Route("sync", target, tuple(sorted(devices))))
    return tuple(route for route in found if len(route.members) > 1)
