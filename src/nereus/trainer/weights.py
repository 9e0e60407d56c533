"""Weight synchronisation on one worker: trained parameters to the positions that generate, along cached routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nereus.core import EMU, EMUSet, Kind, ModelStage, Move, StateSchema
from nereus.engine.mover import Mover, Prepared, most_peers
from nereus.engine.transports.torch import SLOWEST_BYTES_PER_S, Torch
from nereus.engine.worker import Worker
from nereus.transition.buckets import SYNC_SHARE
from nereus.transition.fit import stored_bytes
from nereus.transition.flows import Flow, Job
from nereus.transition.relays import relayed
from nereus.transition.routes import aliased, expand_flows, local_copies

Units = tuple[EMU, ...]


@dataclass(frozen=True, slots=True)
class _Ready:
    """What the sources send, this device to itself included, and what the targets then pass on, to other nodes first.

    `whole` are (target, source) tensors that this device holds in the same cut on both sides.
    """

    transport: Torch | None
    whole: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    moving: tuple[Prepared, ...]


class WeightSync:
    """Routes are found once for a pair of sets of units, and kept with the tensors they join until `forget`.

    `node_of` says which devices are near one another.
    """

    def __init__(
        self, worker: Worker, schemas: Mapping[ModelStage, StateSchema], node_of: Mapping[int, int] | None = None
    ) -> None:
        self._worker = worker
        self._schemas = schemas
        self._node_of = node_of
        self._known: dict[tuple[Units, Units, str], _Ready] = {}

    def forget(self) -> None:
        """Units or groups are about to change."""
        self._known.clear()

    def run(self, sources: Units, targets: Units, group: str) -> None:
        """Fill this device's position of `targets`, and send what others need of its own of `sources`.

        Parameters travel in the dtype of the targets. `group` is that of all devices of both; empty for one device.
        """
        key = (sources, targets, group)
        if key not in self._known:
            self._known[key] = self._find(*key)
        ready = self._known[key]
        if ready.transport is not None:
            ready.transport.restart()
        with self._worker.meter.communicating("sync"), torch.no_grad():
            for target, source in ready.whole:
                target.copy_(source)
            for each in ready.moving:
                each.run()

    def _find(self, sources: Units, targets: Units, group: str) -> _Ready:
        worker, device = self._worker, self._worker.device
        trained, generating = sources[0].model_stage, targets[0].model_stage
        schema, positions = self._schemas[generating], worker.positions
        old, new = (next((unit for unit in units if device in unit.devices), None) for units in (sources, targets))
        own, whole = tuple[Move, ...](), frozenset[str]()
        if old is not None and new is not None:  # roles never share storage (D5.2)
            own, whole = local_copies(schema, old, new, device), aliased(schema, old, new, device)
        allowed_s = worker.timeout_s + moving_s(schema, sources, targets)
        transport = Torch(worker.groups.get(group), allowed_s) if group else None
        mover = Mover(device, schema.tensors, schema.dtypes, transport, worker.ledger, SYNC_SHARE)

        def prepared(flows: Sequence[Flow], own: tuple[Move, ...], source: ModelStage) -> Prepared:
            moves = (*own, *expand_flows(flows, schema, (Kind.PARAM,), device))
            peers = most_peers((flow.source, flow.target) for flow in flows)
            stored = self._schemas[source].dtypes
            ends = (lambda _: positions[source]), (lambda _: positions[generating])
            # Nobody's parameters change before the coordinator has heard of all devices.
            return mover.prepare(moves, *ends, peers, stored, kept=True)

        first, *passed = relayed(schema, Job(sources, targets), self._node_of)
        moving = [prepared(first, own, trained), *(prepared(flows, (), generating) for flows in passed)]
        pairs = [tuple(positions[ms].tensors[name, Kind.PARAM] for ms in (generating, trained)) for name in whole]
        return _Ready(transport, tuple(pairs), tuple(moving))


def moving_s(schema: StateSchema, sources: Units, targets: Units) -> float:
    """Seconds that a synchronisation may take for its bytes, above what any command may take.

    Nobody sends more than the fullest source holds, nor passes on more than the fullest target does.
    """
    alone = replace(schema, dtypes={Kind.PARAM: schema.dtypes[Kind.PARAM]})
    held = [stored_bytes(EMUSet(units), {units[0].model_stage: alone}) for units in (sources, targets)]
    return sum(max(sizes.values()) for sizes in held) / SLOWEST_BYTES_PER_S
