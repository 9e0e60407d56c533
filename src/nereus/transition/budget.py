"""The memory that a transition has to do with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus.core import SettingsError


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: `capacity` of each device, `other_bytes` of it in use by what is no unit's, `host_bytes` of each node.

    A device that `capacity` leaves out has no limit. `buffer_bytes` must be free on each that receives. `host_bytes` is
    for staging: nothing is staged on a node that has none, nor where another order exists.
    """

    capacity: Mapping[int, int] = field(default_factory=dict)
    other_bytes: Mapping[int, int] = field(default_factory=dict)
    host_bytes: Mapping[int, int] = field(default_factory=dict)
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("capacity", "other_bytes", "host_bytes"):
            for place, size in getattr(self, name).items():
                if not size >= 0:  # NaN is no size either
                    raise SettingsError(f"budget: {name} of {place} is {size}, at least 0 bytes are expected")
        if not self.buffer_bytes >= 0:
            raise SettingsError(f"budget: buffer_bytes is {self.buffer_bytes}, at least 0 bytes are expected")
