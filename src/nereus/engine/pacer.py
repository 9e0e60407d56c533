"""The speed of a paced device and the time its operations take (D5.11).

A paced worker sleeps until its CPU time is at most `speed` times the wall time. Time spent waiting for a peer is no
time a device of that speed computes in, so it earns no credit. Compute classes are CPU seconds / speed (wall seconds of
the device on CUDA), links wall seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nereus.core import SettingsError, Timing


class Meter:
    """Seconds by operation class since the last `take`."""

    def __init__(self, speed: float = 1.0, clock: Callable[[], float] = time.process_time) -> None:
        self.speed = speed
        self.link_wall_s = 0.0
        self.link_cpu_s = 0.0
        self._clock = clock
        self._timings: dict[str, Timing] = {}

    @contextmanager
    def communicating(self, kind: str) -> Iterator[None]:
        """Measure wall seconds on a link. Not to be nested."""
        wall_s, cpu_s = time.perf_counter(), self._clock()
        try:
            yield
        finally:
            passed_s = time.perf_counter() - wall_s
            self.link_wall_s += passed_s
            self.link_cpu_s += self._clock() - cpu_s
            self.add(kind, passed_s)

    @contextmanager
    def computing(self, kind: str) -> Iterator[None]:
        """Measure compute seconds, without what the links inside took. Sleeping costs none."""
        cpu_s, link_s = self._clock(), self.link_cpu_s
        try:
            yield
        finally:
            used_s = self._clock() - cpu_s - (self.link_cpu_s - link_s)
            self.add(kind, max(0.0, used_s) / self.speed)

    def add(self, kind: str, seconds: float) -> None:
        """Count one operation of a class."""
        before = self._timings.get(kind, Timing(0.0, 0))
        self._timings[kind] = Timing(before.measured_s + seconds, before.count + 1)

    def take(self) -> dict[str, Timing]:
        """What was measured; starts anew."""
        taken, self._timings = self._timings, {}
        return taken


class Pacer:
    """Holds the process to `speed` of a core from `start` on. A speed of 1 or more never sleeps."""

    def __init__(self, speed: float, meter: Meter) -> None:
        if not speed > 0:
            raise SettingsError(f"speed {speed} of a device must be more than 0 (share of one core)")
        self.speed = speed
        self._meter = meter
        self.start()

    def start(self) -> None:
        """Begin to count: call it when a command starts, so that idle time earns no credit."""
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._link_wall_s, self._link_cpu_s = self._meter.link_wall_s, self._meter.link_cpu_s

    def pace(self) -> None:
        """Sleep for as long as the process is ahead of its share."""
        if self.speed >= 1:
            return
        wall_s, cpu_s = time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s
        compute_wall_s = wall_s - (self._meter.link_wall_s - self._link_wall_s)
        compute_cpu_s = cpu_s - (self._meter.link_cpu_s - self._link_cpu_s)
        ahead_s = max(compute_cpu_s / self.speed - compute_wall_s, cpu_s / self.speed - wall_s)
        if ahead_s > 0:
            time.sleep(ahead_s)


def device_clock() -> float:
    """Seconds on the CUDA device's side: the wall time at which all its work so far is done."""
    torch.cuda.synchronize()
    return time.perf_counter()
