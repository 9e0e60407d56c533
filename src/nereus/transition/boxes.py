"""Routes between any two placements of tensors on ranks, each rank holding a box of each tensor. Knows no architecture.

A framework says which rank holds which box of which logical tensor now and afterwards, and gets what each rank lacks:
every element from exactly one owner, spread over the replicas, owners on the same node first. A name stands for one
tensor of any kind: a parameter, a moment of it, its step counter, a buffer.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from nereus.core import SettingsError, TransitionError
from nereus.transition.region import Region, pieces
from nereus.transition.ribbons import Ribbon, Segment, deal

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4,
    "uint16": 2, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of an element, by torch's name of the dtype. Elements travel as bytes: the dtype is never interpreted."""

Boxes = Mapping[int, Region]
"""Rank → the box of one tensor it holds; ranks that hold nothing of it are left out, empty boxes are allowed."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One tensor of the job, whole: its global shape and torch's name of its dtype.

    `attributes` are JSON values that travel with the description (parameter group, sharding marks of the framework).
    A `fresh` tensor may be made anew by its targets where no source holds it (streams of random numbers).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise SettingsError(f"tensor {self.name}: dtype {self.dtype!r}, valid: {', '.join(ITEM_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise SettingsError(f"tensor {self.name}: shape {self.shape} has a negative size")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which box of each tensor, by the tensor's name.

    `replicas` may say which copy of the whole state a rank belongs to: each copy must then be complete. Without, all
    ranks together must be. Boxes that overlap are copies of one another.
    """

    boxes: Mapping[str, Boxes]
    replicas: Mapping[int, int] = field(default_factory=dict)

    def of(self, rank: int) -> dict[str, Region]:
        """Name → box of everything one rank holds."""
        return {name: boxes[rank] for name, boxes in self.boxes.items() if rank in boxes}

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that hold anything."""
        return frozenset(rank for boxes in self.boxes.values() for rank in boxes)


@dataclass(frozen=True, slots=True)
class Route:
    """One box of each of `names` (tensors that are placed alike), from `source` to `target`."""

    names: tuple[str, ...]
    region: Region
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BoxPlan:
    """Everything that changes between two placements. The same on every rank."""

    tensors: Mapping[str, LogicalTensor]
    source: Placement
    target: Placement
    routes: tuple[Route, ...]
    fresh: Mapping[int, tuple[str, ...]]
    """Rank → tensors of the target that no source holds: the framework makes them."""

    def bytes_of(self, route: Route) -> int:
        """Bytes that a route moves."""
        return route.region.elements * sum(self.tensors[name].item_bytes for name in route.names)

    @property
    def received_bytes(self) -> Counter[int]:
        """Rank → bytes it receives."""
        found: Counter[int] = Counter()
        for route in self.routes:
            found[route.target] += self.bytes_of(route)
        return found

    @property
    def sent_bytes(self) -> Counter[int]:
        """Rank → bytes it sends."""
        found: Counter[int] = Counter()
        for route in self.routes:
            found[route.source] += self.bytes_of(route)
        return found

    @property
    def most_peers(self) -> int:
        """The most ranks that any rank sends to or receives from."""
        to, come = defaultdict(set), defaultdict(set)
        for route in self.routes:
            to[route.source].add(route.target)
            come[route.target].add(route.source)
        return max((len(peers) for peers in (*to.values(), *come.values())), default=0)

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly when they have planned the same moves of the same tensors."""
        tensors = sorted((t.name, t.shape, t.dtype) for t in self.tensors.values())
        text = repr((tensors, [(r.names, r.region.start, r.region.stop, r.source, r.target) for r in self.routes]))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Class:
    """Tensors of one shape and dtype that both placements treat alike: what is found for one holds for all."""

    tensors: tuple[LogicalTensor, ...]
    source: Boxes
    target: Boxes


def plan_routes(
    tensors: Iterable[LogicalTensor],
    source: Placement,
    target: Placement,
    node_of: Mapping[int, int] | None = None,
    dropped: Collection[str] = (),
) -> BoxPlan:
    """The fewest moves from `source` to `target`: what a rank holds already does not travel.

    Raises TransitionError for a tensor that is not described, that no source holds whole, that the target holds only in
    part, or that the target does not hold at all, unless it is named in `dropped`.
    """
    known = {tensor.name: tensor for tensor in tensors}
    for placement, which in ((source, "source"), (target, "target")):
        _check_boxes(known, placement, which)
    lost = [name for name in source.boxes if name not in target.boxes and name not in dropped and not known[name].fresh]
    if lost:
        raise TransitionError(f"the target holds nothing of {_listed(lost)}; name what may be lost in `dropped`")
    made = {name for name in target.boxes if name not in source.boxes and known[name].fresh}
    ranges: list[tuple[_Class, Region, Ribbon]] = []
    for members in _classes(known, source, target, made):
        _check_whole(members, target)
        ranges.extend(_ranges(members, node_of))
    routes = tuple(_route(*ranges[index][:2], part) for index, part in deal([ribbon for _, _, ribbon in ranges]))
    fresh = {r: tuple(n for n in target.of(r) if n in made) for r in sorted(target.ranks)}
    return BoxPlan(known, source, target, routes, {rank: names for rank, names in fresh.items() if names})


