"""The builder of the counting example's models: its parts, and the folders it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from examples import make_tiny_models as tiny
from nereus.core.ports import Prompt
from nereus.tasks.counting import EOS, PAD, ZERO, Counting


def make(out: Path, seed: int) -> None:
    """The command, with training cut to one step each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "ACTOR_STEPS", 1)
        patch.setattr(tiny, "REWARD_STEPS", 1)
        patch.setattr(sys, "argv", ["make_tiny_models.py", "--out", str(out), "--seed", str(seed)])
        tiny.main()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "models"
    make(out, 4)
    return out


def test_prefix_scores_are_the_verifiers() -> None:
    task = Counting(cap=20, error_factor=0.25)
    random = torch.Generator().manual_seed(1)
    _, starts = tiny.draw_prompts(40, tuple(range(10)), random)
    answers = tiny.draw_answers(starts, random)
    scores = tiny.prefix_scores(answers, starts, task)
    for row, start in enumerate(starts.tolist()):
        prompt = Prompt(0, (), {"digit": start})
        tokens = [token for token in answers[row].tolist() if token != PAD]
        for length in range(1, len(tokens) + 1):
            assert scores[row, length - 1].item() == pytest.approx(task.score(prompt, tokens[:length]))


def test_answers_of_the_reward_model_vary_in_length_and_correctness() -> None:
    random = torch.Generator().manual_seed(2)
    _, starts = tiny.draw_prompts(400, tuple(range(10)), random)
    answers = tiny.draw_answers(starts, random)
    lengths = (answers != PAD).sum(1)
    digits = (answers >= ZERO) & (answers < ZERO + 10)
    wrong = (digits & (answers != tiny.right_digits(starts))).any(1).float().mean().item()
    assert lengths.min() < 8
    assert lengths.max() == tiny.ANSWER_TOKENS
    assert 0.3 < wrong < 0.7
    assert ((answers == EOS).sum(1) <= 1).all()


def test_transformers_reads_what_was_written_and_copies_are_equal(built: Path) -> None:
    actor, reference = (LlamaForCausalLM.from_pretrained(built / name) for name in ("actor", "reference"))
    reward, critic = (LlamaForSequenceClassification.from_pretrained(built / name) for name in ("reward", "critic"))
    assert reward.score.weight.shape == (1, 64)
    for one, other in ((actor, reference), (reward, critic)):
        mine, copy = one.state_dict(), other.state_dict()
        assert all(torch.equal(mine[name], copy[name]) and mine[name].dtype is torch.float32 for name in mine)


def test_each_model_is_below_a_megabyte(built: Path) -> None:
    for name in ("actor", "reference", "reward", "critic"):
        assert sum(file.stat().st_size for file in (built / name).iterdir()) < 1_000_000


def test_a_finished_build_is_kept_a_half_one_or_another_seed_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "actor" / "model.safetensors"
    make(tmp_path, 4)
    first = weights.read_bytes()
    weights.write_bytes(b"touched")
    make(tmp_path, 4)
    assert "already built with seed 4" in capsys.readouterr().out
    assert weights.read_bytes() == b"touched"
    (tmp_path / tiny.FINISHED).unlink()
    make(tmp_path, 4)
    assert weights.read_bytes() == first, "the same seed gives the same bytes"
    make(tmp_path, 5)
    assert weights.read_bytes() != first
    assert json.loads((tmp_path / tiny.FINISHED).read_text())["seed"] == 5


def test_the_reward_model_never_sees_a_held_out_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    original = tiny.draw_prompts

    def spy(count: int, digits: tuple[int, ...], random: torch.Generator) -> tiny.Prompts:
        seen.update(digits)
        return original(count, digits, random)

    monkeypatch.setattr(tiny, "draw_prompts", spy)
    scalar = tiny.config()
    scalar.num_labels = 1
    tiny.reward_loss(LlamaForSequenceClassification(scalar), Counting(held_out_digits=(3, 7)), torch.Generator())
    assert seen == {0, 1, 2, 4, 5, 6, 8, 9}
