"""`nereus calibrate`: measures this machine and writes it down as a cluster file.

Workers are started one a device on the loopback address, every wait has a deadline, and they end with the measurement.
One machine has no link between nodes: the file repeats the one inside, and says so.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nereus.clusters.file import written
from nereus.core import Cluster, Device, DeviceKind, Link, SettingsError
from nereus.core.files import write_whole
from nereus.core.sizes import show_bytes
from nereus.cost.kernel_fit import COLLECTIVE, Attentions, Collectives, Gemms, Kernels, errors, fit_kernels, fit_link
from nereus.cost.rows import Floats
from nereus.cost.site import UNCERTAINTY
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.microbench import Repeats
from nereus.engine.worker import DeviceSettings

PROGRAM = "nereus.engine.microbench.Microbench"
START_S, MEASURE_S = 120.0, 120.0
"""Deadlines: of workers to be ready, and of one kind of measurement."""
TORCH = {"bf16": "bfloat16", "fp32": "float32"}
GROUP = "calibrate"
STATE = ("move", "move_all", "copy", "hash")
MOVE, ALL = "state.bytes_per_s", "state.all_bytes_per_s"
COPY, HASH = "state.copy_bytes_per_s", "state.hash_bytes_per_s"
LEAST_SHARE = 0.5
"""Of what the larger amount of state takes, this much is not latency, however close the smaller comes."""
FEW_PROCESSES = 8
"""So many may share fewer cores."""
DOUBTFUL = 0.25
"""Median relative error of a class of operations above which its fit is not to be trusted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: sizes by class of operation."""

    precision: str
    gemm: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    decode: tuple[tuple[int, int, int, int], ...]
    stream_elements: int
    message_bytes: tuple[int, ...]
    state_bytes: tuple[int, int]
    """A little and a lot of the state that each device moves, copies and hashes while all others do."""
    repeats: Repeats


@dataclass(frozen=True, slots=True)
class Timings:
    """What was measured, before constants are fitted to it."""

    name: str
    memory_bytes: int
    precision: str
    gemm: Gemms
    attention: Attentions
    decode: Attentions
    stream_bytes_per_s: float
    launch_s: float
    host_bytes_per_s: float
    send_bytes: tuple[int, ...]
    send_s: tuple[float, ...]
    collectives: Collectives | None
    setup_s: float
    move_bytes_per_s: float
    move_all_bytes_per_s: float
    copy_bytes_per_s: float
    hash_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. `error` is the median relative error of the fitted constants by class of operation."""

    path: str
    devices: int
    kind: DeviceKind
    link: Link
    setup_s: float
    error: Mapping[str, float]
    seconds: float
    notes: tuple[str, ...]

    def __str__(self) -> str:
        peaks = ", ".join(f"{precision} {peak / 1e9:,.0f} Gflop/s" for precision, peak in self.kind.peak_flops.items())
        lines = [
            f"{self.devices} x {self.kind.name}: {peaks}, memory {self.kind.memory_bytes_per_s / 1e9:.1f} GB/s, "
            f"{show_bytes(self.kind.memory_bytes)}, {self.kind.launch_s * 1e6:.1f} us a kernel",
        ]
        if self.devices > 1:
            lines.append(
                f"link: {self.link.bytes_per_s / 1e9:.2f} GB/s, {self.link.latency_s * 1e6:.0f} us; "
                f"a group is made in {self.setup_s * 1e3:.0f} ms"
            )
            rates = [self.link.constants[MOVE], self.link.constants[ALL]]
            rates += [self.kind.constants[COPY], self.kind.constants[HASH]]
            pair, together, copied, hashed = (f"{rate / 1e9:.2f} GB/s" for rate in rates)
            lines.append(f"state: moved at {pair}, at {together} by all devices together; copied at {copied} by each")
            lines[-1] += f", hashed at {hashed}"
        lines.append("median error of the fit: " + ", ".join(f"{k} {100 * e:.0f} %" for k, e in self.error.items()))
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, f"written to {self.path} after {self.seconds:.1f} s"])


def calibrate(out: Path, devices: int, quick: bool) -> Report:
    """Measure and write the cluster file `out`. Raises SettingsError when the machine has too few GPUs or cores."""
    began_s = time.monotonic()
    gpus = torch.cuda.device_count()
    if gpus and devices > gpus:
        raise SettingsError(f"calibrate: {devices} devices, this machine has {gpus} GPUs")
    most = max(os.cpu_count() or 1, FEW_PROCESSES)
    if not gpus and devices > most:
        raise SettingsError(f"calibrate: {devices} processes, on this machine without GPUs 1 to {most} are valid")
    timings = measure(devices, plan(gpus > 0, quick), cuda=gpus > 0)
    kind, link, error = fitted(timings)
    kind, unsure = doubted(kind, error)
    notes = ["one machine: the link between nodes is that inside, measure or correct it before planning several"]
    if devices == 1:
        notes = ["one device: links are not measured but guessed, measure with more devices or correct them"]
    notes = [*unsure, *notes]
    ids = tuple(Device(index, 0, kind.name) for index in range(devices))
    cluster = Cluster(ids, {kind.name: kind}, {"intra": link, "inter": link})
    try:
        write_whole(out, written(cluster, ["Measured by `nereus calibrate`.", *notes]))
    except OSError as failure:
        raise SettingsError(f"calibrate: {out} cannot be written: {failure.strerror}") from None
    passed_s = time.monotonic() - began_s
    return Report(str(out), devices, kind, link, timings.setup_s, error, passed_s, tuple(notes))


