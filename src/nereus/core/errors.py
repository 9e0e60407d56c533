"""One error tree. Each message says what was asked, what was found and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class NereusError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code = 1


class SettingsError(NereusError):
    """The user's settings are wrong; nothing has been started."""

    exit_code = 2


class InfeasibleError(NereusError):
    """No plan fits. `short_bytes` maps a device to the bytes it lacks in the best plan that was found."""

    exit_code = 3

    def __init__(self, message: str, short_bytes: Mapping[int, int] | None = None) -> None:
        super().__init__(message)
        self.short_bytes = dict(short_bytes or {})


class TransitionError(NereusError):
    """A transition stopped before its goal. The units that are whole are in the outcome, not here."""


class TransportError(NereusError):
    """Communication failed: a peer is gone, a wait passed its deadline, or sizes disagree."""


class OutOfMemoryError(NereusError):
    """An allocation would exceed a device's configured capacity."""

    def __init__(self, device: int, wanted_bytes: int, used_bytes: int, capacity_bytes: int, what: str) -> None:
        super().__init__(
            f"device {device}: {what} needs {wanted_bytes:,} bytes, {used_bytes:,} of {capacity_bytes:,} are in use"
        )
        self.device = device
        self.wanted_bytes = wanted_bytes
        self.used_bytes = used_bytes
        self.capacity_bytes = capacity_bytes
        self.what = what

    def __reduce__(self) -> tuple[type, tuple[int, int, int, int, str]]:
        return (type(self), (self.device, self.wanted_bytes, self.used_bytes, self.capacity_bytes, self.what))


class WorkerLostError(NereusError):
    """A worker process died or stopped answering."""

    def __init__(self, device: int, reason: str) -> None:
        super().__init__(f"worker of device {device} is lost: {reason}")
        self.device = device
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return (type(self), (self.device, self.reason))


class FrameworkError(NereusError):
    """A host framework did something its adapter does not understand."""
