"""Elastic Model Units (paper §5): one model-stage replica with its TP/PP layout on named devices.

Thousands of units exist at once, so a set keeps them as blocks of device numbers; objects are made when asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from nereus.core.errors import SettingsError
from nereus.core.layout import Layout
from nereus.core.model_stage import ModelStage

if TYPE_CHECKING:
    from nereus.core.plan import Plan

Devices = tuple[int, ...]
"""The devices of one unit."""
_first = itemgetter(0)
_kind = attrgetter("model_stage", "layout")
_devices = attrgetter("devices")
_set = object.__setattr__


@dataclass(frozen=True, slots=True)
class EMU:
    """One replica. `devices[pp_rank * tp + tp_rank]` holds position (pp_rank, tp_rank)."""

    model_stage: ModelStage
    layout: Layout
    devices: Devices

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
class EMUBlock:
    """Units of one model-stage and one layout, which share no device: the devices of each."""

    model_stage: ModelStage
    layout: Layout
    devices: tuple[Devices, ...]
    _flat: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = self.layout.size
        sizes = set(map(len, self.devices))
        if not sizes <= {size} or len(set(chain.from_iterable(self.devices))) < size * len(self.devices):
            _check_apart(EMU(self.model_stage, self.layout, devices) for devices in self.devices)

    def units(self) -> tuple[EMU, ...]:
        """One object for each unit, made anew."""
        return tuple([_checked(self.model_stage, self.layout, devices) for devices in self.devices])

    @property
    def flat(self) -> bytes:
        """(units, size): the device numbers as 64-bit integers, for `np.frombuffer(block.flat, np.int64)`."""
        if self._flat is None:
            try:
                numbers = array("q", chain.from_iterable(self.devices))
            except OverflowError:
                most = max(chain.from_iterable(self.devices), key=abs)
                raise SettingsError(f"unit of {self.model_stage}: device {most}, must be below {2**63:,}") from None
            object.__setattr__(self, "_flat", numbers.tobytes())
        return self._flat or b""

    def without_devices(self, ids: frozenset[int]) -> EMUBlock:
        """The units that stay whole when the devices `ids` are gone."""
        whole = tuple(filter(ids.isdisjoint, self.devices))
        return self if len(whole) == len(self.devices) else EMUBlock(self.model_stage, self.layout, whole)


@dataclass(frozen=True, slots=True, eq=False)
class EMUSet:
    """The units that exist (E(S), paper §5), in an order that is kept. Units of one model-stage share no device.

    Units of one model-stage may differ in layout only between a transition that stopped half-way and the next one.
    """

    units: tuple[EMU, ...]
    _runs: tuple[EMUBlock, ...] = field(init=False, repr=False)
    """The units in their order; neighbours of one model-stage and layout are one block."""
    _blocks: Mapping[ModelStage, tuple[EMUBlock, ...]] = field(init=False, repr=False)
    _of: dict[ModelStage, tuple[EMU, ...]] = field(init=False, repr=False)
    """What `of` has made so far."""

    def __post_init__(self) -> None:
        found: dict[ModelStage, list[EMU]] = {}
        runs: list[EMUBlock] = []
        for (ms, layout), units in groupby(self.units, _kind):
            alike = list(units)
            found.setdefault(ms, []).extend(alike)
            runs.append(EMUBlock(ms, layout, tuple([unit.devices for unit in alike])))
        self._settle(tuple(runs))
        self._of.update({ms: tuple(sorted(units, key=_first_device)) for ms, units in found.items()})

    @classmethod
    def of_blocks(cls, blocks: Iterable[EMUBlock]) -> EMUSet:
        """The units of `blocks`, one block after another. Their objects are made when somebody asks for them."""
        made = cls.__new__(cls)
        runs = [list(alike) for _, alike in groupby(filter(_devices, blocks), _kind)]
        made._settle(tuple(alike[0] if len(alike) == 1 else _joined(alike) for alike in runs))
        return made

    def _settle(self, runs: tuple[EMUBlock, ...]) -> None:
        own: dict[ModelStage, list[EMUBlock]] = {}
        for run in runs:
            own.setdefault(run.model_stage, []).append(run)
        object.__setattr__(self, "_runs", runs)
        object.__setattr__(self, "_blocks", {ms: _by_layout(blocks) for ms, blocks in own.items()})
        object.__setattr__(self, "_of", {})

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The `units` of a set that was made of blocks, at first use; no other field is ever unset.

            They are a field, which the codec takes: no property can have its name, nor can a slotted class cache one.
            """
            if name != "units":
                raise AttributeError(f"an EMUSet has no {name}")
            made = {ms: {unit.devices: unit for unit in self.of(ms)} for ms in self._blocks}
            units = tuple(made[run.model_stage][devices] for run in self._runs for devices in run.devices)
            object.__setattr__(self, "units", units)
            return units

    def __eq__(self, other: object) -> bool:
        return self is other or (self._runs == other._runs if isinstance(other, EMUSet) else NotImplemented)

    def __hash__(self) -> int:
        return hash(tuple(map(_devices, self._runs)))

    def __reduce__(self) -> tuple[Any, ...]:
        return EMUSet.of_blocks, (self._runs,)

    def __iter__(self) -> Iterator[EMU]:
        return iter(self.units)

    def of(self, model_stage: ModelStage) -> tuple[EMU, ...]:
        """The units of one model-stage, ordered by first device (the order of batch shares, D5.8)."""
        if model_stage not in self._of:
            blocks = self.blocks(model_stage)
            units = tuple(unit for block in blocks for unit in block.units())
            self._of[model_stage] = units if len(blocks) == 1 else tuple(sorted(units, key=_first_device))
        return self._of[model_stage]

    def blocks(self, model_stage: ModelStage) -> tuple[EMUBlock, ...]:
        """The units of one model-stage by layout: one block for each, units and blocks ordered by first device."""
        return self._blocks.get(model_stage, ())

    def same_units(self, other: EMUSet) -> bool:
        """Whether both hold the same units, in whatever order."""
        return self._blocks == other._blocks

    def on(self, device: int) -> tuple[EMU, ...]:
        """The units that hold a position on `device`."""
        return tuple(unit for unit in self.units if device in unit.devices)

    def without_devices(self, ids: Collection[int]) -> EMUSet:
        """The units that stay whole when the devices `ids` are gone."""
        gone = frozenset(ids)
        return EMUSet.of_blocks(run.without_devices(gone) for run in self._runs)

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        """The model-stages present, in stage order."""
        return tuple(sorted(self._blocks, key=lambda ms: ms.sort_key))

    @property
    def devices(self) -> frozenset[int]:
        """Every device in use."""
        return frozenset(chain.from_iterable(unit for run in self._runs for unit in run.devices))


