"""Bytes that positions store, own, share and overlap: closed forms over layers of one type (D6.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from nereus.core import Layout, ModelStage, SettingsError, StateSchema
from nereus.transition.profile import KNOWN_LAYOUTS, Ints, PerSchema, Profile, Recent, end_ranks, profile_of


def need_schemas(schemas: Mapping[ModelStage, StateSchema], model_stages: Iterable[ModelStage]) -> None:
    """Raises SettingsError for a model-stage of which nobody has said what it keeps."""
    for model_stage in model_stages:
        if model_stage not in schemas:
            given = ", ".join(map(str, schemas)) or "no model-stage"
            raise SettingsError(f"no state schema of {model_stage} is given, only of: {given}")


class Sizes:
    """Byte counts for the positions of any layouts of one schema; every kind is counted. `sizes_of` keeps one each."""

    def __init__(self, schema: StateSchema) -> None:
        self._profile = profile_of(schema)
        self._bytes = schema.element_bytes
        self._stored, self._owned = (Recent[Layout, Ints](KNOWN_LAYOUTS) for _ in range(2))
        self._overlap, self._shared = (Recent[tuple[Layout, Layout], Ints](KNOWN_LAYOUTS) for _ in range(2))

    def stored(self, layout: Layout) -> Ints:
        """(positions,): bytes stored, padding included."""
        return self._stored.get(layout, lambda: self._alone(layout, self._profile.shards(layout.tp).stored))

    def owned(self, layout: Layout) -> Ints:
        """(positions,): bytes of the logical state, padding left out."""

        def owned() -> Ints:
            shards = self._profile.shards(layout.tp)
            return self._alone(layout, (shards.stop - shards.start) * self._profile.row_elements[:, None])

        return self._owned.get(layout, owned)

    def overlap(self, old: Layout, new: Layout) -> Ints:
        """(positions of `old`, positions of `new`): bytes of the logical state that both own."""
        return self._overlap.get((old, new), lambda: self._pairwise(old, new, _common))

    def shared(self, old: Layout, new: Layout) -> Ints:
        """(positions of `old`, of `new`): bytes of the tensors whose shard is the same, which keep their storage."""
        return self._shared.get((old, new), lambda: self._pairwise(old, new, _same))

    def _alone(self, layout: Layout, elements: Ints) -> Ints:
        """(kinds, tp) elements of a tensor → (positions,) bytes."""
        profile, pp = self._profile, layout.pp
        layers = np.zeros((len(profile.counts), pp), dtype=np.int64)
        np.add.at(layers, (profile.type_of, profile.ranks(layout)), 1)
        found = layers.T @ (profile.counts @ elements)
        for where, counts in profile.ends.items():
            for rank in end_ranks(where, pp):
                found[rank] += counts @ elements
        flat: Ints = (found * self._bytes).reshape(-1)
        return flat

    def _pairwise(self, old: Layout, new: Layout, common: Callable[[Profile, int, int], Ints]) -> Ints:
        """The same for pairs of positions, from (kinds, tp, tp) elements that `common` counts of a tensor."""
        profile = self._profile
        elements = common(profile, old.tp, new.tp)
        layers = np.zeros((len(profile.counts), old.pp, new.pp), dtype=np.int64)
        np.add.at(layers, (profile.type_of, profile.ranks(old), profile.ranks(new)), 1)
        found = np.einsum("tij,tab->iajb", layers, np.tensordot(profile.counts, elements, 1))
        for where, counts in profile.ends.items():
            if counts.any():
                each = np.tensordot(counts, elements, 1)
                for before in end_ranks(where, old.pp):
                    for after in end_ranks(where, new.pp):
                        found[before, :, after, :] += each
        flat: Ints = (found * self._bytes).reshape(old.size, new.size)
        return flat


sizes_of = PerSchema(Sizes)


def _common(profile: Profile, old: int, new: int) -> Ints:
    """(kinds, old tp, new tp): elements of one tensor that both ranks own."""
    one, other = profile.shards(old), profile.shards(new)
    low = np.maximum(one.start[:, :, None], other.start[:, None, :])
    high = np.minimum(one.stop[:, :, None], other.stop[:, None, :])
    found: Ints = np.maximum(high - low, 0) * profile.row_elements[:, None, None]
    return found


def _same(profile: Profile, old: int, new: int) -> Ints:
    """(kinds, old tp, new tp): elements that the new rank stores of one tensor, where its shard is the old rank's."""
    one, other = profile.shards(old), profile.shards(new)
    alike: NDArray[np.bool_] = one.stored[:, :, None] == other.stored[:, None, :]
    for mine, theirs in ((one.start, other.start), (one.stop, other.stop)):
        alike &= mine[:, :, None] == theirs[:, None, :]
    found: Ints = np.where(alike, other.stored[:, None, :], 0)
    return found