def plan(cuda: bool, quick: bool) -> Plan:
    """Sizes that take seconds on a device of this type."""
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    attention: tuple[tuple[int, int, int, int], ...]
    if cuda:
        widths, rows = (1024, 4096, 8192), (1, 16, 256, 2048, 8192)
        attention = tuple((b, s, 32, 128) for b, s in ((1, 512), (1, 2048), (1, 8192), (8, 1024), (32, 512)))
        decode = tuple((b, s, 8, 128) for b, s in ((1, 1024), (16, 1024), (16, 8192), (128, 2048), (256, 512)))
        stream, largest, state = 1 << 28, 28, 30
    else:
        widths, rows = (64, 256, 768), (1, 16, 128, 512)
        attention = tuple((b, s, 4, 32) for b, s in ((1, 64), (1, 256), (1, 512), (8, 128)))
        decode = tuple((b, s, 4, 32) for b, s in ((1, 256), (8, 256), (32, 512), (64, 256)))
        stream, largest, state = 1 << 23, 22, 27
    if quick:
        widths, rows, largest = widths[:2], rows[::2], largest - 2
    gemm = tuple((m, n, k) for m in rows for n in widths for k in widths)
    messages = tuple(1 << power for power in range(8, largest + 1, 2))
    repeats = Repeats(3, 3) if quick else Repeats(7, 9)
    precision = "bf16" if cuda else "fp32"
    return Plan(precision, gemm, attention, decode, stream, messages, (1 << state - 5, 1 << state), repeats)


def measure(devices: int, chosen: Plan, cuda: bool) -> Timings:
    """Start the workers, measure kernels on the first and links among all, end the workers."""
    limits = {index: DeviceSettings(torch_device=f"cuda:{index}" if cuda else "cpu") for index in range(devices)}
    with Crew(limits, PROGRAM, chosen.repeats, timeout_s=MEASURE_S) as crew:
        crew.start(limits)
        crew.wait_ready(tuple(limits), START_S)
        return _measured(crew, chosen, devices, cuda)


def fitted(timings: Timings) -> tuple[DeviceKind, Link, dict[str, float]]:
    """Kind and link with constants fitted, and the median relative error by class of operation."""
    best = float((2 * timings.gemm.m * timings.gemm.n * timings.gemm.k / timings.gemm.seconds).max())
    kind = DeviceKind(
        name=timings.name,
        memory_bytes=timings.memory_bytes,
        peak_flops={timings.precision: best},
        memory_bytes_per_s=timings.stream_bytes_per_s,
        launch_s=timings.launch_s,
        host_bytes_per_s=timings.host_bytes_per_s,
    )
    error = {}
    kernels: dict[str, Kernels] = {
        "gemm": timings.gemm,
        "attention": timings.attention,
        "decode attention": timings.decode,
    }
    for name, timed in kernels.items():
        kind = fit_kernels(kind, timed, timings.precision)
        error[name] = float(np.median(errors(timed.predicted(kind, timings.precision), timed.seconds)))
    link = _link(timings)
    if timings.collectives is not None:
        link = fit_link(link, timings.collectives, [name for name in COLLECTIVE if name not in _NOT_HERE])
        found = errors(timings.collectives.predicted(link), timings.collectives.seconds)
        error["collectives"] = float(np.median(found))
        moving = {MOVE: timings.move_bytes_per_s, ALL: timings.move_all_bytes_per_s}
        link = replace(link, constants=dict(link.constants) | {"group.setup_s": timings.setup_s} | moving)
        state = {COPY: timings.copy_bytes_per_s, HASH: timings.hash_bytes_per_s}
        kind = replace(kind, constants=dict(kind.constants) | state)
    return kind, link, error


def doubted(kind: DeviceKind, error: Mapping[str, float]) -> tuple[DeviceKind, tuple[str, ...]]:
    """A kind whose constants miss what they were fitted to: as uncertain as that, and what to tell its user."""
    missed = {name: value for name, value in error.items() if value > DOUBTFUL}
    if not missed:
        return kind, ()
    words = ", ".join(f"{name} {100 * value:.0f} %" for name, value in missed.items())
    note = (
        f"the fitted constants miss half of what was measured by more than {100 * DOUBTFUL:.0f} % ({words}): other "
        "work ran on this machine, or its kernels behave otherwise; measure again while it is idle before trusting "
        "a plan"
    )
    uncertainty = math.log1p(max(missed.values()))
    return replace(kind, constants={**kind.constants, UNCERTAINTY: uncertainty}), (note,)


