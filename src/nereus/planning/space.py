"""The space of plans that the search is exact over: how model-stages may share a pool (D7.5).

A *shape* says who shares devices with whom; how many devices each part gets is left to the search.

- The pool is cut into disjoint partitions (`cuts`): one (colocated); every way to deal the stages to two or three; and,
  for jobs of up to `FEW` model-stages, every set of model-stages against the rest (the paper's Fig. 6).
- A partition runs one stage at a time. The models of a stage in a partition form groups, in every way: a group's models
  take turns on the same devices, groups have disjoint devices and run at the same time.
- A part is a whole number of slots: nodes, or devices where the pool is a single node. A model-stage uses the front
  of its group's part.
- What a model-stage may look like is in `grid.py`.

A host may allow less (`placed`): all model-stages take turns on the same devices, or all but generation do, beside it.

Time is the longest path of calls that follows (`cost/schedule.py`). Memory of a partition: what stays of a stage is the
largest sum over its groups, stages add up, and the largest transient of any call comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from nereus.core import ModelStage, Stage

FEW = 6

Group = tuple[ModelStage, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Partitions, each as groups of models; the groups of one stage in one partition have disjoint devices."""

    partitions: tuple[tuple[Group, ...], ...]

    @property
    def order(self) -> tuple[ModelStage, ...]:
        """Every model-stage; those that usually take longest first."""
        every = [ms for groups in self.partitions for group in groups for ms in group]
        return tuple(sorted(every, key=lambda ms: (RANK[ms.stage], ms.sort_key)))

    def home(self, model_stage: ModelStage) -> tuple[int, Group]:
        """The partition and the group of a model-stage."""
        return next((i, g) for i, groups in enumerate(self.partitions) for g in groups if model_stage in g)


RANK = {Stage.TRAINING: 0, Stage.GENERATION: 1, Stage.INFERENCE: 2}


@cache
def shapes(model_stages: Group, placement: str = "any") -> tuple[Shape, ...]:
    """Every shape that a placement of `Capabilities` allows, colocated ones first."""
    if placement != "any":
        return (placed(model_stages, placement),)
    return tuple(
        Shape(grouped) for cut in cuts(model_stages) for grouped in product(*(tuple(_grouped(part)) for part in cut))
    )


@cache
def apart(model_stages: Group) -> Shape:
    """Everything has devices of its own: no shape is faster."""
    return Shape(tuple(((model_stage,),) for model_stage in model_stages))


def placed(model_stages: Group, placement: str) -> Shape:
    """The shape of hosts whose roles share devices; the models of a stage take turns."""
    together = sharing(model_stages, placement)
    parts = together, tuple(ms for ms in model_stages if ms not in together)
    by_stage = tuple(
        tuple(tuple(ms for ms in part if ms.stage is stage) for stage in dict.fromkeys(ms.stage for ms in part))
        for part in parts
    )
    return Shape(tuple(groups for groups in by_stage if groups))


def sharing(model_stages: Group, placement: str) -> Group:
    """The model-stages that must have the same devices."""
    return {
        "any": (),
        "colocated": model_stages,
        "disaggregated": tuple(ms for ms in model_stages if ms.stage is not Stage.GENERATION),
    }[placement]


def cuts(model_stages: Group) -> tuple[tuple[Group, ...], ...]:
    """The sets of model-stages that have a part of the pool each."""
    stages = tuple(dict.fromkeys(ms.stage for ms in model_stages))
    found: dict[frozenset[Group], tuple[Group, ...]] = {}
    for dealt in set_partitions(stages):
        if len(dealt) <= 3:
            parts = tuple(tuple(ms for ms in model_stages if ms.stage in part) for part in dealt)
            found.setdefault(frozenset(parts), parts)
    if len(model_stages) <= FEW:
        for size in range(1, len(model_stages) // 2 + 1):
            for part in combinations(model_stages, size):
                parts = (part, tuple(ms for ms in model_stages if ms not in part))
                found.setdefault(frozenset(parts), parts)
    return tuple(sorted(found.values(), key=len))


def set_partitions(members: Sequence[object]) -> Iterator[tuple[tuple[object, ...], ...]]:
    """Every way to deal members to groups, all together first."""
    if len(members) <= 1:
        yield (tuple(members),) if members else ()
        return
    for rest in set_partitions(members[1:]):
        for index in range(len(rest)):
            yield (*rest[:index], (members[0], *rest[index]), *rest[index + 1 :])
        yield ((members[0],), *rest)


def _grouped(part: Group) -> Iterator[tuple[Group, ...]]:
    by_stage = [tuple(ms for ms in part if ms.stage is stage) for stage in dict.fromkeys(ms.stage for ms in part)]
    for chosen in product(*(tuple(set_partitions(members)) for members in by_stage)):
        yield tuple(group for groups in chosen for group in groups)  # type: ignore[misc]
