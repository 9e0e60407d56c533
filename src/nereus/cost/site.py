"""What a model-stage runs on: rates of its slowest device, links, and what has been learnt about operation classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nereus.core import Calibration, DeviceKind, Efficiency, Link
from nereus.cost import operations
from nereus.cost.kernels import Rates
from nereus.cost.rows import Floats

KNOWN_VARIANCE = 0.01
"""Of the logarithm of a class's efficiency on a device kind whose constants were fitted to measurements."""
FITTED = "gemm.share"
"""The constant without which those of a device kind do not count as fitted."""
UNCERTAINTY = "uncertainty"
"""Constant of kinds whose other constants are those of a relative: deviation of the logarithm of an efficiency."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """`intra` joins the devices of a node, `inter` nodes. Learnt efficiencies are shares of the ideal rate by class.

    Known by identity: what follows from one is remembered.
    """

    rates: Rates
    intra: Link
    inter: Link
    calibration: Calibration
    kinds: tuple[DeviceKind, ...] = ()
    _known: dict[str, Efficiency] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def dispatch_s(self) -> float:
        """Seconds from a command to the workers of a call until all have answered."""
        return self.rates["dispatch_s"]

    @property
    def host_bytes_per_s(self) -> float:
        """Rate to host memory of the slowest device; 0 where nothing can be offloaded."""
        return min((kind.host_bytes_per_s for kind in self.kinds), default=0.0)

    def efficiency(self, name: str) -> Efficiency:
        """What is known about a class; before the first observation 1 with fitted constants, else conservative."""
        if name not in self._known:
            self._known[name] = self._efficiency(name)
        return self._known[name]

    def _efficiency(self, name: str) -> Efficiency:
        if name not in self.calibration.efficiency and FITTED in self.rates.named:
            deviation = max((kind.constants.get(UNCERTAINTY, 0.0) for kind in self.kinds), default=0.0)
            return Efficiency(1.0, 0, deviation**2 or KNOWN_VARIANCE)
        return operations.efficiency(self.calibration, name)

    def weigh(self, ideal: Mapping[str, Floats]) -> Floats:
        """Predicted seconds of ideal ones by class."""
        known = ((seconds, self.efficiency(name).value) for name, seconds in ideal.items())
        return np.asarray(sum(seconds if value == 1.0 else seconds / value for seconds, value in known))
