"""Lengths of an imported job: what the caller gives, else what the file bounds, else an assumption that is listed."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.core import Lengths, ModelSpec, SettingsError
from nereus.integrations.imported import Imported

ASSUMED_PROMPT_TOKENS = 1024
"""Where a file bounds no prompt: its prompts are whatever the data holds."""
ASSUMED_RESPONSE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Understood:
    """Lengths of a step, what was assumed for them, and what the file does to the model's context."""

    prompt: Lengths
    response: Lengths
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def understood(found: Imported, spec: ModelSpec, prompt: Lengths | None, response: Lengths | None) -> Understood:
    """The lengths to plan with. A file states maxima only, so what is not given is as long as the file allows.

    Raises SettingsError when prompt and response together are beyond the model's context, or beyond the file's own
    bound where both are given.
    """
    asked_prompt, asked_response, assumptions = _asked(found, prompt, response)
    whole = found.batch.max_sequence_tokens
    if whole and asked_prompt + asked_response > whole:
        if prompt and response:
            raise SettingsError(
                f"prompt {asked_prompt} + response {asked_response} tokens, the {found.framework} configuration allows "
                f"{whole} together"
            )
        asked_prompt, asked_response = _together(whole, asked_prompt, asked_response, prompt, response)
        assumptions.append(
            f"prompt and response share the {whole} tokens that the file allows: {asked_prompt} and {asked_response}"
        )
    context = max(spec.max_positions, found.context_tokens or 0)
    if asked_prompt + asked_response > context:
        raise SettingsError(
            f"prompt {asked_prompt} + response {asked_response} tokens are beyond the model's context of {context}: "
            "shorten one, or give the model a longer context"
        )
    notes: tuple[str, ...] = ()
    if asked_prompt + asked_response > spec.max_positions:
        notes = (f"the file gives the model a context of {context} tokens, its own is {spec.max_positions}",)
    return Understood(
        prompt or Lengths.constant(asked_prompt),
        response or Lengths.constant(asked_response),
        tuple(assumptions),
        notes,
    )


def _asked(found: Imported, prompt: Lengths | None, response: Lengths | None) -> tuple[int, int, list[str]]:
    batch, assumptions = found.batch, []
    whole = batch.max_sequence_tokens
    longest = int(prompt.maximum) if prompt else batch.max_prompt_tokens
    if longest is None:
        left = whole - (int(response.maximum) if response else batch.max_response_tokens or whole) if whole else 0
        longest = min(left, ASSUMED_PROMPT_TOKENS) if left > 0 else ASSUMED_PROMPT_TOKENS
        assumptions.append(f"the file bounds no prompt: every prompt has {longest} tokens; give their length")
    elif prompt is None:
        assumptions.append(f"every prompt has {longest} tokens, the most that the file allows: give the mean")
    answer = int(response.maximum) if response else batch.max_response_tokens
    if answer is None:
        answer = whole - longest if whole and whole > longest else whole or ASSUMED_RESPONSE_TOKENS
        bound = "no response alone" if whole else "no response"
        assumptions.append(f"the file bounds {bound}: every response has {answer} tokens; give their length")
    elif response is None:
        assumptions.append(f"every response has {answer} tokens, the most that the file allows: give the mean")
    return longest, answer, assumptions


def _together(
    whole: int, asked_prompt: int, asked_response: int, prompt: Lengths | None, response: Lengths | None
) -> tuple[int, int]:
    """Tokens of prompt and response that share a bound: what is given stays, a response gets most of the rest."""
    if response:
        return max(1, whole - asked_response), asked_response
    if not prompt:
        asked_prompt = min(asked_prompt, max(whole - asked_response, min(ASSUMED_PROMPT_TOKENS, whole // 4), 1))
    return asked_prompt, max(1, whole - asked_prompt)
