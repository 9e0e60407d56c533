"""From what a replan found to a decision: urgent changes must only fit, opportunistic ones must pay (paper §4.3)."""

from __future__ import annotations

from collections.abc import Sequence

from nereus.controller.changes import changes
from nereus.core import (
    Adapt,
    ControllerState,
    Decision,
    Horizon,
    Keep,
    Options,
    Payback,
    Proposal,
    Rejection,
    Restart,
    Trigger,
)
from nereus.core.ports import AdmissionRule


def choose(
    state: ControllerState, triggers: Sequence[Trigger], options: Options, rule: AdmissionRule, step: int
) -> Decision:
    """Urgent when a trigger says so and the current plan is no longer valid; opportunistic otherwise."""
    horizon_steps = min(state.horizons.get(trigger.signal, Horizon()).steps for trigger in triggers)
    paybacks = [
        Payback(proposal.transition.seconds, proposal.saving_s, horizon_steps, rule.margin)
        for proposal in options.proposals
    ]
    if any(trigger.urgent for trigger in triggers) and options.current is None:
        return _urgent(state, options, paybacks)
    return _opportunistic(state, options, paybacks, rule, step)


def _urgent(state: ControllerState, options: Options, paybacks: Sequence[Payback]) -> Decision:
    """The proposal with the lowest time over the horizon, its transition included; profit is not asked for."""
    ranked = sorted(
        zip(options.proposals, paybacks, strict=True),
        key=lambda pair: pair[1].transition_s + pair[1].horizon_steps * pair[0].estimate.step_s,
    )
    if ranked:
        (proposal, payback), others = ranked[0], ranked[1:]
        slower = tuple(
            Rejection(changes(state.plan, other.plan), f"slower over the horizon: {cost.describe()}")
            for other, cost in others
        )
        reason = changes(state.plan, proposal.plan)
        return Adapt(proposal, True, payback, reason, (*options.rejected, *slower))
    if options.fallback is not None:
        return Restart(options.fallback, "no transition to a plan that fits can be executed", options.rejected)
    reasons = options.rejected[0].reason if options.rejected else "no plan fits"
    return Keep(f"nothing to change to: {reasons}", options.rejected)


def _opportunistic(
    state: ControllerState, options: Options, paybacks: Sequence[Payback], rule: AdmissionRule, step: int
) -> Decision:
    """Of the proposals that the rule admits, the one that gains most within the horizon."""
    admitted: list[tuple[Proposal, Payback]] = []
    refused: list[tuple[Payback, Rejection]] = []
    for proposal, payback in zip(options.proposals, paybacks, strict=True):
        yes, words = rule.admits(payback, step)
        if yes:
            admitted.append((proposal, payback))
        else:
            refused.append((payback, Rejection(changes(state.plan, proposal.plan), words)))
    rejected = (*options.rejected, *(rejection for _, rejection in refused))
    if admitted:
        proposal, payback = max(admitted, key=lambda pair: gain_s(pair[1]))
        return Adapt(proposal, False, payback, changes(state.plan, proposal.plan), rejected)
    if not refused:
        return Keep("no other plan that fits was found", rejected)
    best = max(refused, key=lambda pair: gain_s(pair[0]))[1]
    return Keep(f"best of {len(refused)}: {best.plan}; {best.reason}", rejected)


def gain_s(payback: Payback) -> float:
    """Seconds won within the horizon, the transition paid."""
    return payback.saving_s * payback.horizon_steps - payback.transition_s
