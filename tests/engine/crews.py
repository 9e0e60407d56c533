"""Crews of the test program with known state, and whether they hold what the oracle says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from nereus.core import EMU, EMUSet, Layout, LogicalState, ModelStage, Stage, StateSchema
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.transition.fit import stored_bytes
from tests.engine.fill import local, schema

TRAINING = ModelStage("actor", Stage.TRAINING)
INFERENCE = ModelStage("reward", Stage.INFERENCE)
Schemas = Mapping[ModelStage, StateSchema]
SCHEMAS = {TRAINING: schema(), INFERENCE: schema(layers=4, tied=False, trained=False)}
PROGRAM = "tests.engine.program.Filler"
WAIT_S = 60.0
COUNTERS = LogicalState(update_count=7, model_version=3, policy_version=2, position=96)


def units(model_stage: ModelStage, layout: Layout, *devices: tuple[int, ...]) -> list[EMU]:
    return [EMU(model_stage, layout, each) for each in devices]


def started(crew: Crew, ids: range) -> Crew:
    crew.start(ids)
    crew.wait_ready(ids, WAIT_S)
    return crew


def fill(crew: Crew, start: EMUSet, schemas: Schemas = SCHEMAS) -> None:
    for unit in start:
        fields = {"unit": unit, "schema": schemas[unit.model_stage], "logical": COUNTERS}
        crew.call(unit.devices, Message("load", fields), WAIT_S)


def read(crew: Crew) -> dict[tuple[int, ModelStage], tuple[EMU, LogicalState]]:
    replies = crew.call(sorted(crew.ready()), Message("read"), WAIT_S)
    return {(d, ms): entry for d, reply in replies.items() for ms, entry in reply.fields["held"].items()}


def check_state(crew: Crew, expected: EMUSet, schemas: Schemas = SCHEMAS) -> None:
    """Every device holds exactly the oracle's shards of `expected`, and its ledger counts those bytes alone."""
    replies = crew.call(sorted(crew.ready()), Message("read"), WAIT_S)
    for device, reply in replies.items():
        mine = {unit.model_stage: (unit, COUNTERS) for unit in expected.on(device)}
        assert reply.fields["held"] == mine, f"device {device}"
        wanted = {
            f"{unit.model_stage} {name} {kind}": values
            for unit in expected.on(device)
            for (name, kind), values in local(schemas[unit.model_stage], unit, device).items()
        }
        assert reply.arrays.keys() == wanted.keys()
        for key, values in wanted.items():
            bits = values.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(reply.arrays[key], bits), f"device {device}: {key}"
    used = crew.call(sorted(crew.ready()), Message("memory"), WAIT_S)
    stored = stored_bytes(expected, schemas)
    assert {d: r.fields["used_bytes"] for d, r in used.items()} == {d: stored[d] for d in used}
