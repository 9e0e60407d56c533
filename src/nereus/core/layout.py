"""The TP and PP degrees inside a unit, and which layers each pp rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from nereus.core.errors import SettingsError
from nereus.core.spec import TensorSpec, Where


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """TP × PP inside a unit. `stage_layers` None: ceil/floor, larger first."""

    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise SettingsError(f"layout tp={self.tp} pp={self.pp}: both degrees must be at least 1")
        if self.stage_layers is not None and (len(self.stage_layers) != self.pp or min(self.stage_layers) < 0):
            raise SettingsError(f"stage_layers {self.stage_layers} must name {self.pp} layer counts")

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp}"

    @property
    def size(self) -> int:
        """Devices of one unit."""
        return self.tp * self.pp

    def common(self, *others: Layout) -> Layout:
        """The largest layout that this and all others can be split into: gcd of each degree (T_sub, paper §6.1)."""
        return Layout(gcd(self.tp, *(other.tp for other in others)), gcd(self.pp, *(other.pp for other in others)))

    def layers_of(self, pp_rank: int, layers: int) -> range:
        """The layers that pp rank `pp_rank` holds of a model with `layers` layers."""
        counts = self.stage_layers
        if counts is None:
            small, extra = divmod(layers, self.pp)
            counts = tuple(small + (rank < extra) for rank in range(self.pp))
        if sum(counts) != layers:
            raise SettingsError(f"stage_layers {counts} sum to {sum(counts)}, the model has {layers} layers")
        start = sum(counts[:pp_rank])
        return range(start, start + counts[pp_rank])

    def holds(self, tensor: TensorSpec, pp_rank: int, layers: int) -> bool:
        """Whether pp rank `pp_rank` holds a part of `tensor`."""
        match tensor.where:
            case Where.LAYER:
                return tensor.layer in self.layers_of(pp_rank, layers)
            case Where.FIRST:
                return pp_rank == 0
            case Where.LAST:
                return pp_rank == self.pp - 1
            case Where.BOTH_ENDS:
                return pp_rank in (0, self.pp - 1)
