"""Pacing and measuring, on clocks of the test."""

from __future__ import annotations

import time

import pytest

from nereus.core import SettingsError
from nereus.engine import pacer as module
from nereus.engine.pacer import Meter, Pacer


class Clocks:
    """Stands in for `time`: computing passes CPU and wall time, waiting and sleeping wall time alone."""

    def __init__(self) -> None:
        self.wall_s = 100.0
        self.cpu_s = 10.0
        self.slept_s = 0.0

    def perf_counter(self) -> float:
        return self.wall_s

    def process_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds
        self.slept_s += seconds

    def compute(self, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(module, "time", found)
    return found


def test_a_worker_sleeps_until_it_is_within_its_share(clocks: Clocks) -> None:
    pacer = Pacer(0.25, Meter(0.25, clocks.process_time))
    pacer.start()
    for _ in range(4):
        clocks.compute(0.5)
        pacer.pace()
    assert clocks.slept_s == pytest.approx(6.0)


def test_waiting_for_a_peer_earns_no_credit(clocks: Clocks) -> None:
    meter = Meter(0.5, clocks.process_time)
    pacer = Pacer(0.5, meter)
    with meter.communicating("p2p"):
        clocks.wall_s += 30
    clocks.compute(1.0)
    pacer.pace()
    assert clocks.slept_s == pytest.approx(1.0)
    assert meter.take()["p2p"].measured_s == pytest.approx(30)


def test_idle_time_before_a_command_earns_no_credit(clocks: Clocks) -> None:
    pacer = Pacer(0.5, Meter(0.5, clocks.process_time))
    clocks.wall_s += 30
    pacer.start()
    clocks.compute(1.0)
    pacer.pace()
    assert clocks.slept_s == pytest.approx(1.0)


def test_a_whole_core_is_never_held_back(clocks: Clocks) -> None:
    pacer = Pacer(1.0, Meter(1.0, clocks.process_time))
    clocks.compute(1.0)
    pacer.pace()
    assert clocks.slept_s == 0


def test_compute_counts_cpu_over_speed_without_the_links_inside(clocks: Clocks) -> None:
    meter = Meter(0.5, clocks.process_time)
    for _ in range(2):
        with meter.computing("linear"):
            clocks.compute(1.0)
            with meter.communicating("all_reduce"):
                clocks.compute(0.25)
                clocks.wall_s += 1
            clocks.sleep(5)
    taken = meter.take()
    assert [taken[kind].measured_s for kind in ("linear", "all_reduce")] == pytest.approx([4.0, 2.5])
    assert [taken[kind].count for kind in ("linear", "all_reduce")] == [2, 2]
    assert meter.take() == {}


def test_measuring_costs_microseconds() -> None:
    meter = Meter(0.5)
    pacer = Pacer(1.0, meter)
    began_s = time.process_time()
    for _ in range(1000):
        with meter.communicating("p2p"):
            pacer.pace()
    assert time.process_time() - began_s < 0.1, "a tenth of a millisecond each would already be too slow"


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_speed_must_be_positive(speed: float) -> None:
    with pytest.raises(SettingsError, match="must be more than 0"):
        Pacer(speed, Meter())
