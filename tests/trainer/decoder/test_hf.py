"""Model directories: each position reads its slices alone; what is written loads in transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from nereus.core import Head, Layout, SettingsError
from nereus.core.model_dir import ModelDir
from nereus.families import LM_HEAD, SCORE
from nereus.trainer.decoder import hf
from tests.trainer.decoder import oracle

LAYOUTS = [Layout(1, 1), Layout(2, 2), Layout(4, 1), Layout(1, 3, (1, 0, 2))]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("shard_size", ["10GB", "20KB"])
def test_every_position_gets_its_slices(name: str, shard_size: str, tmp_path: Path) -> None:
    model, family, spec = oracle.build(name)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "10GB")
    spec = family.spec(ModelDir.read(tmp_path).config)
    tensors = family.tensors(spec)
    full = oracle.full_state(model, tensors)
    for layout in LAYOUTS:
        for device in range(layout.size):
            position = divmod(device, layout.tp)
            found = hf.load(tmp_path, spec, tensors, layout, *position)
            expected = oracle.cut(full, tensors, layout, *position, spec.layers)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            assert all(tensor.is_contiguous() for tensor in found.values())


@pytest.mark.parametrize("name", list(oracle.MODELS))
@pytest.mark.parametrize("file_bytes", [hf.FILE_BYTES, 9000])
def test_what_is_written_loads_in_transformers(name: str, file_bytes: int, tmp_path: Path) -> None:
    model, family, spec = oracle.build(name)
    tensors = oracle.full_state(model, family.tensors(spec))
    hf.write(tmp_path / "out", family.config(spec), iter(tensors.items()), file_bytes)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(again) is type(model)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert family.spec(ModelDir.read(tmp_path / "out").config) == spec
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_scalar_head_is_the_score_of_transformers(kind: Any, tmp_path: Path) -> None:
    model, family, spec = oracle.build("llama", head=Head.SCALAR)
    tensors = oracle.full_state(model, family.tensors(spec))
    hf.write(tmp_path / "out", family.config(spec), tensors.items())
    again = kind.from_pretrained(tmp_path / "out")
    assert torch.equal(again.score.weight, model.score.weight)
    assert again.config.num_labels == 1
    assert family.spec(ModelDir.read(tmp_path / "out").config).head is Head.SCALAR


def test_a_critic_may_start_without_a_head_only_when_that_is_stated(tmp_path: Path) -> None:
    model, family, spec = oracle.build("llama-tied")
    model.save_pretrained(tmp_path)
    critic = replace(spec, head=Head.SCALAR, tied_embeddings=False)
    tensors = family.tensors(critic)
    with pytest.raises(SettingsError, match=r"score\.weight is missing"):
        hf.load(tmp_path, critic, tensors, Layout(), 0, 0)
    found = hf.load(tmp_path, critic, tensors, Layout(), 0, 0, may_lack=(SCORE,))
    assert found[SCORE].shape == (1, spec.hidden)
    assert not found[SCORE].any()
    assert LM_HEAD not in found


def test_another_dtype_is_cast(tmp_path: Path) -> None:
    model, family, spec = oracle.build("llama")
    model.bfloat16().save_pretrained(tmp_path)
    assert family.spec(ModelDir.read(tmp_path).config).dtype == "bf16"
    found = hf.load(tmp_path, spec, family.tensors(spec), Layout(), 0, 0, dtype="fp64")
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    model, family, spec = oracle.build("llama")
    model.save_pretrained(tmp_path)
    wider = replace(spec, ffn_hidden=spec.ffn_hidden + 1)
    with pytest.raises(SettingsError, match=r"gate_proj.weight has shape \[22, 24\], config.json says \[23, 24\]"):
        hf.load(tmp_path, wider, family.tensors(wider), Layout(), 0, 0)


def test_writing_leaves_nothing_behind_when_it_fails_and_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("kept")
    with pytest.raises(SettingsError, match="not empty"):
        hf.write(tmp_path / "out", {}, [])
    assert (tmp_path / "out" / "file").read_text() == "kept"


def test_an_interrupted_write_is_not_taken_for_a_model(tmp_path: Path) -> None:
    model, family, spec = oracle.build("llama")
    tensors = oracle.full_state(model, family.tensors(spec))

    def broken() -> Any:
        yield from list(tensors.items())[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.write(tmp_path / "out", family.config(spec), broken(), 100)
    assert not (tmp_path / "out").exists()
    hf.write(tmp_path / "out", family.config(spec), tensors.items())
    assert not list(tmp_path.glob("*.partial"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