def _checked(model_stage: ModelStage, layout: Layout, devices: Devices) -> EMU:
    """A unit of a block, which has been looked at as one."""
    made = object.__new__(EMU)
    _set(made, "model_stage", model_stage)
    _set(made, "layout", layout)
    _set(made, "devices", devices)
    return made


def _first_device(unit: EMU) -> int:
    return unit.devices[0]


def _by_layout(runs: Sequence[EMUBlock]) -> tuple[EMUBlock, ...]:
    """The units of one model-stage as one block for each layout; units and blocks by first device."""
    alike: dict[Layout, list[EMUBlock]] = {}
    for run in runs:
        alike.setdefault(run.layout, []).append(run)
    blocks = [_ordered(_joined(each)) for each in alike.values()]
    devices = [device for block in blocks for unit in block.devices for device in unit] if len(blocks) > 1 else []
    if len(set(devices)) < len(devices):
        _check_apart(unit for block in blocks for unit in block.units())
    return tuple(sorted(blocks, key=lambda block: block.devices[0][0]))


def _joined(blocks: Sequence[EMUBlock]) -> EMUBlock:
    """Blocks of one kind as one."""
    if len(blocks) == 1:
        return blocks[0]
    return EMUBlock(*_kind(blocks[0]), tuple(chain.from_iterable(block.devices for block in blocks)))


def _ordered(block: EMUBlock) -> EMUBlock:
    """The same units by first device."""
    first = list(map(_first, block.devices))
    return block if first == sorted(first) else EMUBlock(*_kind(block), tuple(sorted(block.devices, key=_first)))


def _check_apart(units: Iterable[EMU]) -> None:
    """Units of one model-stage share no device."""
    seen: dict[int, EMU] = {}
    for unit in units:
        for device in unit.devices:
            other = seen.setdefault(device, unit)
            if other is not unit:
                raise SettingsError(f"device {device} is in two units of {unit.model_stage}: {other}; {unit}")


def expand(plan: Plan) -> EMUSet:
    """The units that realise a plan (Φ, paper §5), positions as the plan names them."""
    return EMUSet.of_blocks(EMUBlock(a.candidate.model_stage, a.candidate.layout, a.units) for a in plan.assignments)
