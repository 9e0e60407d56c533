"""Builds the four tiny models of the counting example from a seed, as Hugging Face directories.

    python examples/make_tiny_models.py --out DIR --seed 0

`actor` (and `reference`, its copy) is a weak imitator that stops too early: at every position the answer ends with the
same probability, so it can grow smoothly. `reward` (and `critic`, its copy) has learned the score of every prefix of
an answer. The held-out start digits are unknown to the reward model; the actor has seen them here (short answers), so
that what reinforcement learning teaches it about length, on the other digits, can carry over to them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel
from transformers.utils import logging

from nereus.tasks.counting import BOS, DIGITS, EOS, MASKED, PAD, SEP, VOCABULARY, ZERO, Counting

ANSWER_TOKENS = 56
PROMPT_TOKENS = 3
ACTOR_STEPS, ACTOR_BATCH, ACTOR_RATE = 120, 32, 2e-3
REWARD_STEPS, REWARD_BATCH, REWARD_RATE = 320, 24, 4e-3
STOP = 0.18
NOISE = 0.03
EOS_WEIGHT = 5.0
FINISHED = "build.json"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

Prompts = tuple[Tensor, Tensor]
"""Token ids (n, 3) and the start digits (n,)."""


def config() -> LlamaConfig:
    """Sizes of all four models: 0.15 M parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        dtype="float32",
    )


def initialise(model: PreTrainedModel, random: torch.Generator) -> None:
    """Narrower than usual for the embedding, scaled by fan-in elsewhere: learns in fewer steps at this size."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            spread = 0.02 if "embed_tokens" in name else 0.5 / math.sqrt(parameter.shape[1])
            torch.nn.init.normal_(parameter, 0.0, spread, generator=random)


def draw_prompts(count: int, digits: tuple[int, ...], random: torch.Generator) -> Prompts:
    """Prompts that start from `digits`, uniformly."""
    starts = torch.tensor(digits)[torch.randint(len(digits), (count,), generator=random)]
    column = torch.ones_like(starts)
    return torch.stack([column * BOS, starts + ZERO, column * SEP], 1), starts


def right_digits(starts: Tensor) -> Tensor:
    """The correct answer to each prompt, without its end."""
    return ZERO + (starts[:, None] + torch.arange(ANSWER_TOKENS)) % DIGITS


def prefix_scores(answers: Tensor, starts: Tensor, task: Counting) -> Tensor:
    """The task's score of every prefix of the answers: what each would earn if it ended there."""
    digit = (answers >= ZERO) & (answers < ZERO + DIGITS)
    wrong = (digit & (answers != right_digits(starts))).cumsum(1) > 0
    correct = (digit & ~wrong).cumsum(1).clamp(max=task.cap)
    return correct / task.cap * torch.where(wrong, task.error_factor, 1.0)


def actor_loss(model: PreTrainedModel, random: torch.Generator) -> Tensor:
    """Cross-entropy against a weak teacher at every position: stop, the right digit, or now and then any digit."""
    prompts, starts = draw_prompts(ACTOR_BATCH, tuple(range(DIGITS)), random)
    right = right_digits(starts)
    slips = torch.rand(right.shape, generator=random) < NOISE
    context = torch.where(slips, torch.randint(ZERO, ZERO + DIGITS, right.shape, generator=random), right)
    tokens = torch.cat([prompts, context[:, :-1]], 1)
    logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT_TOKENS - 1 :]
    logits = logits.index_fill(-1, torch.tensor(MASKED), -1e9)
    teacher = torch.zeros_like(logits)
    teacher[..., ZERO : ZERO + DIGITS] = NOISE * (1 - STOP) / DIGITS
    teacher.scatter_add_(-1, right[..., None], torch.full((*right.shape, 1), (1 - NOISE) * (1 - STOP)))
    teacher[..., EOS] = STOP
    return -(teacher * logits.log_softmax(-1).clamp(min=-50)).sum(-1).mean()


def draw_answers(starts: Tensor, random: torch.Generator) -> Tensor:
    """Answers of every length, most with a first error somewhere; after it some count on from the wrong digit."""
    shape, offsets = (len(starts), ANSWER_TOKENS), torch.arange(ANSWER_TOKENS)

    def chance(probability: float, *size: int) -> Tensor:
        return torch.rand(size, generator=random) < probability

    def place(end: int) -> Tensor:
        return torch.randint(end, (len(starts), 1), generator=random)

    first = torch.where(chance(0.6, len(starts), 1), place(ANSWER_TOKENS), ANSWER_TOKENS)
    error = (offsets == first) | ((offsets > first) & chance(0.1, *shape))
    shift = torch.where(error, torch.randint(1, DIGITS, shape, generator=random), 0)
    shift = torch.where(chance(0.5, len(starts), 1), shift.cumsum(1), shift)
    answers = ZERO + (right_digits(starts) - ZERO + shift) % DIGITS
    end = torch.maximum(place(ANSWER_TOKENS + 1), place(ANSWER_TOKENS + 1))
    answers = torch.where(offsets == end, EOS, answers)
    return torch.where(offsets > end, PAD, answers)


