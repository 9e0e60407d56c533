"""Runs the sides of a comparison: all at hand at once, taking turns, so that each minute is the same for all."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.transitions.scenario import Scenario

ROOT = Path(__file__).parents[2]
RAM_DISK = "/dev/shm"
"""Where a side's temporary files are."""
READY_S, RUN_S, END_S = 180.0, 120.0, 5.0
MEMORY_SHARE = 0.6
"""Of the free memory that sides which wait for their turn may hold."""


@dataclass(frozen=True, slots=True)
class Side:
    """One way to change a layout. `environment` is a folder of `build/`, None where ours has all that it needs."""

    name: str
    work: str
    environment: str | None = None
    needs: str = "bin/python"
    """A file of the environment."""
    keeps_target: bool = False
    """Between runs it holds the target's memory too."""

    @property
    def folder(self) -> Path | None:
        """Where its environment is."""
        return None if self.environment is None else ROOT / "build" / self.environment

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        own = None if self.folder is None else self.folder / "bin" / "python"
        return str(own) if own is not None and own.exists() else sys.executable


@dataclass(slots=True)
class Measured:
    """The runs of one side. `reason` says why there are none."""

    seconds: list[float] = field(default_factory=list)
    answers: list[Mapping[str, Any]] = field(default_factory=list)
    reason: str | None = None
    wrong: tuple[str, ...] = ()

    @property
    def median_s(self) -> float:
        """NaN without runs."""
        return median(self.seconds) if self.seconds else float("nan")

    @property
    def spread(self) -> str:
        """Least, median and most seconds."""
        if not self.seconds:
            return self.reason or "no runs"
        return f"{min(self.seconds):.3f} / {self.median_s:.3f} / {max(self.seconds):.3f}"

    def last(self, key: str) -> Any:
        """What the last run answered."""
        return self.answers[-1].get(key) if self.answers else None

    def middle(self, key: str) -> float:
        """Median of a number over the runs."""
        found = [answer[key] for answer in self.answers if answer.get(key) is not None]
        return median(found) if found else float("nan")


class Running:
    """A side's process and everything under it."""

    def __init__(self, side: Side, scenario: Scenario) -> None:
        self._buffer = b""
        self._folder = tempfile.TemporaryDirectory(dir=RAM_DISK, prefix="transitions-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "errors.txt"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": self._folder.name}
        self._process = subprocess.Popen(
            [side.python, "-m", "benchmarks.transitions.ranks", side.work, scenario.to_json()],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            start_new_session=True,
        )

    def ask(self, command: str | None, limit_s: float) -> Mapping[str, Any]:
        """One answer. Raises RuntimeError when the side fails, ends or is late."""
        assert self._process.stdin is not None
        if command is not None:
            try:
                self._process.stdin.write(command.encode() + b"\n")
                self._process.stdin.flush()
            except OSError:
                raise RuntimeError(self._why("ended")) from None
        answer: Mapping[str, Any] = json.loads(self._line(limit_s))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def leave(self) -> None:
        """Tell it to end, and do not wait."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """End it and all that it has started: tools leave processes of their own behind."""
        self.leave()
        assert self._process.stdout is not None
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise RuntimeError(self._why(f"no answer within {limit_s:g} s"))
                found = os.read(self._process.stdout.fileno(), 1 << 16)
                if not found:
                    raise RuntimeError(self._why("ended"))
                self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _why(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{what}: {lines[-1][:200]}" if lines else what


def compare(sides: Sequence[Side], scenario: Scenario, runs: int) -> dict[str, Measured]:
    """Each side `runs` times after one that warms up and is checked; turns begin with another side each round."""
    found = {side.name: Measured() for side in sides}
    usable = [side for side in sides if _present(side, found[side.name])]
    together = _resident_bytes(usable, scenario) <= MEMORY_SHARE * free_bytes()
    for group in [usable] if together else [[side] for side in usable]:
        with ExitStack() as stack:
            running: dict[str, Running] = {}
            for side in group:
                running[side.name] = Running(side, scenario)
                stack.callback(running[side.name].close)
            stack.callback(_leave, running)
            for round_ in range(-1, runs):
                names = [side.name for side in group]
                first = round_ % max(len(names), 1)
                for name in (*names[first:], *names[:first]):
                    if found[name].reason is None:
                        _turn(running[name], found[name], round_)
    return found


def _leave(running: Mapping[str, Running]) -> None:
    """All at once: then waiting for one is waiting for all."""
    for side in running.values():
        side.leave()


def _present(side: Side, measured: Measured) -> bool:
    if side.folder is not None and not (side.folder / side.needs).exists():
        measured.reason = "not installed: make baselines"
    return measured.reason is None


def _turn(running: Running, measured: Measured, round_: int) -> None:
    try:
        if round_ < 0:
            running.ask(None, READY_S)
            running.ask("run", RUN_S)
            measured.wrong = tuple(running.ask("wrong", RUN_S)["wrong"])
        else:
            answer = running.ask("run", RUN_S)
            measured.answers.append(answer)
            measured.seconds.append(answer["seconds"])
        running.ask("rest", RUN_S)
    except RuntimeError as error:
        measured.reason = str(error)


def _resident_bytes(sides: Sequence[Side], scenario: Scenario) -> int:
    """What all sides hold while they wait, and one of them that runs."""
    source = scenario.size.bytes * len(scenario.source.devices)
    target = scenario.size.bytes * len(scenario.target.devices)
    overhead = 300_000_000 + 60_000_000 * scenario.devices  # libraries that are loaded, by side
    return sum(source + overhead + target * side.keeps_target for side in sides) + target


def free_bytes() -> int:
    """Memory of this machine that programs may take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the machine was: the 1-minute average before, and the mean number of busy cores during."""

    before: float
    busy_cores: float

    def __str__(self) -> str:
        return f"load {self.before:.1f} before, {self.busy_cores:.1f} of {os.cpu_count()} cores busy during"


class Watch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._before = os.getloadavg()[0]
        self._busy_s, self._began_s = _busy_s(), time.monotonic()

    def read(self) -> Load:
        """Until now."""
        return Load(self._before, (_busy_s() - self._busy_s) / max(time.monotonic() - self._began_s, 1e-9))


def _busy_s() -> float:
    fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
