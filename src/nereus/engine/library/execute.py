"""Carries out a plan of boxes over a framework's own process group.

Validate, agree, only then move; agree again before anybody says that it is done. Sources are only read. A rank that
fails on its own goes on sending, so that nobody waits for it, and the last agreement tells everyone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from nereus.core import NereusError, SettingsError, TransitionError
from nereus.engine.exchange import Exchange
from nereus.engine.library.check import check_sources_stay, check_tensors, is_same
from nereus.engine.library.digest import digests
from nereus.engine.library.peers import AnyGroup, Peers
from nereus.engine.messages import Part, bundle_bytes
from nereus.transition.boxes import BoxPlan, Route
from nereus.transition.region import Region

Tensors = Mapping[str, torch.Tensor]
PROTOCOL = 6


@dataclass(frozen=True, slots=True)
class Options:
    """How bytes travel. All ranks must use the same."""

    bucket_bytes: int = 64 << 20
    """Staging memory, once for what is sent and once for what is received."""
    timeout_s: float = 60.0
    """Deadline of the whole call, and more for more bytes."""
    slowest_bytes_per_s: float = 50e6
    """A rank that receives more slowly than this is taken for lost."""
    read_memory: bool = True
    """Whether ranks that are processes of one host read one another's memory (Linux), instead of sending."""
    verify: bool = False
    """Hash every tensor before and after, and replicas against one another."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or self.timeout_s <= 0 or self.slowest_bytes_per_s <= 0:
            raise SettingsError(f"{self}: bucket_bytes must be at least 1, the times above 0")


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank did. `fresh` names the tensors it has to make itself."""

    received_bytes: int
    sent_bytes: int
    staging_bytes: int
    seconds: float
    fresh: tuple[str, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Tensor → hash of the whole logical tensor, with `verify`; the same in any placement."""


def reshard(
    plan: BoxPlan,
    source: Tensors,
    target: Tensors,
    group: AnyGroup = None,
    options: Options = DEFAULT,
) -> Report:
    """Fill `target` (this rank's boxes after) from everybody's `source` (its boxes now). Collective over the group.

    Ranks of the plan are ranks of the group. When any rank fails, every rank raises TransitionError by the deadline;
    `target` is then worthless and `source` as it was. After an error of communication the group is not usable.
    """
    started_s = time.perf_counter()
    timeout_s = options.timeout_s + max(plan.received_bytes.values(), default=0) / options.slowest_bytes_per_s
    peers = Peers(group, timeout_s, options.read_memory)
    work = _Work(plan, source, target, peers, options)
    token = f"{plan.fingerprint} {PROTOCOL} {torch.__version__} {sys.byteorder} {options}"
    peers.agree(work.prepare(), token, "the plan, the options or their versions")
    before = digests(plan, plan.source, source, peers) if options.verify else {}
    peers.agree(work.run())
    after = digests(plan, plan.target, target, peers) if options.verify else {}
    changed = [name for name, value in after.items() if before.get(name, value) != value]
    if changed:  # on every rank: all have the same digests
        raise TransitionError(f"{', '.join(changed[:5])}: another hash after the transition")
    received, sent = plan.received_bytes[peers.rank], plan.sent_bytes[peers.rank]
    fresh = plan.fresh.get(peers.rank, ())
    return Report(received, sent, work.staging_bytes, time.perf_counter() - started_s, fresh, after)


class _Work:
    """One rank's part of one plan."""

    def __init__(self, plan: BoxPlan, source: Tensors, target: Tensors, peers: Peers, options: Options) -> None:
        self._plan, self._source, self._target, self._peers, self._options = plan, source, target, peers, options
        self._now, self._then = plan.source.of(peers.rank), plan.target.of(peers.rank)
        self._exchange: Exchange | None = None
        self._staging_bytes = 0
        self._error: str | None = None

    @property
    def staging_bytes(self) -> int:
        """Memory for messages that have to be copied."""
        return self._staging_bytes

    def prepare(self) -> str | None:
        """Check all tensors and allocate the staging buffers: what can fail fails before anything moves."""
        try:
            check_tensors(self._plan, self._plan.source, self._source, self._peers.rank, "source")
            check_tensors(self._plan, self._plan.target, self._target, self._peers.rank, "target")
            check_sources_stay(self._source, self._target, self._now, self._then)
            self._exchange = self._exchanged()
            self._staging_bytes = sum(buffer.numel() for buffer in self._exchange.allocate())
        except NereusError as error:
            return str(error)
        except (RuntimeError, ValueError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def run(self) -> str | None:
        """Send and receive everything; the first error, if there was one. Peers get all their messages anyhow."""
        exchange, self._exchange = self._exchange, None  # it knows this object: a cycle would keep all tensors
        if exchange is not None:
            exchange.run(self._copy, (*self._source.values(), *self._target.values()))
        return self._error

    def _exchanged(self) -> Exchange:
        sends: dict[int, list[Part]] = {}
        receives: dict[int, list[Part]] = {}
        rank = self._peers.rank
        for route in self._plan.routes:
            if rank == route.source:
                sends.setdefault(route.target, []).extend(self._parts(route, self._source, self._now))
            elif rank == route.target:
                receives.setdefault(route.source, []).extend(self._parts(route, self._target, self._then))
        bucket_bytes = self._options.bucket_bytes
        limit = bundle_bytes(bucket_bytes, self._plan.most_peers)
        # Not `kept`: a rank past its deadline gives its sources back while a slower one may still read them, and the
        # verdict it has passed on by then must say so.
        return Exchange(self._peers, sends, receives, limit, bucket_bytes, self._note)

    def _parts(self, route: Route, held: Tensors, boxes: Mapping[str, Region]) -> Iterator[Part]:
        for name in route.names:
            tensor = held[name].detach()
            yield Part(tensor[route.region.within(boxes[name])], tensor.dtype)

    def _copy(self) -> None:
        """What this rank holds before and after; while messages are under way."""
        for name, box in self._then.items():
            own = self._now.get(name)
            same = None if own is None else box.common(own)
            if own is None or same is None:
                continue
            into = self._target[name].detach()[same.within(box)]
            held = self._source[name].detach()[same.within(own)]
            if not is_same(held, into):
                into.copy_(held)

    def _note(self, error: NereusError) -> None:
        self._error = self._error or f"rank {self._peers.rank}: {error}"
