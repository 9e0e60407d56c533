"""The crew with real worker processes: start, commands, deaths, end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from nereus.core import NereusError, OutOfMemoryError, SettingsError, TransportError, WorkerLostError
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.worker import DeviceSettings

pytestmark = pytest.mark.processes

PROGRAM = "tests.engine.program.Filler"
WAIT_S = 60.0


@pytest.fixture
def crew() -> Iterator[Crew]:
    devices = {device: DeviceSettings(capacity_bytes=1_000_000) for device in range(3)}
    with Crew(devices, PROGRAM, timeout_s=20) as crew:
        crew.start([0, 1])
        crew.wait_ready([0, 1], WAIT_S)
        yield crew


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the two
        return False


def gone(pids: list[int], within_s: float = 20) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def raise_lost_within(crew: Crew, seconds: float) -> None:
    """The kernel closes a killed process's pipes some moments after it stops running."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        crew.raise_lost()
        time.sleep(0.02)


def test_commands_are_answered_in_order_with_their_arrays(crew: Crew) -> None:
    values = [np.arange(n, dtype=np.int64).reshape(-1, 1) for n in (0, 1, 300_000)]
    tickets = [crew.submit(n % 2, Message("echo", {"n": n}, {"v": v})) for n, v in enumerate(values)]
    replies = crew.wait(tickets, WAIT_S)
    for n, ticket in enumerate(tickets):
        assert replies[ticket].fields["n"] == n
        assert replies[ticket].arrays["v"].dtype == np.int64
        assert np.array_equal(replies[ticket].arrays["v"], values[n])


def test_large_messages_both_ways_at_once_do_not_block_each_other(crew: Crew) -> None:
    big = np.zeros(4_000_000, np.uint8)
    tickets = [crew.submit(0, Message("echo", {}, {"v": big})) for _ in range(6)]
    assert len(crew.wait(tickets, WAIT_S)) == 6


def test_a_death_is_known_until_the_worker_is_started_again(crew: Crew) -> None:
    crew.raise_lost()
    os.kill(crew.pids()[1], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"device 1 is lost: process \d+ was ended by SIGKILL"):
        raise_lost_within(crew, WAIT_S)
    crew.start([1])
    crew.raise_lost()


def test_workers_communicate_in_a_group(crew: Crew) -> None:
    crew.call([0, 1], Message("groups.make", {"groups": [("dp#1", (1, 0))]}), WAIT_S)
    message = Message("sum", {"group": "dp#1"}, {"values": np.array([1.0, 2.0])})
    for reply in crew.call([0, 1], message, WAIT_S).values():
        assert reply.arrays["values"].tolist() == [2.0, 4.0]
    crew.call([0, 1], Message("groups.drop", {"names": ["dp#1"]}), WAIT_S)
    with pytest.raises(TransportError, match=r"dp#1 does not exist"):
        crew.call([0, 1], message, WAIT_S)


def test_a_device_joins_while_others_work(crew: Crew) -> None:
    ticket = crew.submit(0, Message("sleep", {"seconds": 0.2}))
    crew.start([1, 2])
    assert crew.started() == {0, 1, 2}
    crew.wait_ready([2], WAIT_S)
    assert crew.ready() == {0, 1, 2}
    crew.wait([ticket], WAIT_S)
    with pytest.raises(SettingsError, match="valid"):
        crew.start([7])


def test_out_of_memory_keeps_its_numbers_across_the_pipe(crew: Crew) -> None:
    with pytest.raises(OutOfMemoryError, match="device 1: kv_cache needs 2,000,000") as caught:
        crew.wait([crew.submit(1, Message("hoard", {"bytes": 2_000_000})), crew.submit(0, Message("echo"))], WAIT_S)
    assert (caught.value.device, caught.value.capacity_bytes) == (1, 1_000_000)
    assert crew.call([0, 1], Message("echo", {"still": "here"}), WAIT_S)[1].fields == {"still": "here"}


def test_a_bug_in_a_handler_is_named_and_the_worker_goes_on(crew: Crew) -> None:
    with pytest.raises(NereusError, match=r"device 0: bug failed: ZeroDivisionError: a bug"):
        crew.call([0], Message("bug"), WAIT_S)
    with pytest.raises(NereusError, match=r"'bgu' is unknown, valid: .*bug"):
        crew.call([0], Message("bgu"), WAIT_S)
    crew.call([0], Message("echo"), WAIT_S)


def test_an_error_frees_peers_that_wait_for_the_worker(crew: Crew) -> None:
    crew.call([0, 1], Message("groups.make", {"groups": [("tp#1", (0, 1))]}), WAIT_S)
    began_s = time.monotonic()
    waiting = crew.submit(0, Message("sum", {"group": "tp#1"}, {"values": np.ones(3)}))
    failing = crew.submit(1, Message("hoard", {"bytes": 2_000_000}))
    with pytest.raises(OutOfMemoryError):
        crew.wait([waiting, failing], WAIT_S)
    assert time.monotonic() - began_s < 15, "the peer waited for its deadline"
    for reply in crew.call([0, 1], Message("groups.names"), WAIT_S).values():
        assert reply.fields["names"] == ()