def _check_boxes(known: Mapping[str, LogicalTensor], placement: Placement, which: str) -> None:
    for name, boxes in placement.boxes.items():
        if name not in known:
            raise TransitionError(f"the {which} places {name}, which is not described; described: {_listed(known)}")
        shape = known[name].shape
        for rank, box in boxes.items():
            if len(box.stop) != len(shape) or any(a > b for a, b in zip(box.stop, shape, strict=True)):
                raise TransitionError(f"{which}, rank {rank}: {box} does not lie in {name} of shape {shape}")


def _classes(
    known: Mapping[str, LogicalTensor], source: Placement, target: Placement, made: Collection[str]
) -> list[_Class]:
    found: dict[object, list[LogicalTensor]] = {}
    for name, boxes in target.boxes.items():
        if name in made:
            continue
        before = source.boxes.get(name, {})
        key = (known[name].shape, known[name].dtype, tuple(sorted(before.items())), tuple(sorted(boxes.items())))
        found.setdefault(key, []).append(known[name])
    return [
        _Class(tuple(same), source.boxes.get(same[0].name, {}), target.boxes[same[0].name]) for same in found.values()
    ]


def _check_whole(members: _Class, target: Placement) -> None:
    """Each replica of the target holds every element: a layer that no rank takes must not vanish silently."""
    name, shape = members.tensors[0].name, members.tensors[0].shape
    by_replica: dict[int, list[Region]] = {replica: [] for replica in target.replicas.values()} or {0: []}
    for rank, box in members.target.items():
        by_replica.setdefault(target.replicas.get(rank, 0), []).append(box)
    for replica, boxes in by_replica.items():
        missing = next(iter(_outside(Region.whole(shape), boxes)), None)
        if missing is not None:
            which = f"replica {replica} of the target" if target.replicas else "the target"
            raise TransitionError(f"{which} does not hold {missing} of {name}")


def _outside(region: Region, boxes: Sequence[Region]) -> Iterator[Region]:
    left = [region] if region.elements else []
    for box in boxes:
        left = [part for whole in left for part in whole.minus(box)]
    yield from left


def _ranges(members: _Class, node_of: Mapping[int, int] | None) -> Iterator[tuple[_Class, Region, Ribbon]]:
    """What the targets lack, cut so that each part has the same owners throughout."""
    sample = members.tensors[0]
    by_box: dict[Region, list[int]] = {}
    for rank, box in sorted(members.source.items()):
        if box.elements:
            by_box.setdefault(box, []).append(rank)
    holders = [(box, tuple(ranks)) for box, ranks in by_box.items()]
    wanted: dict[tuple[Region, tuple[int, ...]], list[int]] = {}
    for rank, box in sorted(members.target.items()):
        own = members.source.get(rank)
        for lacking in [box] if own is None else box.minus(own):
            for part, owners in pieces(lacking, holders):
                if not owners:
                    raise TransitionError(f"no source holds {part} of {sample.name}, which rank {rank} needs")
                wanted.setdefault((part, _near(owners, rank, node_of)), []).append(rank)
    for (part, owners), ranks in wanted.items():
        rows = part.shape[part.row_dim] if part.shape else 1
        row_bytes = part.elements // rows * sample.item_bytes
        yield members, part, Ribbon(owners, tuple(ranks), len(members.tensors), rows, row_bytes)


def _near(owners: tuple[int, ...], rank: int, node_of: Mapping[int, int] | None) -> tuple[int, ...]:
    if node_of is None:
        return owners
    return tuple(owner for owner in owners if node_of[owner] == node_of[rank]) or owners


def _route(members: _Class, part: Region, segment: Segment) -> Route:
    names = tuple(t.name for t in members.tensors[segment.first : segment.first + segment.count])
    return Route(names, part.rows(segment.start, segment.stop), segment.source, segment.target)


def _listed(names: Iterable[str], most: int = 5) -> str:
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more if found else "none"
