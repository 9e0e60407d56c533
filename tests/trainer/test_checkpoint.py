"""Checkpoints are read into any layout bit for bit; what is incomplete is refused by name; no part of one stays."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from nereus.core import EMU, Kind, Layout, LogicalState, NereusError, SettingsError, StateSchema, codec
from nereus.engine.ledger import Ledger
from nereus.engine.positions import Position, Positions
from nereus.trainer import checkpoint
from nereus.trainer.checkpoint import Manifest
from nereus.trainer.table import SampleTable
from tests.engine.fill import local
from tests.oracles.cut import logical
from tests.support.models import ACTOR, CRITIC, decoder
from tests.support.pairs import random_assignment

SCHEMAS = {
    "untied": decoder(vocab=17),
    "tied": decoder(vocab=31, tied=True, kv_heads=1),
    "scalar": decoder(scalar=True),
}
LAYOUTS = [Layout(1), Layout(3), Layout(4, 2), Layout(2, 3), Layout(8), Layout(1, 4), Layout(2, 2, (1, 3))]


def unit_of(layout: Layout, first: int = 0) -> EMU:
    return EMU(ACTOR, layout, tuple(range(first, first + layout.size)))


def empty(schema: StateSchema, unit: EMU, device: int) -> Position:
    return Positions(device, Ledger(device), torch.device("cpu")).create(unit, schema)


def write(directory: Path, schema: StateSchema, unit: EMU) -> None:
    for device in unit.devices:
        position = empty(schema, unit, device)
        for key, values in local(schema, unit, device).items():
            position.tensors[key].copy_(values)
        checkpoint.write_shard(directory, position, device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and bool(torch.equal(*bits))


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_one_layout_wrote_every_other_layout_reads(name: str, tmp_path: Path) -> None:
    schema = SCHEMAS[name]
    rng = random.Random(name)
    for index, stored in enumerate(LAYOUTS):
        directory = tmp_path / str(index)
        directory.mkdir()
        source = unit_of(stored)
        write(directory, schema, source)
        random_one = random_assignment(rng, ACTOR, schema.layers, range(8))
        for unit in (unit_of(rng.choice(LAYOUTS), 20), EMU(ACTOR, random_one.candidate.layout, random_one.units[0])):
            for device in unit.devices:
                position = empty(schema, unit, device)
                checkpoint.fill(directory, source, schema, position, device)
                wanted = local(schema, unit, device)
                assert position.tensors.keys() == wanted.keys()
                for key, values in wanted.items():
                    assert same_bits(position.tensors[key], values), f"{stored} to {unit}, device {device}: {key}"


@pytest.mark.parametrize("layout", [Layout(1), Layout(3, 2), Layout(8)])
def test_parameters_are_the_whole_logical_tensors(layout: Layout, tmp_path: Path) -> None:
    schema = SCHEMAS["tied"]
    write(tmp_path, schema, unit_of(layout))
    found = dict(checkpoint.parameters(tmp_path, unit_of(layout), schema))
    assert list(found) == [tensor.name for tensor in schema.tensors]
    for tensor in schema.tensors:
        bits = found[tensor.name].view(torch.uint16).numpy()
        assert np.array_equal(bits, logical(schema, tensor, Kind.PARAM)), tensor.name


def manifest() -> Manifest:
    units = {ACTOR: unit_of(Layout(2)), CRITIC: EMU(CRITIC, Layout(), (5,))}
    counters = {ACTOR: LogicalState(6, 3, 0, 36), CRITIC: LogicalState(5, 2, 0, 24)}
    return Manifest(3, 36, units, counters, 11)


def complete(final: Path, table: SampleTable | None = None) -> Path:
    with checkpoint.writing(final) as temporary:
        write(temporary, SCHEMAS["scalar"], unit_of(Layout(2)))
        (temporary / checkpoint.shard_name(CRITIC, 0, 0)).write_bytes(b"")
        checkpoint.complete(temporary, final, manifest(), table)
    return final


def test_a_complete_checkpoint_has_its_counters_and_nothing_beside_it(tmp_path: Path) -> None:
    final = complete(tmp_path / "checkpoints" / "step-3")
    assert checkpoint.read_manifest(final) == manifest()
    assert checkpoint.read_table(final) is None
    assert checkpoint.latest(tmp_path) == final
    assert list(final.parent.iterdir()) == [final]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    final = complete(tmp_path / "step-3")
    (final / "of the first").touch()
    assert not (complete(final) / "of the first").exists()


def test_a_checkpoint_that_failed_leaves_the_one_before_and_no_part(tmp_path: Path) -> None:
    final = complete(tmp_path / "checkpoints" / "step-3")
    with (
        pytest.raises(NereusError, match=r"nowhere.*cannot be written"),
        checkpoint.writing(final.with_name("step-4")) as temporary,
    ):
        write(temporary / "nowhere", SCHEMAS["scalar"], unit_of(Layout(2)))
    assert list(final.parent.iterdir()) == [final]


def test_the_newest_complete_checkpoint_is_found_by_number(tmp_path: Path) -> None:
    for step in (9, 10):
        complete(tmp_path / "checkpoints" / f"step-{step}")
    (tmp_path / "checkpoints" / "step-11").mkdir()
    complete(tmp_path / "checkpoints" / "step-12-copy")
    assert checkpoint.latest(tmp_path).name == "step-10"
    with pytest.raises(SettingsError, match=r"no complete checkpoint under .*elsewhere/checkpoints to resume from"):
        checkpoint.latest(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("manifest.json", r"no manifest\.json, the checkpoint is incomplete"),
        ("actor-training-pp0-tp1.safetensors", r"shard actor-training-pp0-tp1\.safetensors is missing"),
        ("critic-training-pp0-tp0.safetensors", r"shard critic-training-pp0-tp0\.safetensors is missing"),
    ],
)
def test_an_incomplete_directory_is_refused_by_what_it_lacks(missing: str, message: str, tmp_path: Path) -> None:
    final = complete(tmp_path / "step-3")
    (final / missing).unlink()
    with pytest.raises(SettingsError, match=message):
        checkpoint.read_manifest(final)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 3}'])
def test_a_damaged_manifest_is_refused(text: str, tmp_path: Path) -> None:
    final = complete(tmp_path / "step-3")
    (final / checkpoint.MANIFEST).write_text(text)
    with pytest.raises(SettingsError):
        checkpoint.read_manifest(final)


@pytest.mark.parametrize("claimed", [Layout(1), Layout(4), Layout(1, 2), Layout(2, 2), Layout(2, 1, (3,))])
def test_shards_of_another_layout_than_the_manifest_says_are_refused(claimed: Layout, tmp_path: Path) -> None:
    """transformers PR#48569: written at TP 2 and taken for another layout, resume silently had wrong moments."""
    final, schema, written = tmp_path / "step-3", SCHEMAS["untied"], unit_of(Layout(2))
    with checkpoint.writing(final) as temporary:
        write(temporary, schema, written)
        checkpoint.complete(temporary, final, Manifest(3, 36, {ACTOR: written}, {}, 11), None)
    checkpoint.check(final, {ACTOR: schema}, 11)
    wrong = Manifest(3, 36, {ACTOR: unit_of(claimed)}, {}, 11)
    (final / checkpoint.MANIFEST).write_text(json.dumps(codec.encode(wrong)))
    with pytest.raises(SettingsError, match=r"is missing|this job needs|sum to 3, the model has 4 layers"):
        checkpoint.check(final, {ACTOR: schema}, 11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_on_only_with_the_models_it_was_made_of(layout: Layout, tmp_path: Path) -> None:
    unit, schema = unit_of(layout), SCHEMAS["untied"]
    with checkpoint.writing(tmp_path / "step-3") as temporary:
        write(temporary, schema, unit)
        made = Manifest(3, 36, {ACTOR: unit}, {}, 11)
        checkpoint.complete(temporary, tmp_path / "step-3", made, None)
    checkpoint.check(tmp_path / "step-3", {ACTOR: schema}, 11)
    for other in (decoder(vocab=40), SCHEMAS["tied"], SCHEMAS["scalar"]):
        with pytest.raises(SettingsError, match="resume with the models and the precision of the run"):
            checkpoint.check(tmp_path / "step-3", {ACTOR: other}, 11)
    with pytest.raises(SettingsError, match="holds actor/training; this job trains actor/training, critic/training"):
        checkpoint.check(tmp_path / "step-3", {ACTOR: schema, CRITIC: schema}, 11)
    shard = tmp_path / "step-3" / checkpoint.shard_name(ACTOR, 0, 0)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(SettingsError, match="is cut short"):
        checkpoint.check(tmp_path / "step-3", {ACTOR: schema}, 11)


def test_the_table_of_an_unfinished_step_comes_back_as_it_was(tmp_path: Path) -> None:
    table = SampleTable(3, np.arange(36, 40, dtype=np.int64))
    table.set_tokens("response", [[4], [4, 5], [6, 7, 8], [9]])
    table.columns |= {"advantages": np.array([[0.1, -1e-300]]), "stat/actor/kl": np.array(0.25)}
    table.done |= {"generate", "values"}
    table.updates["update_actor"] = 1
    found = checkpoint.read_table(complete(tmp_path / "step-3", table))
    assert found is not None
    assert (found.step, found.done, found.updates) == (3, {"generate", "values"}, {"update_actor": 1})
    assert found.sample_ids.tolist() == [36, 37, 38, 39]
    assert found.columns.keys() == table.columns.keys()
    for name, column in table.columns.items():
        assert found.columns[name].dtype == column.dtype
        assert np.array_equal(found.columns[name], column), name
