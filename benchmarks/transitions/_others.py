"""The sides that the parts compare: ours by its two doors, and each other way to do the same.

Ours as shipped reads the memory of peers on its host; the sides that are "sent" use gloo alone, as everybody else does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks._result import Result
from benchmarks.transitions.sides import Measured, Side

EXECUTOR = Side("executor", "benchmarks.transitions.live:Side")
LIBRARY = Side("library", "benchmarks.transitions.library:Work")
EXECUTOR_SENT = Side("executor, sent", "benchmarks.transitions.live:Sent")
LIBRARY_SENT = Side("library, sent", "benchmarks.transitions.library:Sent")
IN_PLACE_SENT = Side("library in place, sent", "benchmarks.transitions.library:SentInPlace", keeps_target=True)
IN_PLACE = Side("library in place", "benchmarks.transitions.library:InPlace", keeps_target=True)
DIRECT = Side("direct exchange", "benchmarks.transitions.plain:Work")
SEQUENTIAL = Side("sequential source", "benchmarks.transitions.plain:Sequential")
BROADCAST = Side("packed broadcast, buffers ready", "benchmarks.transitions.plain:Broadcast", keeps_target=True)
PACKED = Side("packed broadcast, packing timed", "benchmarks.transitions.plain:PackedBroadcast")
DCP = Side("torch DCP, RAM disk", "benchmarks.transitions.checkpoint:Work", keeps_target=True)
RESTART = Side("process restart", "benchmarks.transitions.restart:Side")
REFIT = Side("Megatron-core refit", "benchmarks.baselines.megatron_refit:Work", "megatron", keeps_target=True)
MEGATRON = Side(
    "Megatron checkpoint, RAM disk", "benchmarks.baselines.megatron_checkpoint:Work", "megatron", keeps_target=True
)
DEEPSPEED = Side(
    "DeepSpeed universal, RAM disk", "benchmarks.baselines.deepspeed_universal:Side", "deepspeed", keeps_target=True
)
TENPLEX = Side("Tenplex", "benchmarks.baselines.tenplex:Side", "tenplex", "mlfsd")
TORCHFT = Side("torchft in place", "benchmarks.baselines.torchft_transport:Work", "torchft", keeps_target=True)

OURS = (EXECUTOR, LIBRARY)
SENT = (EXECUTOR_SENT, LIBRARY_SENT, IN_PLACE_SENT)


def described(found: Mapping[str, Measured], minimum_bytes: int) -> list[Result]:
    """One line a side: seconds, and bytes that left its processes beside M*."""
    lines: list[Result] = []
    for name, measured in found.items():
        written = measured.middle("written_bytes")
        notes = [measured.spread] if measured.seconds else [f"not run: {measured.reason}"]
        if measured.wrong:
            notes.append(f"WRONG: {len(measured.wrong)} tensors, {', '.join(measured.wrong[:2])}")
        elif measured.seconds:
            notes.append("equal bit for bit")
        if written == written:
            notes.append(f"{written / 1e6:.0f} MB written to sockets and files, {written / minimum_bytes:.3f} M*")
        details = {"seconds": measured.seconds, "answers": measured.answers, "wrong": measured.wrong}
        lines.append(Result(f"{name}, s", "report", measured.median_s, notes="; ".join(notes), details=details))
    return lines


def slower_at_most(limit: float, ours: Side, other: Side, found: Mapping[str, Measured]) -> Result:
    """Our seconds over another side's."""
    a, b = found[ours.name].median_s, found[other.name].median_s
    met = None if a != a or b != b else a / b <= limit
    return Result(f"{ours.name} / {other.name}", f"<= {limit:g}", a, b, a / b, met, notes=_reason(found, ours, other))


def faster_at_least(limit: float, ours: Side, other: Side, found: Mapping[str, Measured]) -> Result:
    """Another side's seconds over ours."""
    a, b = found[ours.name].median_s, found[other.name].median_s
    met = None if a != a or b != b else b / a >= limit
    return Result(f"{other.name} / {ours.name}", f">= {limit:g}", a, b, b / a, met, notes=_reason(found, ours, other))


def payload(limit: float, sides: Sequence[Side], found: Mapping[str, Measured], minimum_bytes: int) -> list[Result]:
    """Bytes received over M*, and of sides that send all, bytes that their processes wrote."""
    lines = []
    for side in sides:
        measured = found[side.name]
        counts = (("received_bytes", "payload received"), ("written_bytes", "bytes on the wire"))
        for key, what in counts if side in SENT else counts[:1]:
            size = measured.middle(key)
            met = None if size != size else size <= limit * minimum_bytes
            lines.append(
                Result(f"{side.name}: {what} / M*", f"<= {limit:g}", size, minimum_bytes, size / minimum_bytes, met)
            )
    return lines


def _reason(found: Mapping[str, Measured], *sides: Side) -> str:
    return "; ".join(f"{side.name}: {found[side.name].reason}" for side in sides if found[side.name].reason)
