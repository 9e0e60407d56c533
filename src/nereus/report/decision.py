"""One line per decision, with its arithmetic; the structured twin is the record in decisions.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from nereus.core import Adapt, Boundary, Decision, Keep, Outcome, Restart, Trigger


def line(boundary: Boundary, triggers: Sequence[Trigger], decision: Decision, outcome: Outcome | None) -> str:
    """`step 23 adapt (urgent: device 3 leaving): actor/training tp2 pp1 dp2 → tp1 pp2 dp2; saves 0.41 s/step, …`."""
    causes = "; ".join(trigger.why for trigger in triggers)
    match decision:
        case Keep(reason=reason):
            return f"step {boundary.step} keep ({causes or 'no trigger'}): {reason}"
        case Adapt(urgent=urgent, payback=payback, reason=reason):
            kind = "urgent" if urgent else "opportunistic"
            text = f"step {boundary.step} adapt ({kind}: {causes}): {reason}; {payback.describe()}"
            return f"{text}; {result(outcome)}" if outcome is not None else text
        case Restart(plan=plan, reason=reason):
            return (
                f"step {boundary.step} restart ({causes}): {reason}; from the last checkpoint under {plan.describe()}"
            )
        case _:
            assert_never(decision)


def result(outcome: Outcome) -> str:
    """What a transition took, or where it stopped."""
    if not outcome.completed:
        return f"stopped after {outcome.seconds:.2f} s: {outcome.error or 'no reason given'}"
    moved = sum(outcome.received_bytes.values())
    return f"took {outcome.seconds:.2f} s, {moved / 1e6:.2f} MB moved"
