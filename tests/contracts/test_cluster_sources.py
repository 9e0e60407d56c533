"""What every source of devices must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.core import Boundary, plugins
from nereus.core.ports import ClusterSource
from tests.clusters.test_file import TEXT

PACKAGE = "nereus.clusters"


def options(name: str, directory: Path) -> dict[str, object]:
    """Valid options of each source."""
    (directory / "pool.yaml").write_text(TEXT)
    (directory / "pool.csv").write_text("step,devices\n0,2\n4,1\n")
    valid: dict[str, dict[str, object]] = {
        "local": {"devices": 2, "capacity": "1 MiB", "cores": 2},
        "file": {"path": str(directory / "pool.yaml")},
        "named": {"type": "h200x2", "nodes": 2},
        "trace": {"path": str(directory / "pool.csv"), "pool": {"devices": 2, "capacity": "1 MiB", "cores": 2}},
    }
    return valid[name]


@pytest.fixture(params=plugins.names(PACKAGE))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ClusterSource:
    made: ClusterSource = plugins.make(PACKAGE, request.param, options(request.param, tmp_path))
    return made


def test_devices_are_never_none_and_always_of_the_cluster(source: ClusterSource) -> None:
    ids = set(source.cluster().ids)
    for step in range(10):
        available = source.available(Boundary(step, float(step)))
        assert available
        assert available <= ids


def test_the_same_boundary_shows_the_same_devices(source: ClusterSource) -> None:
    assert source.available(Boundary(3, 3.0)) == source.available(Boundary(3, 3.0))
    assert source.cluster() == source.cluster()
