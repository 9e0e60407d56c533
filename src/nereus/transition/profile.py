"""What the tensors of a schema have in common: how many of each shape and cut a layer has, whatever the layout.

Found once for each schema. Layers of the same content are one *type*, so what is computed does not grow with depth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from nereus.core import Cut, Layout, StateSchema, TensorSpec, Where

K = TypeVar("K")
T = TypeVar("T")
Ints = NDArray[np.int64]
KNOWN = 64
"""So many schemas are remembered, the last ones used."""
KNOWN_LAYOUTS = 256
"""So many layouts of a schema, and as many pairs of them, are."""


class Recent(Generic[K, T]):
    """The values of up to `most` keys, the last ones asked for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K, make: Callable[[], T]) -> T:
        """The value of `key`, made when it is not there."""
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > self._most:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """How each of a profile's tensor kinds is cut for one TP degree: (kinds, tp) arrays of element counts."""

    start: Ints
    stop: Ints
    """The interval of the cut dim."""
    stored: Ints
    """Elements stored of one tensor, padding included."""


class Profile:
    """The tensor kinds of a schema: tensors of one shape and cut that the same pp ranks hold, layer by layer."""

    def __init__(self, schema: StateSchema) -> None:
        self.schema = schema
        found: dict[tuple[Where, tuple[int, ...], Cut], list[TensorSpec]] = {}
        for tensor in schema.tensors:
            found.setdefault((tensor.where, tensor.shape, tensor.cut), []).append(tensor)
        self.tensors = tuple(tuple(tensors) for tensors in found.values())
        self.samples = tuple(tensors[0] for tensors in self.tensors)
        inner = [Where.LAYER in key for key in found]
        per_layer = np.zeros((len(found), schema.layers), dtype=np.int64)
        for index, tensors in enumerate(found.values()):
            for tensor in tensors if inner[index] else ():
                per_layer[index, tensor.layer or 0] += 1
        types, self.type_of = np.unique(per_layer, axis=1, return_inverse=True)
        self.type_of = self.type_of.reshape(-1)
        self.counts: Ints = types.T.copy()
        """(types of layers, kinds): tensors of each kind in a layer."""
        self.ends: Mapping[Where, Ints] = {
            where: np.array([len(each) if where in key else 0 for key, each in found.items()], dtype=np.int64)
            for where in (Where.FIRST, Where.LAST, Where.BOTH_ENDS)
        }
        """(kinds,): tensors that belong to no layer."""
        self.row_elements: Ints = np.array([_row_elements(sample) for sample in self.samples], dtype=np.int64)
        self._shards = Recent[int, Shards](KNOWN_LAYOUTS)
        self._ranks = Recent[Layout, Ints](KNOWN_LAYOUTS)

    def shards(self, tp: int) -> Shards:
        """How `tp` ranks cut each kind."""
        return self._shards.get(tp, lambda: self._cut(tp))

    def _cut(self, tp: int) -> Shards:
        bounds = [[sample.interval(tp, rank) for rank in range(tp)] for sample in self.samples]
        both = np.array(bounds, dtype=np.int64).reshape(-1, tp, 2)
        stored = [[_product(sample.local_shape(tp, rank)) for rank in range(tp)] for sample in self.samples]
        return Shards(both[..., 0], both[..., 1], np.array(stored, dtype=np.int64).reshape(-1, tp))

    def ranks(self, layout: Layout) -> Ints:
        """(layers,): the pp rank that holds each layer."""
        return self._ranks.get(layout, lambda: self._holders(layout))

    def _holders(self, layout: Layout) -> Ints:
        lengths = [len(layout.layers_of(rank, self.schema.layers)) for rank in range(layout.pp)]
        return np.repeat(np.arange(layout.pp), lengths)


class PerSchema(Generic[T]):
    """What is made of a schema, once: `PerSchema(Profile)(schema)`. Schemas are told apart by identity."""

    def __init__(self, make: Callable[[StateSchema], T]) -> None:
        self._make = make
        self._known = Recent[int, tuple[StateSchema, T]](KNOWN)

    def __call__(self, schema: StateSchema) -> T:
        """The value for `schema`, which is kept with it, so that its id stays its own."""
        return self._known.get(id(schema), lambda: (schema, self._make(schema)))[1]

    def forget(self) -> None:
        """Make everything anew from now on."""
        self._known = Recent(KNOWN)


profile_of = PerSchema(Profile)


def end_ranks(where: Where, pp: int) -> tuple[int, ...]:
    """The pp ranks that hold what belongs to no layer."""
    ends = {Where.FIRST: (0,), Where.LAST: (pp - 1,), Where.BOTH_ENDS: (0, pp - 1)}[where]
    return tuple(dict.fromkeys(ends))


def _row_elements(sample: TensorSpec) -> int:
    """Elements of one index of the cut dim."""
    return sample.elements // sample.shape[sample.cut.dim or 0] if sample.shape else 1


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
