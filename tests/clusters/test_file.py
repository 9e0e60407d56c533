from __future__ import annotations

from pathlib import Path

import pytest

from nereus.clusters.file import File, read, written
from nereus.clusters.named import machine
from nereus.core import Boundary, Link, SettingsError

TEXT = """
nodes: 2
devices_per_node: 4
kind: {name: h200, memory: 141 GB, peak_flops: {bf16: 989e12}, memory_rate: 4.8 TB/s, launch_s: 1e-5}
links: {intra: {rate: 450 GB/s, latency_s: 5e-6}, inter: {rate: 50 GB/s, latency_s: 1e-5}}
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    return str(path)


def test_devices_are_numbered_node_by_node(tmp_path: Path) -> None:
    source = File(write(tmp_path, TEXT))
    found = source.cluster()
    assert [found.device(device).node for device in found.ids] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert source.available(Boundary(0, 0.0)) == set(range(8))


def test_sizes_become_bytes_and_numbers_yaml_takes_for_text_are_read(tmp_path: Path) -> None:
    found = File(write(tmp_path, TEXT)).cluster()
    kind = found.kind(0)
    assert (kind.memory_bytes, kind.memory_bytes_per_s, kind.launch_s) == (141 * 10**9, 4.8e12, 1e-5)
    assert kind.peak_flops == {"bf16": 989e12}
    assert found.links["inter"] == Link(50e9, 1e-5)


def test_nodes_and_memory_can_be_overridden(tmp_path: Path) -> None:
    found = File(write(tmp_path, TEXT), nodes=1, memory="80 GB").cluster()
    assert len(found.ids) == 4
    assert found.kind(0).memory_bytes == 80 * 10**9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes: 2", "node: 2", "unknown key 'node' .* did you mean 'nodes'"),
        ("nodes: 2", "nodes: 0", "nodes 0 must be a whole number"),
        ("nodes: 2", "nodes: true", "nodes True must be a whole number"),
        ("nodes: 2", "nodes: 2.5", "nodes 2.5 must be a whole number"),
        ("memory: 141 GB, ", "", "kind lacks memory"),
        ("141 GB", "141 GX", "kind.memory '141 GX' is not a size"),
        ("bf16:", "bf61:", "unknown key 'bf61' in kind.peak_flops"),
        ("{bf16: 989e12}", "{}", "kind.peak_flops is empty"),
        ("latency_s: 5e-6", "latency_s: none", "links.intra.latency_s 'none' must be a number"),
        ("latency_s: 5e-6", "latency_s: true", "links.intra.latency_s True must be a number of at least 1e-30"),
        ("latency_s: 5e-6", "latency_s: 1e-320", "links.intra.latency_s 1e-320 must be a number of at least 1e-30"),
        ("989e12", "1e400", "peak_flops.bf16 inf must be a number of .* at most 1e.30"),
        ("989e12", "1" * 5000, "not YAML"),
        ("inter: {", "outer: {", "unknown key 'outer' in links"),
        ("kind: {", "kind: [", "not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(SettingsError, match=message) as caught:
        File(write(tmp_path, TEXT.replace(old, new)))
    assert "pool.yaml" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        File(str(tmp_path / "none.yaml"))


def test_constants_and_the_host_rate_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    text = TEXT.replace(
        "launch_s: 1e-5}", "launch_s: 1e-5, host_rate: 25 GB/s, host_memory: 1 TB, constants: {gemm.share: 0.5}}"
    )
    assert text != TEXT
    path.write_text(text)
    (kind,) = read(path).kinds.values()
    assert kind.host_bytes_per_s == 25e9
    assert set(read(path).host_bytes().values()) == {10**12}
    assert kind.constants == {"gemm.share": 0.5}


def test_an_unknown_constant_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(TEXT.replace("launch_s: 1e-5}", "launch_s: 1e-5, constants: {gem.share: 0.5}}"))
    with pytest.raises(SettingsError, match=r"'gem\.share' in kind\.constants.*did you mean 'gemm\.share'"):
        read(path)


def test_a_written_cluster_is_read_as_it_was(tmp_path: Path) -> None:
    cluster = machine("h200x4", nodes=3)
    path = tmp_path / "pool.yaml"
    path.write_text(written(cluster, ["Three nodes."]))
    assert path.read_text().startswith("# Three nodes.\n")
    assert read(path) == cluster


@pytest.mark.parametrize("content", [bytes(range(256)), TEXT.encode("utf-16"), b"[" * 5000, b"{a: " * 3000])
def test_what_is_no_text_of_a_cluster_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"cannot be read|not YAML"):
        read(path)


@pytest.mark.parametrize("value", [".nan", ".inf", "9e999 GB"])
@pytest.mark.parametrize("key", ["memory: 141 GB", "memory_rate: 4.8 TB/s", "rate: 50 GB/s"])
def test_sizes_that_are_not_finite_are_refused(tmp_path: Path, key: str, value: str) -> None:
    changed = TEXT.replace(key, f"{key.partition(':')[0]}: {value}")
    with pytest.raises(SettingsError, match=key.partition(":")[0]):
        read(Path(write(tmp_path, changed)))
