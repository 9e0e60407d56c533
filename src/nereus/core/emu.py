"""Elastic Model Units (paper §5): one model-stage replica with its TP/PP layout on named devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nereus.core.errors import SettingsError
from nereus.core.layout import Layout
from nereus.core.model_stage import ModelStage

if TYPE_CHECKING:
    from nereus.core.plan import Plan


@dataclass(frozen=True, slots=True)
class EMU:
    """One replica. `devices[pp_rank * tp + tp_rank]` holds position (pp_rank, tp_rank)."""

    model_stage: ModelStage
    layout: Layout
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.layout.size:
            raise SettingsError(
                f"unit of {self.model_stage}: {self.layout} needs {self.layout.size} devices, got {self.devices}"
            )
        if len(set(self.devices)) != len(self.devices):
            raise SettingsError(f"unit of {self.model_stage}: a device appears twice in {self.devices}")

    def __hash__(self) -> int:
        # Units are told apart by their devices, almost always; plans have thousands.
        return hash((self.model_stage.model, self.devices))

    def __str__(self) -> str:
        return f"{self.model_stage} {self.layout} on {list(self.devices)}"

    def position(self, device: int) -> tuple[int, int]:
        """(pp_rank, tp_rank) of `device`."""
        return divmod(self.devices.index(device), self.layout.tp)

    def device(self, pp_rank: int, tp_rank: int) -> int:
        """The device at a position."""
        return self.devices[pp_rank * self.layout.tp + tp_rank]

    @property
    def entry_device(self) -> int:
        """Where outputs leave the unit: tp rank 0 of the last pp rank."""
        return self.device(self.layout.pp - 1, 0)


@dataclass(frozen=True, slots=True)
class EMUSet:
    """The units that exist (E(S), paper §5). Units of one model-stage never share a device.

    Units of one model-stage may differ in layout only between a transition that stopped half-way and the next one.
    """

    units: tuple[EMU, ...]
    _of: Mapping[ModelStage, tuple[EMU, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: dict[ModelStage, list[EMU]] = {}
        last, own = None, list[EMU]()
        for unit in self.units:
            if unit.model_stage is not last:  # most follow one of their own
                last = unit.model_stage
                own = found.setdefault(last, [])
            own.append(unit)
        for units in found.values():
            _check_apart(units)
        ordered = {ms: tuple(sorted(units, key=_first_device)) for ms, units in found.items()}
        object.__setattr__(self, "_of", ordered)

    def __iter__(self) -> Iterator[EMU]:
        return iter(self.units)

    def of(self, model_stage: ModelStage) -> tuple[EMU, ...]:
        """The units of one model-stage, ordered by first device (the order of batch shares, D5.8)."""
        return self._of.get(model_stage, ())

    def on(self, device: int) -> tuple[EMU, ...]:
        """The units that hold a position on `device`."""
        return tuple(unit for unit in self.units if device in unit.devices)

    def without_devices(self, ids: Collection[int]) -> EMUSet:
        """The units that stay whole when the devices `ids` are gone."""
        return EMUSet(tuple(unit for unit in self.units if not set(unit.devices) & set(ids)))

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """The model-stages present, in stage order."""
        return tuple(sorted(self._of, key=lambda ms: ms.sort_key))

    @property
    def devices(self) -> frozenset[int]:
        """Every device in use."""
        return frozenset(device for unit in self.units for device in unit.devices)


def _first_device(unit: EMU) -> int:
    return unit.devices[0]


def _check_apart(units: Sequence[EMU]) -> None:
    """Units of one model-stage share no device."""
    devices = [device for unit in units for device in unit.devices]
    if len(set(devices)) < len(devices):
        seen: dict[int, EMU] = {}
        for unit in units:
            for device in unit.devices:
                other = seen.setdefault(device, unit)
                if other is not unit:
                    raise SettingsError(f"device {device} is in two units of {unit.model_stage}: {other}; {unit}")


def expand(plan: Plan) -> EMUSet:
    """The units that realise a plan (Φ, paper §5), positions as the plan names them."""
    return EMUSet(
        tuple(
            EMU(a.candidate.model_stage, a.candidate.layout, devices) for a in plan.assignments for devices in a.units
        )
    )
