"""Carries out a plan of boxes over a framework's own process group.

Validate, agree, only then move; agree again before anybody says that it is done. Sources are only read. A rank that
fails on its own goes on sending, so that nobody waits for it, and the last agreement tells everyone.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from nereus.core import NereusError, SettingsError, TransitionError
from nereus.engine.groups import Handle, as_bytes
from nereus.engine.library.check import check_sources_stay, check_tensors, is_same
from nereus.engine.library.digest import digests
from nereus.engine.library.messages import Message, Round, bundle_bytes, rounds
from nereus.engine.library.peers import AnyGroup, Peers
from nereus.engine.library.staging import Ring, padded
from nereus.engine.packing import pack, unpack
from nereus.transition.boxes import BoxPlan
from nereus.transition.region import Region

Tensors = Mapping[str, torch.Tensor]
Messages = tuple[tuple[int, Message], ...]
PROTOCOL = 1
MOST_ROUNDS = 64
"""Rounds under way at once, where staging memory does not bound them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How bytes travel. All ranks must use the same."""

    bucket_bytes: int = 64 << 20
    """Staging memory, once for what is sent and once for what is received."""
    timeout_s: float = 60.0
    """Deadline of the whole call, and more for more bytes."""
    slowest_bytes_per_s: float = 50e6
    """A rank that receives more slowly than this is taken for lost."""
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
    peers = Peers(group, options.timeout_s + max(plan.received_bytes.values(), default=0) / options.slowest_bytes_per_s)
    work = _Work(plan, source, target, peers, options)
    token = f"{plan.fingerprint} {PROTOCOL} {torch.__version__} {sys.byteorder} {options}"
    peers.agree(_failure(work.prepare), token, "the plan, the options or their versions")
    before = digests(plan, plan.source, source, peers) if options.verify else {}
    peers.agree(work.run())
    after = digests(plan, plan.target, target, peers) if options.verify else {}
    changed = [name for name, value in after.items() if before.get(name, value) != value]
    if changed:  # on every rank: all have the same digests
        raise TransitionError(f"{', '.join(changed[:5])}: another hash after the transition")
    received, sent = plan.received_bytes[peers.rank], plan.sent_bytes[peers.rank]
    fresh = plan.fresh.get(peers.rank, ())
    return Report(received, sent, work.staging_bytes, time.perf_counter() - started_s, fresh, after)


def _failure(action: Callable[[], None]) -> str | None:
    """The error of a local action as text; the ranks then agree on it."""
    try:
        action()
    except NereusError as error:
        return str(error)
    except (RuntimeError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@dataclass(slots=True)
class _Open:
    """A round under way."""

    handles: list[Handle]
    receives: list[tuple[torch.Tensor, list[torch.Tensor]]]
    staged: tuple[int, int]
    whole: bool


class _Work:
    """One rank's part of one plan."""

    def __init__(self, plan: BoxPlan, source: Tensors, target: Tensors, peers: Peers, options: Options) -> None:
        self._plan, self._source, self._target, self._peers = plan, source, target, peers
        self._most_bytes = options.bucket_bytes
        self._limit = bundle_bytes(options.bucket_bytes, plan.most_peers)
        self._now, self._then = plan.source.of(peers.rank), plan.target.of(peers.rank)
        self._rounds: list[Round] = []
        self._staged: list[tuple[int, int]] = []
        """Staging bytes of what each round sends and receives."""
        self._rings: list[Ring] = []
        self._error: str | None = None

    @property
    def staging_bytes(self) -> int:
        """Memory for messages that have to be copied."""
        return sum(ring.bytes for ring in self._rings)

    def prepare(self) -> None:
        """Check all tensors and allocate the staging buffers: what can fail fails before anything moves."""
        check_tensors(self._plan, self._plan.source, self._source, self._peers.rank, "source")
        check_tensors(self._plan, self._plan.target, self._target, self._peers.rank, "target")
        check_sources_stay(self._source, self._target, self._now, self._then)
        self._rounds = rounds(self._plan, self._peers.rank, self._limit)
        self._staged = [
            (
                self._staged_bytes(one.sends, self._source, self._now),
                self._staged_bytes(one.receives, self._target, self._then),
            )
            for one in self._rounds
        ]
        for side in (0, 1):
            sizes = [staged[side] for staged in self._staged]
            self._rings.append(Ring(sizes, self._most_bytes, self._peers.device))

    def run(self) -> str | None:
        """Send and receive everything; the first error, if there was one. Peers get all their messages anyhow."""
        under_way: deque[_Open] = deque()
        copied = False
        for one, staged in zip(self._rounds, self._staged, strict=True):
            while under_way and not self._may_start(len(under_way), staged):
                if not copied:
                    copied = self._copy_own()
                self._finish(under_way.popleft())
            under_way.append(self._start(one, staged))
        if not copied:
            self._copy_own()
        while under_way:
            self._finish(under_way.popleft())
        return self._error

    def _may_start(self, under_way: int, staged: tuple[int, int]) -> bool:
        room = all(ring.has_room(size) for ring, size in zip(self._rings, staged, strict=True))
        return under_way < MOST_ROUNDS and room

    def _start(self, one: Round, staged: tuple[int, int]) -> _Open:
        out, inward = (ring.take(size) for ring, size in zip(self._rings, staged, strict=True))
        receives, sends = [], []
        start = 0
        for peer, message in one.receives:
            views = self._views(message, self._target, self._then)
            buffer, start = self._landing(message, views, inward, start)
            receives.append((peer, buffer, views))
        start = 0
        for peer, message in one.sends:
            views = self._views(message, self._source, self._now)
            buffer, start = self._landing(message, views, out, start)
            if not self._direct(views):
                self._note(_failure(partial(pack, buffer, views)))
            sends.append((peer, buffer))
        handles, errors = self._peers.post(sends, [(peer, buffer) for peer, buffer, _ in receives])
        self._note(errors[0] if errors else None)
        return _Open(handles, [(buffer, views) for _, buffer, views in receives], staged, not errors)

    def _finish(self, one: _Open) -> None:
        for handle in one.handles:
            try:
                self._peers.wait(handle, "moving state")
            except NereusError as error:
                self._note(str(error))
                one.whole = False
        for buffer, views in one.receives:
            if one.whole and not self._direct(views):
                self._note(_failure(partial(unpack, buffer, views)))
        for ring, size in zip(self._rings, one.staged, strict=True):
            ring.give_back(size)

    def _copy_own(self) -> bool:
        """What this rank holds before and after; while messages are under way."""
        self._note(_failure(self._copy))
        return True

    def _copy(self) -> None:
        for name, box in self._then.items():
            own = self._now.get(name)
            same = None if own is None else box.common(own)
            if own is None or same is None:
                continue
            into = self._target[name].detach()[same.within(box)]
            held = self._source[name].detach()[same.within(own)]
            if not is_same(held, into):
                into.copy_(held)

    def _note(self, error: str | None) -> None:
        self._error = self._error or (None if error is None else f"rank {self._peers.rank}: {error}")

    def _views(self, message: Message, held: Tensors, boxes: Mapping[str, Region]) -> list[torch.Tensor]:
        return [held[p.name].detach()[p.region.within(boxes[p.name])] for p in message.parcels]

    def _direct(self, views: list[torch.Tensor]) -> bool:
        """Whether a message needs no copy: one contiguous view where the transport can reach it."""
        view = views[0]
        plain = len(views) == 1 and view.is_contiguous() and not view.is_conj() and not view.is_neg()
        return plain and view.device.type == self._peers.device.type

    def _landing(
        self, message: Message, views: list[torch.Tensor], arena: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, int]:
        """The bytes of a message: the tensor itself or a part of the slot's buffer; and where the next part starts."""
        if self._direct(views):
            return as_bytes(views[0]), start
        return arena[start : start + message.bytes], start + padded(message.bytes)

    def _staged_bytes(
        self, messages: tuple[tuple[int, Message], ...], held: Tensors, boxes: Mapping[str, Region]
    ) -> int:
        each = ((message, self._views(message, held, boxes)) for _, message in messages)
        return sum(padded(message.bytes) for message, views in each if not self._direct(views))
