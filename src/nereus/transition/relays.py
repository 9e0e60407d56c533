"""Copies for more receivers than there are owners: each range leaves its owners once, and the receivers pass it on.

Every receiver gets another part of the range first, then they exchange these parts: an owner sends no more than it
holds, however many receivers there are. Weight synchronisation moves so (D5.12).
"""

from __future__ import annotations

from dataclasses import replace

from nereus.core import StateSchema
from nereus.transition.flows import Flow, Job, Range, ranges_of
from nereus.transition.ribbons import Ribbon, deal

Flows = tuple[Flow, ...]


def relayed(schema: StateSchema, job: Job) -> tuple[Flows, Flows]:
    """What the sources send, and what the targets then pass on among themselves; the same on every rank.

    In both together every device of a target receives each element that it lacks exactly once.
    """
    ranges, _ = ranges_of(schema, job)
    sent = [each for each in ranges if len(each.ribbon.targets) <= len(each.ribbon.owners)]
    crowded = [each for each in ranges if len(each.ribbon.targets) > len(each.ribbon.owners)]
    passed: list[Flow] = []
    for index, part in _parts(crowded):
        whole, receiver = crowded[index], part.source
        others = (device for device in whole.ribbon.targets if device != receiver)
        passed += (replace(part, target=device) for device in others)
        ribbon = Ribbon(whole.ribbon.owners, (receiver,), len(part.tensors), part.stop - part.start, part.row_elements)
        sent.append(Range(replace(whole.members, tensors=part.tensors), part.start, ribbon))
    return tuple(sent[index].flow(each) for index, each in deal([each.ribbon for each in sent])), tuple(passed)


def _parts(crowded: list[Range]) -> list[tuple[int, Flow]]:
    """One copy of each range in parts, whose source is the receiver that has it first; receivers' loads are even."""
    ribbons = [replace(each.ribbon, owners=each.ribbon.targets, targets=each.ribbon.targets[:1]) for each in crowded]
    return [(index, crowded[index].flow(part)) for index, part in deal(ribbons)]
