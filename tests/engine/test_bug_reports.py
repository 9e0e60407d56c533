"""What went wrong for people after a change of layout or with a dead rank, as inputs to our own transitions.

Sample ids over a change of replicas: tests/transition/test_cases.py; checkpoints: tests/trainer/test_checkpoint.py;
communicators that overlap, ranks killed or stopped in a transition: test_faults.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from nereus.core import Cut, EMUSet, Kind, Layout, StateSchema, TensorSpec, TransportError, Where, WorkerLostError
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.executor import TransitionExecutor
from nereus.engine.worker import DeviceSettings
from nereus.transition.compile import connect
from tests.engine.crews import PROGRAM, TRAINING, WAIT_S, check_state, fill, started, units

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
DEVICES = range(6)
KINDS = {Kind.PARAM: "bf16", Kind.MASTER: "fp32", Kind.EXP_AVG: "fp32", Kind.EXP_AVG_SQ: "fp32"}


def swiglu(layers: int = 2) -> StateSchema:
    """Gate, up and down of a SwiGLU block, tied embeddings at both ends, a vocabulary that 2 does not divide."""
    tensors = [TensorSpec("embed", (13, 4), Where.BOTH_ENDS, cut=Cut(0, 13, padded=True))]
    for layer in range(layers):
        tensors += [
            TensorSpec(f"{layer}.gate", (12, 4), Where.LAYER, layer, Cut(0, 12)),
            TensorSpec(f"{layer}.up", (12, 4), Where.LAYER, layer, Cut(0, 12)),
            TensorSpec(f"{layer}.down", (4, 12), Where.LAYER, layer, Cut(1, 12)),
        ]
    return StateSchema(layers, tuple(tensors), KINDS)


def uneven() -> StateSchema:
    """One huge embedding and many small norms: no two ranks hold the same number of parameters."""
    norms = [TensorSpec(f"{layer}.norm", (3,), Where.LAYER, layer) for layer in range(40)]
    return StateSchema(40, (TensorSpec("embed", (5000, 8), Where.FIRST, cut=Cut(0, 5000)), *norms), KINDS)


@dataclass(frozen=True, slots=True)
class Report:
    """Layouts that a job went through, as (layout, replicas)."""

    schema: StateSchema
    walk: tuple[tuple[Layout, int], ...]


TP1, TP2, PP2 = Layout(), Layout(2), Layout(1, 2)
REPORTS = {
    "Megatron-LM PR#63: gate and up glued in the wrong order by a merge": Report(
        swiglu(), ((TP2, 1), (TP1, 1), (TP2, 1))
    ),
    "DeepSpeed#2898, #3810: resumed at another number of replicas": Report(swiglu(), ((TP1, 4), (TP1, 6), (TP1, 2))),
    "nanotron#106, Megatron-LM#1517: moments left behind at TP2 to PP2": Report(swiglu(), ((TP2, 1), (PP2, 1))),
    "ms-swift#8240: parameter counts that differ by rank": Report(uneven(), ((PP2, 3), (PP2, 1), (TP1, 4))),
    "sglang PR#15890, Megatron-LM#656: a tied embedding missing at one end": Report(
        swiglu(), ((TP1, 1), (PP2, 1), (TP1, 1))
    ),
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew({device: DeviceSettings() for device in DEVICES}, PROGRAM, timeout_s=20) as found:
        yield started(found, DEVICES)


@pytest.mark.parametrize("name", REPORTS)
def test_parameters_moments_and_counters_are_exact_after_the_change(crew: Crew, name: str) -> None:
    report = REPORTS[name]
    schemas = {TRAINING: report.schema}
    ends = []
    for layout, copies in report.walk:
        parts = [tuple(range(n * layout.size, (n + 1) * layout.size)) for n in range(copies)]
        ends.append(EMUSet(tuple(units(TRAINING, layout, *parts))))
    fill(crew, ends[0], schemas)
    for start, goal in pairwise(ends):
        outcome = TransitionExecutor(crew, schemas, timeout_s=20, verify=True).execute(connect(start, goal, schemas))
        assert outcome.completed, outcome.error
        check_state(crew, goal, schemas)
    crew.call(DEVICES, Message("transition.destroy", {"units": list(ends[-1])}), WAIT_S)


def test_a_rank_killed_in_a_collective_frees_the_others_from_both_communicators() -> None:
    """nccl#1013, #863: aborting one communicator hung, aborting two of them deadlocked."""
    with Crew({device: DeviceSettings() for device in range(4)}, PROGRAM, timeout_s=30) as crew:
        started(crew, range(4))
        everyone = tuple(range(4))
        crew.call(range(4), Message("groups.make", {"groups": [("a", everyone), ("b", everyone)]}), WAIT_S)
        began_s = time.monotonic()
        ones = {"values": np.ones(1 << 20, np.float32)}
        waiting = [crew.submit(device, Message("sum", {"group": "a"}, ones)) for device in range(3)]
        time.sleep(0.3)
        os.kill(crew.pids()[3], signal.SIGKILL)
        with pytest.raises(TransportError, match="group a"):
            crew.wait(waiting, WAIT_S)
        assert time.monotonic() - began_s < 20, "they waited for their deadline"
        with pytest.raises(WorkerLostError, match="device 3"):
            crew.raise_lost()
        for reply in crew.call(range(3), Message("groups.names"), WAIT_S).values():
            assert reply.fields["names"] == ()
        crew.call(range(3), Message("groups.make", {"groups": [("c", (0, 1, 2))]}), WAIT_S)
        for reply in crew.call(range(3), Message("sum", {"group": "c"}, ones), WAIT_S).values():
            assert (reply.arrays["values"] == 3).all()