_NOT_HERE = ("collective.few_ranks", "latency_s")
"""Measured with one number of ranks, and by single messages."""
_GUESS = Link(1e9, 1e-4)


def _link(timings: Timings) -> Link:
    """Rate and latency of single messages: the best rate, and the time of the smallest."""
    if not timings.send_s:
        return _GUESS
    rate = max(size / seconds for size, seconds in zip(timings.send_bytes, timings.send_s, strict=True))
    return Link(rate, min(timings.send_s))


def _measured(crew: Crew, chosen: Plan, devices: int, cuda: bool) -> Timings:
    dtype = TORCH[chosen.precision]

    def kernels(name: str, sizes: Sequence[tuple[int, ...]]) -> Floats:
        message = Message(name, {"sizes": [list(each) for each in sizes], "dtype": dtype})
        return np.array(crew.call([0], message, MEASURE_S)[0].fields["seconds"])

    facts = crew.call([0], Message("facts"), MEASURE_S)[0].fields
    element_bytes = 2.0 if chosen.precision == "bf16" else 4.0
    m, n, k = np.array(chosen.gemm, float).T
    gemm = Gemms(m, n, k, kernels("gemm", chosen.gemm), element_bytes)
    attention = _attentions(False, chosen.attention, kernels("attention", chosen.attention), element_bytes)
    decode = _attentions(True, chosen.decode, kernels("decode_attention", chosen.decode), element_bytes)
    stream_s = float(kernels("stream", [(chosen.stream_elements,)])[0])
    host_s = float(kernels("host", [(chosen.stream_elements,)])[0]) if cuda else 0.0
    sends, collectives, setup_s, state = _measured_links(crew, chosen, devices)
    return Timings(
        name=str(facts["name"]).lower().replace(" ", "-"),
        memory_bytes=int(facts["memory_bytes"]) or _host_memory_bytes() // devices,
        precision=chosen.precision,
        gemm=gemm,
        attention=attention,
        decode=decode,
        stream_bytes_per_s=2 * element_bytes * chosen.stream_elements / stream_s,
        launch_s=float(kernels("launch", [(16,)])[0]),
        host_bytes_per_s=element_bytes * chosen.stream_elements / host_s if cuda else 0.0,
        send_bytes=chosen.message_bytes if sends else (),
        send_s=sends,
        collectives=collectives,
        setup_s=setup_s,
        move_bytes_per_s=state["move"],
        move_all_bytes_per_s=devices * state["move_all"],
        copy_bytes_per_s=state["copy"],
        hash_bytes_per_s=state["hash"],
    )


def _measured_links(
    crew: Crew, chosen: Plan, devices: int
) -> tuple[tuple[float, ...], Collectives | None, float, Mapping[str, float]]:
    """Seconds of single messages, timed collectives, seconds to make a group, and what a device does with state."""
    if devices == 1:
        return (), None, 0.0, dict.fromkeys(STATE, 0.0)
    members = list(range(devices))
    crew.call(members, Message("groups.make", {"groups": [(GROUP, members)]}), MEASURE_S)

    def timed(name: str, fields: Mapping[str, object]) -> Floats:
        replies = crew.call(members, Message(name, dict(fields)), MEASURE_S)
        slowest: Floats = np.array([reply.fields["seconds"] for reply in replies.values()], float).max(axis=0)
        return slowest

    sizes = {"group": GROUP, "sizes": list(chosen.message_bytes)}
    sends = tuple((timed("send", sizes) / 2).tolist())
    reduced, gathered = timed("all_reduce", sizes), timed("all_gather", sizes)
    little, much = chosen.state_bytes

    def rate(name: str) -> float:
        """Beyond what it takes with little."""
        short_s, long_s = timed(name, {"group": GROUP, "sizes": chosen.state_bytes})
        return float((much - little) / max(long_s - short_s, LEAST_SHARE * long_s))

    state = {name: rate(name) for name in STATE}
    setups = [timed("setup", {"group": f"{GROUP}-{index}", "members": members})[0] for index in range(3)]
    size_bytes = np.array(chosen.message_bytes, float)
    names = ["all_reduce"] * len(size_bytes) + ["all_gather"] * len(size_bytes)
    collectives = Collectives(
        np.array(names),
        np.full(len(names), devices),
        # An all-gather ends with what every member brought.
        np.concatenate([size_bytes, devices * size_bytes]),
        np.concatenate([reduced, gathered]),
        np.ones(len(names), dtype=np.int64),
    )
    return sends, collectives, float(np.median(setups)), state


def _attentions(decode: bool, sizes: Sequence[tuple[int, ...]], seconds: Floats, element_bytes: float) -> Attentions:
    sequences, tokens, heads, width = np.array(sizes, float).T
    return Attentions(decode, sequences, tokens, heads, heads, int(width[0]), seconds, element_bytes)


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
