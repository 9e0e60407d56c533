"""Copies for more receivers than there are owners: each range leaves its owners once, and the receivers pass it on.

Every receiver gets another part of the range first. These parts then go to one receiver of every other node, and at
last to all others of its own: an owner sends no more than it holds, and no link into a node carries anything twice,
however many receivers there are. Weight synchronisation moves so (D5.12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from nereus.core import StateSchema
from nereus.transition.flows import Flow, Job, Range, ranges_of
from nereus.transition.ribbons import Ribbon, deal

Flows = tuple[Flow, ...]
Nodes = Mapping[int, int]


def relayed(schema: StateSchema, job: Job, node_of: Nodes | None = None) -> tuple[Flows, Flows, Flows]:
    """What the sources send, what the targets pass on to other nodes, and then inside them; the same on every rank.

    In all together every device of a target receives each element that it lacks exactly once. Without `node_of` all
    devices are on one node; a device that it does not name is alone on its own.
    """
    found, _ = ranges_of(schema, job, node_of=node_of)
    ranges = [near for each in found for near in _near(each, node_of)]
    spread = [each for each in ranges if _crowded(each.ribbon, node_of)]
    sent = [each for each in ranges if not _crowded(each.ribbon, node_of)]
    across: list[Flow] = []
    inside: list[Flow] = []
    for index, part in _parts(spread):
        whole, receiver = spread[index], part.source
        sent.append(_for_one(whole, part))
        for node, members in _by_node(whole.ribbon.targets, node_of).items():
            entry = receiver
            if node != _node(receiver, node_of):
                entry = members[whole.ribbon.targets.index(receiver) % len(members)]
                across.append(replace(part, target=entry))
            inside += (replace(part, source=entry, target=device) for device in members if device != entry)
    first = tuple(sent[index].flow(each) for index, each in deal([each.ribbon for each in sent]))
    return first, tuple(across), tuple(inside)


def _near(each: Range, node_of: Nodes | None) -> Iterator[Range]:
    """A range for the targets of each node that has an owner, and one for those of all other nodes."""
    owners, targets = (_by_node(devices, node_of) for devices in (each.ribbon.owners, each.ribbon.targets))
    for node, members in targets.items():
        if node in owners:
            yield _between(each, tuple(owners[node]), tuple(members))
    if far := tuple(device for device in each.ribbon.targets if _node(device, node_of) not in owners):
        yield _between(each, each.ribbon.owners, far)


def _between(each: Range, owners: tuple[int, ...], targets: tuple[int, ...]) -> Range:
    return replace(each, ribbon=replace(each.ribbon, owners=owners, targets=targets))


def _crowded(ribbon: Ribbon, node_of: Nodes | None) -> bool:
    """Whether owners would send something twice: in all, or into a node that is not their own."""
    if len(ribbon.targets) > len(ribbon.owners):
        return True
    near = _by_node(ribbon.owners, node_of).keys()
    return any(len(at) > 1 and node not in near for node, at in _by_node(ribbon.targets, node_of).items())


def _parts(spread: list[Range]) -> list[tuple[int, Flow]]:
    """One copy of each range in parts, whose source is the receiver that has it first; receivers' loads are even."""
    ribbons = [replace(each.ribbon, owners=each.ribbon.targets, targets=each.ribbon.targets[:1]) for each in spread]
    return [(index, spread[index].flow(part)) for index, part in deal(ribbons)]


def _for_one(whole: Range, part: Flow) -> Range:
    """A part of a range, for the receiver that has it first."""
    rows = part.stop - part.start
    ribbon = Ribbon(whole.ribbon.owners, (part.source,), len(part.tensors), rows, part.row_elements)
    return Range(replace(whole.members, tensors=part.tensors), part.start, ribbon)


def _by_node(devices: tuple[int, ...], node_of: Nodes | None) -> dict[object, list[int]]:
    found: dict[object, list[int]] = {}
    for device in devices:
        found.setdefault(_node(device, node_of), []).append(device)
    return found


def _node(device: int, node_of: Nodes | None) -> object:
    return None if node_of is None else node_of.get(device, (device,))
