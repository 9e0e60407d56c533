"""What a job can really do; the planner never proposes outside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus.core.errors import SettingsError
from nereus.core.model_stage import ModelStage
from nereus.core.plan import RECOMPUTE

PLACEMENTS = ("any", "colocated", "disaggregated")


@dataclass(frozen=True, slots=True)
class Pin:
    """Degrees the user fixed for one model-stage; None leaves the planner free."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    micro_batch: int | None = None
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Empty `tp` or `pp` means every legal degree. `micro_batches` empty: powers of two up to the largest share."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ("none", "full")
    zero: tuple[int, ...] = (0,)
    expert_parallel: bool = False
    cp: tuple[int, ...] = (1,)
    vpp: tuple[int, ...] = (1,)
    sequence_parallel: bool = False
    offload: bool = False
    uneven_shares: bool = True
    asynchronous: bool = False
    max_tp: int | None = None
    max_pp: int | None = None
    dp: str = "any"
    """Which DP degrees are looked at: `any`, or `powers` of two."""
    placement: str = "any"
    """Who shares devices: `any`, `colocated` (all model-stages have the same), `disaggregated` (all but generation)."""
    pins: Mapping[ModelStage, Pin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.recompute) - set(RECOMPUTE)
        if unknown:
            raise SettingsError(f"capabilities: recompute {sorted(unknown)}, valid: {', '.join(RECOMPUTE)}")
        if self.dp not in ("any", "powers"):
            raise SettingsError(f"capabilities: dp {self.dp!r}, valid: any, powers")
        if self.placement not in PLACEMENTS:
            raise SettingsError(f"capabilities: placement {self.placement!r}, valid: {', '.join(PLACEMENTS)}")

    def pin(self, model_stage: ModelStage) -> Pin:
        """What the user fixed for `model_stage`."""
        return self.pins.get(model_stage, Pin())