def prefix_values(model: PreTrainedModel, prompts: Tensor, answers: Tensor) -> Tensor:
    """The scalar head's output on every answer token."""
    hidden = model.model(input_ids=torch.cat([prompts, answers], 1), use_cache=False).last_hidden_state
    values: Tensor = model.score(hidden[:, PROMPT_TOKENS:])[..., 0]
    return values


def reward_loss(model: PreTrainedModel, task: Counting, random: torch.Generator) -> Tensor:
    """Squared error against the task's score of every prefix; whole answers count more."""
    prompts, starts = draw_prompts(REWARD_BATCH, task.training_digits, random)
    answers = draw_answers(starts, random)
    weight = (answers != PAD) + (EOS_WEIGHT - 1) * (answers == EOS)
    error = prefix_values(model, prompts, answers) - prefix_scores(answers, starts, task)
    return (error**2 * weight).sum() / weight.sum()


def fit(model: PreTrainedModel, loss: Callable[[], Tensor], rates: Iterator[float], name: str) -> None:
    """Adam with a rate for each step."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
    begin = time.monotonic()
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"{name}: step {step + 1}, loss {value.item():.4f}, {time.monotonic() - begin:.0f} s", flush=True)


def actor_rates() -> Iterator[float]:
    """Warm-up, then a drop for the last part."""
    for step in range(ACTOR_STEPS):
        yield ACTOR_RATE * min(1.0, (step + 1) / 20) * (1.0 if step < 0.6 * ACTOR_STEPS else 0.3)


def reward_rates() -> Iterator[float]:
    """Warm-up, then a cosine."""
    for step in range(REWARD_STEPS):
        yield REWARD_RATE * min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / REWARD_STEPS)) / 2 + 2e-5


@torch.no_grad()
def correlation(model: PreTrainedModel, task: Counting, digits: tuple[int, ...], random: torch.Generator) -> float:
    """Between the reward model and the task, on whole answers it has not seen."""
    prompts, starts = draw_prompts(512, digits, random)
    answers = draw_answers(starts, random)
    last = (answers != PAD).sum(1, keepdim=True) - 1
    predicted = prefix_values(model, prompts, answers).gather(1, last)[:, 0]
    truth = prefix_scores(answers, starts, task).gather(1, last)[:, 0]
    return float(torch.corrcoef(torch.stack([predicted, truth]))[0, 1])


def build(out: Path, seed: int) -> None:
    """Train and save all four models; `build.json`, written last, marks the folder as finished."""
    task = Counting(seed=seed)
    random = torch.Generator().manual_seed(seed)
    actor = LlamaForCausalLM(config())
    initialise(actor, random)
    fit(actor, lambda: actor_loss(actor, random), actor_rates(), "actor")
    scalar = config()
    scalar.num_labels = 1
    reward = LlamaForSequenceClassification(scalar)
    initialise(reward, random)
    fit(reward, lambda: reward_loss(reward, task, random), reward_rates(), "reward model")
    known, unknown = (correlation(reward, task, d, random) for d in (task.training_digits, task.held_out_digits))
    print(f"reward model: correlation with the verifier {known:.3f} on fresh answers, {unknown:.3f} on held-out digits")
    for model, names in ((actor, ("actor", "reference")), (reward, ("reward", "critic"))):
        for name in names:
            model.save_pretrained(out / name)
    (out / FINISHED).write_text(json.dumps({"seed": seed, "reward_correlation": known}) + "\n")


def keep_freed_memory() -> None:
    """Stop glibc from handing every freed activation back to the system: a third of the time of these small steps."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, threshold_bytes in ((M_TRIM_THRESHOLD, 1 << 30), (M_MMAP_THRESHOLD, 1 << 25)):
            mallopt(option, threshold_bytes)


def main() -> None:
    """Build unless the folder already holds a finished build of the seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for actor, reference, reward and critic")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    marker = arguments.out / FINISHED
    if marker.is_file() and json.loads(marker.read_text())["seed"] == arguments.seed:
        print(f"{arguments.out} is already built with seed {arguments.seed}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    keep_freed_memory()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    begin = time.monotonic()
    build(arguments.out, arguments.seed)
    print(f"built {arguments.out} in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