def test_a_killed_worker_is_named_and_its_peer_is_freed(crew: Crew) -> None:
    crew.call([0, 1], Message("groups.make", {"groups": [("tp#1", (0, 1))]}), WAIT_S)
    waiting = crew.submit(0, Message("sum", {"group": "tp#1"}, {"values": np.ones(3)}))
    dying = crew.submit(1, Message("crash"))
    with pytest.raises(WorkerLostError, match=r"device 1 is lost: process \d+ was ended by SIGKILL"):
        crew.wait([waiting, dying], WAIT_S)
    assert crew.ready() == {0}
    with pytest.raises(WorkerLostError, match="device 1"):
        crew.submit(1, Message("echo"))
    crew.start([1])
    crew.wait_ready([1], WAIT_S)
    crew.call([0, 1], Message("echo"), WAIT_S)


def test_a_worker_that_dies_before_its_group_is_made_is_not_waited_for_until_it_is_started_again(crew: Crew) -> None:
    """The deadline is longer than the test may take."""
    make = Message("groups.make", {"groups": [("tp#2", (0, 1))]})
    tickets = [crew.submit(0, make), crew.submit(1, Message("crash"))]
    replies = crew.gather(tickets, WAIT_S)
    assert isinstance(replies[tickets[0]], TransportError)
    assert "group tp#2: device 1 was lost before it came" in str(replies[tickets[0]])
    crew.start([1])
    crew.wait_ready([1], WAIT_S)
    crew.call([0, 1], Message("groups.make", {"groups": [("tp#3", (0, 1))]}), WAIT_S)
    assert crew.call([0], Message("groups.names"), WAIT_S)[0].fields["names"] == ("tp#3",)


def test_a_killed_worker_is_named_when_others_are_late(crew: Crew) -> None:
    late = crew.submit(0, Message("sleep", {"seconds": 2.0}))
    dying = crew.submit(1, Message("crash"))
    with pytest.raises(WorkerLostError, match=r"device 1 is lost: process \d+ was ended by SIGKILL"):
        crew.wait([late, dying], 1.0)


def test_a_late_reply_is_never_taken_for_another(crew: Crew) -> None:
    ticket = crew.submit(0, Message("sleep", {"seconds": 3.0}))
    with pytest.raises(WorkerLostError, match=r"no answer within 0\.1 s"):
        crew.wait([ticket], 0.1)
    assert crew.call([0], Message("echo", {"n": 1}), WAIT_S)[0].fields == {"n": 1}
    assert crew.poll(0) == []


def test_a_program_that_does_not_start_is_reported() -> None:
    with Crew({0: DeviceSettings()}, PROGRAM, "broken", timeout_s=20) as crew:
        crew.start([0])
        with pytest.raises(WorkerLostError, match=r"did not start: .*RuntimeError: no such model"):
            crew.wait_ready([0], WAIT_S)


def test_pacing_holds_a_worker_to_its_share_of_a_core() -> None:
    with Crew({0: DeviceSettings(speed=0.3)}, PROGRAM, timeout_s=20) as crew:
        crew.start([0])
        crew.wait_ready([0], WAIT_S)
        spent = crew.call([0], Message("spend", {"cpu_s": 0.3}), WAIT_S)[0].fields
    assert spent["cpu_s"] / spent["wall_s"] <= 0.3 * 1.02


def test_close_leaves_no_process_and_no_connection() -> None:
    sockets = len(os.listdir("/proc/self/fd"))
    crew = Crew({0: DeviceSettings(), 1: DeviceSettings()}, PROGRAM, timeout_s=20)
    crew.start([0, 1])
    crew.wait_ready([0], WAIT_S)
    pids = list(crew.pids().values())
    crew.submit(0, Message("sleep", {"seconds": 0.1}))
    crew.close()
    crew.close()
    assert gone(pids)
    assert crew.pids() == {}
    assert len(os.listdir("/proc/self/fd")) <= sockets + 2, "the fork server's own two stay"


SCRIPT = """
import sys, time
from nereus.engine.crew import Crew
from nereus.engine.connection import Message
from nereus.engine.worker import DeviceSettings
crew = Crew({0: DeviceSettings(), 1: DeviceSettings()}, "tests.engine.program.Filler", timeout_s=20)
crew.start([0, 1]); crew.wait_ready([0, 1], 60)
crew.submit(0, Message("sleep", {"seconds": 600}))
print(*crew.pids().values(), flush=True)
time.sleep(600)
"""


def test_workers_of_a_killed_coordinator_end_at_once_even_when_busy() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        os.kill(pids[1], signal.SIGINT)  # the coordinator ends its workers, not the keyboard
        time.sleep(0.1)
        assert alive(pids[1])
        process.kill()
    assert gone(pids)
