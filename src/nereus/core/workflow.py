"""The calls of one RL step and the data that orders them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

from nereus.core.errors import SettingsError
from nereus.core.model_stage import ModelStage, Stage
from nereus.core.spec import ModelSpec


class Work(StrEnum):
    """What a call does with its model."""

    GENERATE = "generate"
    FORWARD = "forward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Call:
    """One model function call. `reads` and `writes` are columns of the sample table."""

    name: str
    model_stage: ModelStage
    work: Work
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workflow:
    """One RL step. `weight_syncs` copy parameters (source, target) once the source has been updated."""

    calls: tuple[Call, ...]
    specs: Mapping[str, ModelSpec]
    weight_syncs: tuple[tuple[ModelStage, ModelStage], ...] = ()
    asynchronous: bool = False
    precisions: Mapping[ModelStage, str] = field(default_factory=dict)
    """What matrix products of a model-stage run in, such as fp8, where not in its model's dtype."""

    def __post_init__(self) -> None:
        names = [call.name for call in self.calls]
        if len(set(names)) != len(names):
            raise SettingsError(f"workflow: call names repeat: {names}")
        missing = {call.model_stage.model for call in self.calls} - set(self.specs)
        if missing:
            raise SettingsError(f"workflow: no spec for {', '.join(sorted(missing))}")
        if any(call.work is Work.UPDATE and call.model_stage.stage is not Stage.TRAINING for call in self.calls):
            raise SettingsError("workflow: only training model-stages can be updated")
        try:
            self.order()
        except CycleError as error:
            raise SettingsError(f"workflow: the calls wait for each other: {error.args[1]}") from None

    def edges(self) -> tuple[tuple[str, str], ...]:
        """(earlier, later) call names: the writer of a column before its readers, updates after all else of a unit."""
        return _edges(self.calls)

    def order(self) -> tuple[str, ...]:
        """Call names in an order that respects every edge; else generation, inference, training, as in `calls`."""
        return _order(self.calls)

    def call(self, name: str) -> Call:
        """The call named `name`."""
        return next(call for call in self.calls if call.name == name)

    def calls_of(self, model_stage: ModelStage) -> tuple[Call, ...]:
        """The calls that one model-stage serves."""
        return tuple(call for call in self.calls if call.model_stage == model_stage)

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """Every model-stage, in stage order."""
        return tuple(sorted({call.model_stage for call in self.calls}, key=lambda ms: ms.sort_key))

    def spec(self, model_stage: ModelStage) -> ModelSpec:
        """The sizes of a model-stage's model."""
        return self.specs[model_stage.model]

    def precision(self, model_stage: ModelStage) -> str:
        """What matrix products of a model-stage run in."""
        return self.precisions.get(model_stage, self.spec(model_stage).dtype)

    def updated(self, model_stage: ModelStage) -> bool:
        """Whether the model-stage holds an optimizer."""
        return any(call.work is Work.UPDATE for call in self.calls_of(model_stage))


@lru_cache(maxsize=64)
def _edges(calls: tuple[Call, ...]) -> tuple[tuple[str, str], ...]:
    writers = {column: call.name for call in calls for column in call.writes}
    data = {(writers[c], call.name) for call in calls for c in call.reads if c in writers}
    state = {
        (other.name, call.name)
        for call in calls
        if call.work is Work.UPDATE
        for other in calls
        if other.model_stage == call.model_stage and other.work is not Work.UPDATE
    }
    return tuple(sorted(data | state))


@lru_cache(maxsize=64)
def _order(calls: tuple[Call, ...]) -> tuple[str, ...]:
    rank = {call.name: (call.model_stage.stage.order, index) for index, call in enumerate(calls)}
    before: dict[str, set[str]] = {name: set() for name in rank}
    for earlier, later in _edges(calls):
        before[later].add(earlier)
    sorter = TopologicalSorter(before)
    sorter.prepare()
    found: list[str] = []
    ready: set[str] = set()
    while sorter.is_active():
        ready |= set(sorter.get_ready())
        found.append(min(ready, key=rank.__getitem__))
        ready.remove(found[-1])
        sorter.done(found[-1])
    return tuple(found)
