"""Fitted values go into cluster files in place; facts and comments stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.planner.fit_constants import FOLDER, LIKE, written

from nereus.clusters.file import read


@pytest.mark.parametrize("name", LIKE)
def test_only_fitted_values_change(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    cluster = read(FOLDER / f"{name}.yaml")
    (kind,) = cluster.kinds.values()
    inter = cluster.links["inter"]
    changed = replace(kind, constants=dict(kind.constants) | {"gemm.share": 0.51})
    links = dict(cluster.links) | {"inter": replace(inter, constants=dict(inter.constants) | {"send.share": 0.52})}
    path = tmp_path / "new.yaml"
    path.write_text(written(text, changed, links), encoding="utf-8")
    found = read(path)
    assert found.kinds[kind.name] == changed
    assert found.links == links
    assert path.read_text().count("#") == text.count("#")


def test_a_constant_that_the_file_lacks_is_added(tmp_path: Path) -> None:
    text = (FOLDER / "h100.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "gemm.half_k" not in line]
    cluster = read(FOLDER / "h100.yaml")
    path = tmp_path / "new.yaml"
    path.write_text(written("\n".join(lines), cluster.kinds["h100"], cluster.links), encoding="utf-8")
    assert read(path) == cluster
