"""A framework's use of a machine stays inside what the machine can do."""

from __future__ import annotations

from dataclasses import replace

from nereus.clusters._constants import KIND_CONSTANTS
from nereus.clusters.named import machine
from nereus.integrations.habits import HABITS, said, used_by
from nereus.integrations.hosts import NAMES

H100 = machine("h100x8")


def test_only_frameworks_that_are_read_have_habits_and_these_are_constants_of_the_model() -> None:
    assert set(HABITS) <= set(NAMES)
    assert all(habits.constants.keys() <= KIND_CONSTANTS.keys() for habits in HABITS.values())


def test_a_framework_moves_state_no_faster_than_its_machine_and_keeps_what_kernels_take() -> None:
    (kind,) = H100.kinds.values()
    (used,) = used_by("nemo-rl", H100).kinds.values()
    assert 0 < used.host_bytes_per_s < kind.host_bytes_per_s
    assert kind.constants.items() <= used.constants.items()
    slow = replace(H100, kinds={kind.name: replace(kind, host_bytes_per_s=1e9)})
    assert used_by("nemo-rl", slow).kinds[kind.name].host_bytes_per_s == 1e9
    (slowed,) = used_by("nemo-rl", slow).kinds.values()
    assert slowed.constants["offload.fetch"] == 1.0, "no faster back than the machine"
    assert said("nemo-rl")


def test_other_frameworks_are_taken_to_use_all() -> None:
    assert used_by("slime", H100) is H100
    assert said("slime") == ()
