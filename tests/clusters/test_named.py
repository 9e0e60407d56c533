"""Machine types by name."""

from __future__ import annotations

from collections import Counter

import pytest

from nereus.clusters.named import Named, machine, names
from nereus.core import Boundary, SettingsError


def test_every_type_is_a_machine_with_devices_that_can_compute_in_bf16() -> None:
    for name in names():
        cluster = machine(name, nodes=2)
        (kind,) = cluster.kinds.values()
        assert kind.peak_flops["bf16"] > 1e14
        assert kind.memory_bytes >= 40e9
        assert kind.host_bytes_per_s > 0
        assert {device.node for device in cluster.devices} == {0, 1}
        assert cluster.links["intra"].bytes_per_s > cluster.links["inter"].bytes_per_s


@pytest.mark.parametrize(
    ("name", "per_node"),
    [
        ("h200x8", 8),
        ("h200x4", 4),
        ("h200", 8),
        ("a100-64x4", 4),
        ("mi250x", 8),
        ("mi250xx2", 2),
        ("gb200", 64),
        ("gb200x72", 72),
    ],
)
def test_the_name_says_how_many_devices_a_node_has(name: str, per_node: int) -> None:
    cluster = machine(name, nodes=3)
    assert Counter(device.node for device in cluster.devices) == dict.fromkeys(range(3), per_node)


def test_an_unknown_type_names_the_nearest_ones() -> None:
    with pytest.raises(SettingsError, match=r"'h201x8' is unknown, valid: a100-40x8, .*; did you mean .*h200x8"):
        machine("h201x8")


@pytest.mark.parametrize(
    ("name", "nodes", "message"),
    [
        ("h200x16", 1, "16 devices in a node, a h200 node has 1 to 8"),
        ("h200x0", 1, "0 devices"),
        ("gb200x73", 1, "a gb200 node has 1 to 72"),
        ("h200", 0, "0 nodes"),
    ],
)
def test_sizes_that_do_not_exist_are_refused(name: str, nodes: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        machine(name, nodes)


def test_the_source_offers_every_device_and_takes_another_capacity() -> None:
    source = Named("a100-40x8", nodes=3, memory="30 GB")
    assert source.available(Boundary(0, 0.0)) == set(range(24))
    assert source.cluster().kinds["a100-40"].memory_bytes == 30_000_000_000
