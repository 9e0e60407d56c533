"""The arithmetic of an imported batch: sequences of a mini-batch, shares of replicas, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.core import Lengths, Workload
from nereus.integrations.imported import Batch, Imported, MiniBatch, Part, Refusal, RefusedImportError


@dataclass(frozen=True, slots=True)
class Step:
    """One RL step in sequences, and what had to be understood to say so."""

    prompts: int
    samples_per_prompt: int
    mini_batch: int
    notes: tuple[str, ...] = ()


def replicas(part: Part) -> int:
    """DP replicas of a part: its devices over those of one copy of the sequence, at least 1."""
    size = (part.tp or 1) * (part.pp or 1) * (part.cp or 1) * (part.sp or 1)
    return max(1, (part.devices or size) // size)


def step(found: Imported) -> Step:
    """The step that the file describes. Raises RefusedImportError for a batch of nothing."""
    batch = found.batch
    samples = 1 if batch.samples_per_prompt is None else batch.samples_per_prompt
    prompts = batch.prompts or batch.stream_prompts or 0
    if prompts < 1 or samples < 1:
        raise RefusedImportError(
            Refusal.NO_BATCH, f"{found.framework}: {prompts} prompts with {samples} responses each make no batch"
        )
    notes: list[str] = []
    if batch.prompts_are_samples:
        if prompts % samples:
            notes.append(
                f"{prompts} trajectories are no whole number of groups of {samples}: the last is counted whole"
            )
        prompts = -(-prompts // samples)
    sequences = prompts * samples
    asked = _mini_batch(batch, samples, sequences, found.actor)
    if asked < 1:
        raise RefusedImportError(
            Refusal.INVALID,
            f"{found.framework}: a mini-batch of {batch.mini_batch} {batch.mini_batch_unit} of {sequences} sequences "
            "holds no sequence",
        )
    mini = min(asked, sequences)
    if asked > sequences:
        notes.append(f"the mini-batch of {asked} sequences is larger than the batch of {sequences}: one update a step")
    elif sequences % mini:
        mini = next(size for size in range(mini, 0, -1) if sequences % size == 0)
        notes.append(
            f"a mini-batch of {asked} does not divide the batch of {sequences} sequences: {mini} is planned with, the "
            "framework ends with a smaller one"
        )
    return Step(prompts, samples, mini, tuple(notes))


def _mini_batch(batch: Batch, samples: int, sequences: int, actor: Part) -> int:
    """Sequences of a mini-batch as the file asks for it."""
    if batch.mini_batch is None:
        return sequences
    match batch.mini_batch_unit:
        case MiniBatch.PROMPTS:
            return batch.mini_batch * samples
        case MiniBatch.UPDATES:
            return sequences // batch.mini_batch if batch.mini_batch > 0 else 0
        case MiniBatch.ACCUMULATION:
            return batch.mini_batch * (actor.micro_batch or 1) * replicas(actor)
        case MiniBatch.SAMPLES:
            return batch.mini_batch


def workload(found: Imported, this: Step, prompt: Lengths, response: Lengths) -> Workload:
    """The step with its lengths."""
    return Workload(
        prompts=this.prompts,
        samples_per_prompt=this.samples_per_prompt,
        prompt=prompt,
        response=response,
        mini_batch=this.mini_batch,
        max_response_tokens=int(response.maximum),
        epochs=found.batch.epochs,
        packed=found.batch.unpadded,
        loss=found.batch.loss,
    )


def micro_batch(part: Part, share: int, sequence_tokens: float, packed: bool) -> int:
    """Sequences of a micro-batch on one replica, at most its share; `packed`: as many as the token budget holds."""
    asked = part.micro_batch
    if part.step_micro_batch:
        asked = max(1, part.step_micro_batch // replicas(part))
    if packed and part.tokens:
        # Token budgets are for a device; devices that share a sequence hold as much more of it together.
        together = part.tokens * (part.sp or 1) * (part.cp or 1)
        asked = max(1, int(together // max(sequence_tokens, 1.0)))
    return max(1, min(asked or 1, share))


def inexact(found: Imported, this: Step) -> tuple[str, ...]:
    """What keeps replicas x micro-batch x accumulation from making the batch exactly, each with its three numbers."""
    problems: list[str] = []
    trained = [("actor", found.actor)] + ([("critic", found.critic)] if found.critic else [])
    for role, part in trained:
        dp = replicas(part)
        micro = part.micro_batch or 1
        share, rest = divmod(this.mini_batch, dp)
        near = " and ".join(str(size) for size in _nearest(this.mini_batch, dp))
        if share == 0:
            problems.append(
                f"{role}: a mini-batch of {this.mini_batch} sequences over dp {dp} is 0 for each replica, "
                f"micro-batch {micro}: nearest dp {near}"
            )
        elif rest:
            problems.append(f"{role}: dp {dp} does not divide the mini-batch of {this.mini_batch}: nearest dp {near}")
        elif part.micro_batch and micro > share:
            problems.append(
                f"{role}: micro-batch {micro} is larger than a replica's share: "
                f"{this.mini_batch} / {dp} = {share} < {micro}"
            )
        elif part.micro_batch and share % micro and not found.batch.packed:
            problems.append(f"{role}: micro-batch {micro} does not divide a replica's share of {share} sequences")
    return tuple(problems)


def _nearest(whole: int, dp: int) -> tuple[int, ...]:
    """The divisors of `whole` on both sides of `dp`."""
    below = next((size for size in range(min(dp, whole), 0, -1) if whole % size == 0), 1)
    above = next((size for size in range(dp, whole + 1) if whole % size == 0), below)
    return tuple(dict.fromkeys((below, above)))
