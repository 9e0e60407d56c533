"""Sizes as people write them: `24 MiB`, `80 GB`, `25 GB/s`; integers of bytes inside. And what a number may be."""

from __future__ import annotations

import re

from nereus.core.errors import SettingsError

_UNITS = {"B": 1} | {
    prefix + suffix: base ** (power + 1)
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate("KMGTP")
}
MOST_BYTES = 10**18
"""No device holds or moves more: sums of sizes stay integers of 64 bits."""
LEAST, MOST = 1e-30, 1e30
"""Of a rate, a share or a scale: what follows from several of them and from sizes is neither 0 nor infinite."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*")


def checked(value: float, what: str, least: float = LEAST, most: float = MOST) -> float:
    """The value, if it is a number within the limits. `what` names it in the SettingsError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SettingsError(f"{what} {value!r} must be a number of at least {least:g} and at most {most:g}")
    return value


def size_bytes(value: str | int | float, what: str) -> int:
    """Bytes of a size: a number of bytes, or a number with a unit. `what` names it in the SettingsError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(str(value))
        units = {name.lower(): factor for name, factor in _UNITS.items()}
        unit = (match[2] or "B").lower() if match else ""
        if match is None or unit not in units:
            raise SettingsError(
                f"{what} {value!r} is not a size: a number of bytes, or a number and one of {', '.join(_UNITS)}"
            )
        size = float(match[1]) * units[unit]
    if not 1 <= size <= MOST_BYTES:
        raise SettingsError(f"{what} {value!r}: must be more than 0 bytes and at most {MOST_BYTES:.0e}")
    return round(size)


def rate_bytes_per_s(value: str | int | float, what: str) -> float:
    """Bytes per second of a rate such as `25 GB/s`."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return float(size_bytes(text, what))


def show_seconds(seconds: float) -> str:
    """Seconds for people, three digits and no exponent above one: `0.0123`, `54.2`, `1,480`."""
    return f"{seconds:,.0f}" if abs(seconds) >= 99.95 else f"{seconds:.3g}"


def show_bytes(size: float) -> str:
    """A size for people, at least three digits: `24 MiB`, `1.5 KiB`, `1023 KiB`."""
    for power, prefix in reversed(tuple(enumerate("KMGTP", start=1))):
        scaled = size / 1024**power
        if abs(scaled) >= 1:
            return f"{scaled:.0f} {prefix}iB" if abs(scaled) >= 100 else f"{scaled:.3g} {prefix}iB"
    return f"{size:.0f} B"
