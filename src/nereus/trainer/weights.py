"""Weight synchronisation on one worker: trained parameters to the positions that generate, along cached routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nereus.core import EMU, EMUSet, Kind, ModelStage, Move, StateSchema
from nereus.engine.mover import Mover, most_peers
from nereus.engine.transports.torch import SLOWEST_BYTES_PER_S, Torch
from nereus.engine.worker import Worker
from nereus.transition.buckets import SYNC_SHARE
from nereus.transition.fit import stored_bytes
from nereus.transition.flows import Flow, Job
from nereus.transition.relays import relayed
from nereus.transition.routes import aliased, expand_flows, local_copies

Units = tuple[EMU, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Moves of this device, and the most devices that any device exchanges with."""

    moves: tuple[Move, ...]
    most_peers: int


@dataclass(frozen=True, slots=True)
class _Routes:
    """What the sources send, this device to itself included, and what the targets then pass on, to other nodes first.

    `whole` are tensors that this device holds in the same cut on both sides.
    """

    whole: frozenset[str]
    sent: _Part
    passed: tuple[_Part, ...]


class WeightSync:
    """Routes are found once for a pair of sets of units. `node_of` says which devices are near one another."""

    def __init__(
        self, worker: Worker, schemas: Mapping[ModelStage, StateSchema], node_of: Mapping[int, int] | None = None
    ) -> None:
        self._worker = worker
        self._schemas = schemas
        self._node_of = node_of
        self._known: dict[tuple[Units, Units], _Routes] = {}

    def forget(self) -> None:
        """Units have changed."""
        self._known.clear()

    def run(self, sources: Units, targets: Units, group: str) -> None:
        """Fill this device's position of `targets`, and send what others need of its own of `sources`.

        Parameters travel in the dtype of the targets. `group` is that of all devices of both; empty for one device.
        """
        routes, worker = self._routes(sources, targets), self._worker
        trained, generating = sources[0].model_stage, targets[0].model_stage
        schema, positions = self._schemas[generating], worker.positions
        allowed_s = worker.timeout_s + moving_s(schema, sources, targets)
        transport = Torch(worker.groups.get(group), allowed_s) if group else None
        mover = Mover(worker.device, schema.tensors, schema.dtypes, transport, worker.ledger, SYNC_SHARE)
        sent, passed = routes.sent, routes.passed
        with worker.meter.communicating("sync"), torch.no_grad():
            for name in routes.whole:  # roles never share storage (D5.2)
                positions[generating].tensors[name, Kind.PARAM].copy_(positions[trained].tensors[name, Kind.PARAM])
            ends = (lambda _: positions[trained]), (lambda _: positions[generating])
            mover.run(sent.moves, *ends, sent.most_peers, self._schemas[trained].dtypes)
            for part in passed:
                mover.run(part.moves, ends[1], ends[1], part.most_peers)

    def _routes(self, sources: Units, targets: Units) -> _Routes:
        if (sources, targets) not in self._known:
            self._known[sources, targets] = self._find(sources, targets)
        return self._known[sources, targets]

    def _find(self, sources: Units, targets: Units) -> _Routes:
        schema, device = self._schemas[targets[0].model_stage], self._worker.device
        old, new = (next((unit for unit in units if device in unit.devices), None) for units in (sources, targets))
        own, whole = tuple[Move, ...](), frozenset[str]()
        if old is not None and new is not None:
            own, whole = local_copies(schema, old, new, device), aliased(schema, old, new, device)
        routes = relayed(schema, Job(sources, targets), self._node_of)
        sent, *passed = (self._part(schema, flows) for flows in routes)
        return _Routes(whole, _Part((*own, *sent.moves), sent.most_peers), tuple(passed))

    def _part(self, schema: StateSchema, flows: Sequence[Flow]) -> _Part:
        peers = most_peers((flow.source, flow.target) for flow in flows)
        return _Part(expand_flows(flows, schema, (Kind.PARAM,), self._worker.device), peers)


def moving_s(schema: StateSchema, sources: Units, targets: Units) -> float:
    """Seconds that a synchronisation may take for its bytes, above what any command may take.

    Nobody sends more than the fullest source holds, nor passes on more than the fullest target does.
    """
    alone = replace(schema, dtypes={Kind.PARAM: schema.dtypes[Kind.PARAM]})
    held = [stored_bytes(EMUSet(units), {units[0].model_stage: alone}) for units in (sources, targets)]
    return sum(max(sizes.values()) for sizes in held) / SLOWEST_BYTES_PER_S
