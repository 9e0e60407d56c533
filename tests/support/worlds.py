"""Worlds of in-process ranks filled by the oracle, and the checks that compare them with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nereus.core import EMUSet, ModelStage, StateSchema
from nereus.engine.transports.memory import World
from tests.oracles.cut import cut

Schemas = Mapping[ModelStage, StateSchema]


def filled(units: EMUSet, schemas: Schemas) -> World:
    """What `units` hold, every shard as the oracle cuts it."""
    world = World()
    for unit in units:
        for device in unit.devices:
            world.positions[device, unit] = cut(schemas[unit.model_stage], unit, device)
    return world


def assert_holds(world: World, units: EMUSet, schemas: Schemas) -> None:
    """`world` holds exactly `units`, bit for bit what the oracle says."""
    assert set(world.positions) == {(device, unit) for unit in units for device in unit.devices}
    for (device, unit), shards in world.positions.items():
        wanted = cut(schemas[unit.model_stage], unit, device)
        assert shards.keys() == wanted.keys(), f"device {device} of {unit}"
        for key, array in wanted.items():
            assert shards[key].dtype == array.dtype
            assert shards[key].shape == array.shape, f"device {device} of {unit}: {key}"
            assert np.array_equal(shards[key].view(np.uint8), array.view(np.uint8)), f"device {device} of {unit}: {key}"
