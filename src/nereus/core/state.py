"""What a unit carries: tensors described by a schema (they live in workers) and logical counters (Λ, paper §6.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nereus.core.emu import EMU
from nereus.core.errors import SettingsError
from nereus.core.spec import DTYPE_BYTES, TensorSpec


class Kind(StrEnum):
    """What a tensor is to the optimizer."""

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


@dataclass(frozen=True, slots=True)
class StateSchema:
    """The tensors of one model-stage and the dtype of each kind it holds of every one of them."""

    layers: int
    tensors: tuple[TensorSpec, ...]
    dtypes: Mapping[Kind, str]

    def __post_init__(self) -> None:
        if Kind.PARAM not in self.dtypes:
            raise SettingsError("state schema: every model-stage has parameters, kind 'param' is missing")
        unknown = [dtype for dtype in self.dtypes.values() if dtype not in DTYPE_BYTES]
        if unknown:
            raise SettingsError(f"state schema: dtype {unknown[0]!r}, valid: {', '.join(DTYPE_BYTES)}")

    @property
    def element_bytes(self) -> int:
        """Bytes of all kinds of one parameter element."""
        return sum(DTYPE_BYTES[dtype] for dtype in self.dtypes.values())

    def held(self, unit: EMU, device: int) -> tuple[tuple[TensorSpec, int, int], ...]:
        """(tensor, start, stop) along its cut dim for every tensor that `device` holds a part of in `unit`.

        Padded cuts may give an empty range: the tensor is then stored as padding alone.
        """
        pp_rank, tp_rank = unit.position(device)
        layout = unit.layout
        return tuple(
            (tensor, *tensor.interval(layout.tp, tp_rank))
            for tensor in self.tensors
            if layout.holds(tensor, pp_rank, self.layers)
        )

    def stored_bytes(self, unit: EMU, device: int) -> int:
        """Bytes that `device` stores for `unit`, padding and every kind included."""
        _, tp_rank = unit.position(device)
        elements = 0
        for tensor, _, _ in self.held(unit, device):
            product = 1
            for size in tensor.local_shape(unit.layout.tp, tp_rank):
                product *= size
            elements += product
        return elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class LogicalState:
    """Counters of one model-stage: optimizer updates, versions, and the data position of the last finished update."""

    update_count: int = 0
    model_version: int = 0
    policy_version: int = 0
    position: int = 0
