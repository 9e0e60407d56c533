"""Communication groups: bare process groups made from explicit names, kept in one registry that can be emptied.

Owns every socket between workers. The default group of torch.distributed is never made, so workers join and leave
without disturbing intact units (D5.4). Gloo's abort does not unblock a waiting peer; a closed socket does, and a live
Python reference keeps it open: only `Group` holds the process group, and `close` lets go of it (D5.5). Before there are
sockets, members wait for each other at the store, where whoever watches their processes writes down who is lost.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from nereus.core import TransportError
from nereus.engine.direct import Neighbours
from nereus.engine.transports.attach import Process, find

log = logging.getLogger(__name__)

_TAGS = 1 << 20
_LEAST_POLL_S, _MOST_POLL_S = 1e-4, 2e-2
_LOSSES = "losses"
"""Where the store counts the processes that have ended."""


class Handle:
    """A send or receive under way."""

    def __init__(self, group: Group, work: Any, what: str) -> None:
        self._group = group
        self._work = work
        self._what = what
        self._started_s = time.monotonic()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it has finished. Raises TransportError past the deadline or when the peer is gone.

        The deadline is the group's own, or `timeout_s` where a framework's group has a longer one.
        """
        if self._work is None:
            raise TransportError(f"group {self._group.name}: closed while a transfer was under way ({self._what})")
        with self._group.errors(self._what):
            if timeout_s is None:
                self._work.wait()
            else:  # NCCL counts from the start of the transfer, gloo from now
                passed_s = time.monotonic() - self._started_s if self._group.on_cuda else 0.0
                self._work.wait(timedelta(seconds=max(timeout_s + passed_s, 0.001)))
        self._work = None

    def release(self) -> None:
        """Let go of the transfer: it would keep the socket open."""
        self._work = None


class Group:
    """Some devices that communicate. `members[rank]` is a device id; a group of one communicates with nobody.

    `down`, where there is one, carries what goes to lower ranks outside of a batch: NCCL puts the transfers of a pair
    into one queue, where two ranks that send to each other first would wait for ever.
    `read_memory`: whether members that are processes of one host may read one another's memory.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        process_group: Any,
        on_cuda: bool = False,
        down: Any = None,
        read_memory: bool = True,
    ) -> None:
        self.name = name
        self.neighbours = Neighbours(read_memory)
        self.on_cuda = on_cuda
        self.members = tuple(members)
        self.rank = rank
        self._process_group = process_group
        self._down = down
        self._batching = False
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._pending: weakref.WeakSet[Handle] = weakref.WeakSet()

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the members, in place."""
        self._check(tensor)
        if self.size > 1:
            with self.errors("all_reduce"):
                self._live().allreduce([tensor]).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every member, in rank order; all of one shape."""
        self._check(tensor)
        parts = [torch.empty_like(tensor) for _ in self.members]
        if self.size == 1:
            parts[0].copy_(tensor)
        elif tensor.numel():
            with self.errors("all_gather"):
                self._live().allgather([[as_bytes(part) for part in parts]], [as_bytes(tensor)]).wait()
        return parts

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite with the tensor of rank `root`."""
        self._check(tensor)
        if self.size > 1 and tensor.numel():
            with self.errors("broadcast"):
                self._live().broadcast(as_bytes(tensor), root).wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to rank `to` and wait."""
        self.isend(tensor, to).wait()

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill from rank `source` and wait."""
        self.irecv(tensor, source).wait()

    def isend(self, tensor: torch.Tensor, to: int) -> Handle:
        """Start to send. Messages of a pair of ranks match in the order both sides post them."""
        self._check(tensor)
        tag = self._sent[to] % _TAGS
        self._sent[to] += 1
        what = f"send to {self._named(to)}"
        with self.errors(what):
            return self._track(self._lane(self.rank, to).send([as_bytes(tensor)], to, tag), what)

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        """Start to receive."""
        self._check(tensor)
        tag = self._received[source] % _TAGS
        self._received[source] += 1
        what = f"receive from {self._named(source)}"
        with self.errors(what):
            return self._track(self._lane(source, self.rank).recv([as_bytes(tensor)], source, tag), what)

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Post every (rank, tensor), then wait for all. Empty tensors do not travel."""
        for handle in self.post(sends, receives):
            handle.wait()

    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Handle]:
        """Start to send and receive every (rank, tensor); on CUDA as one batch with one handle."""
        sends = [(rank, tensor) for rank, tensor in sends if tensor.numel()]
        receives = [(rank, tensor) for rank, tensor in receives if tensor.numel()]
        with self._batch((sends or receives)[0][1] if sends or receives else None) as batch:
            handles = [self.irecv(tensor, rank) for rank, tensor in receives]
            handles += [self.isend(tensor, rank) for rank, tensor in sends]
        return batch or handles

    def barrier(self) -> None:
        """Wait until every member has arrived."""
        if self.size > 1:
            with self.errors("barrier"):
                live, options = self._live(), distributed.BarrierOptions()
                if self.on_cuda:  # NCCL would guess a device from the rank
                    options.device_ids = [torch.cuda.current_device()]
                live.barrier(options).wait()

    def close(self) -> None:
        """Close the sockets; peers that wait on this member raise within milliseconds.

        Gloo waits for a turn of its loop for each socket, tens of milliseconds in all, which nobody here needs to.
        NCCL's communicators are aborted, or a transfer that failed would keep the device; all at the same time: one
        that is being aborted may wait for the kernels of another.
        """
        for handle in tuple(self._pending):
            handle.release()
        held = [each for each in (self._process_group, self._down) if each is not None]
        self._process_group = self._down = None
        while held:  # the process stays until sockets are closed, but not for an abort that hangs
            threading.Thread(target=_let_go, args=([held.pop()], self.on_cuda), daemon=self.on_cuda).start()

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn the backend's RuntimeError into a TransportError that names the group."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).strip().splitlines()
            raise TransportError(f"group {self.name}: {what} failed: {text[0] if text else error!r}") from None

    @contextmanager
    def _batch(self, example: torch.Tensor | None) -> Iterator[list[Handle]]:
        """On CUDA the transfers of one exchange start together, or two ranks that send first would wait for ever."""
        batch: list[Handle] = []
        if example is None or not example.is_cuda:
            yield batch
            return
        live = self._live()
        where = (example.device,) if isinstance(live, distributed.ProcessGroup) else ()
        with self.errors("exchange"):
            live._start_coalescing(*where)
        self._batching = True
        try:
            yield batch
        except BaseException:
            with suppress(RuntimeError):  # NCCL counts open batches by thread: in one that stays, nothing starts again
                live._end_coalescing(*where)
            raise
        finally:
            self._batching = False
        with self.errors("exchange"):
            batch.append(self._track(live._end_coalescing(*where), "exchange"))

    def _named(self, rank: int) -> str:
        """A rank, and the device it is where that is another number."""
        device = self.members[rank]
        return f"rank {rank}" if device == rank else f"rank {rank} (device {device})"

    def _track(self, work: Any, what: str) -> Handle:
        handle = Handle(self, work, what)
        self._pending.add(handle)
        return handle

    def _lane(self, source: int, target: int) -> Any:
        """What carries a transfer: both of its ranks choose alike."""
        live = self._live()
        return live if self._down is None or self._batching or source < target else self._down

    def _live(self) -> Any:
        if self._process_group is None:
            raise TransportError(f"group {self.name} is closed" if self.size > 1 else f"group {self.name} has no peers")
        return self._process_group

    def _check(self, tensor: torch.Tensor) -> None:
        """Gloo moves a strided tensor silently wrong."""
        if not tensor.is_contiguous():
            raise TransportError(
                f"group {self.name}: only contiguous tensors travel, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )


def _let_go(last: list[Any], abort: bool) -> None:
    """Drop the last reference to a process group."""
    if abort:
        try:
            last[0].abort()
        except RuntimeError as error:
            log.warning("a communicator could not be aborted: %s", error)
    last.clear()


class GroupRegistry:
    """Every group of one worker. Gloo listens on `address` alone: it is not authenticated (D5.14)."""

    def __init__(
        self,
        store: distributed.Store,
        device: int,
        timeout_s: float,
        cuda: bool = False,
        address: str = "127.0.0.1",
        read_memory: bool = True,
    ) -> None:
        self._store = store
        self._read_memory = read_memory
        self._device = device
        self._timeout_s = timeout_s
        self._cuda = cuda
        self._listener = None if cuda else distributed.ProcessGroupGloo.create_device(hostname=address)
        self._groups: dict[str, Group] = {}

    def make(self, name: str, members: Sequence[int], work_s: float | None = None) -> Group:
        """Make a group together with the other members, all of it by one deadline.

        `name` must never have been used before in this job.
        `work_s`, where that is longer than a round trip may take, is how long NCCL lets one transfer last.
        """
        if self._device not in members:
            raise TransportError(f"group {name}: device {self._device} is not among the members {list(members)}")
        if name in self._groups:
            raise TransportError(f"group {name} exists already")
        rank, size = list(members).index(self._device), len(members)
        deadline_s = time.monotonic() + self._timeout_s
        self._meet(name, members, deadline_s)
        process_group = down = None
        if size > 1:
            try:
                process_group = self._connect(name, rank, size, deadline_s, work_s)
                if self._cuda:
                    down = self._connect(f"{name}/down", rank, size, deadline_s, work_s)
            except RuntimeError as error:
                raise TransportError(f"group {name}: members {list(members)} did not all come: {error}") from None
        group = self._groups[name] = Group(name, members, rank, process_group, self._cuda, down, self._read_memory)
        return group

    def get(self, name: str) -> Group:
        """The group made under `name`."""
        if name not in self._groups:
            raise TransportError(f"group {name} does not exist, valid: {', '.join(self._groups) or 'none'}")
        return self._groups[name]

    def drop(self, name: str) -> None:
        """Close a group; nothing happens when it does not exist."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def drop_all(self) -> None:
        """Close every group, so that no peer goes on waiting for this worker."""
        for name in tuple(self._groups):
            self.drop(name)

    def _meet(self, name: str, members: Sequence[int], deadline_s: float) -> None:
        """Wait until every member has come. Raises TransportError at the deadline, and at once when one is lost."""
        here = {device: f"{name}/here/{device}" for device in members}
        self._store.set(here[self._device], "1")
        come, known = f"{name}/come", 0
        self._store.add(come, 1)
        pause_s = _LEAST_POLL_S
        while self._store.add(come, 0) < len(members):
            losses, late = self._store.add(_LOSSES, 0), time.monotonic() > deadline_s
            if late or losses > known:  # each member by name: a call apiece
                known = losses
                missing = [device for device, key in here.items() if not self._store.check([key])]
                lost = next((device for device in missing if self._store.check([lost_key(device)])), None)
                if lost is not None:
                    raise TransportError(f"group {name}: device {lost} was lost before it came")
                if late and missing:
                    raise TransportError(f"group {name}: devices {missing} did not come within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)

    def _connect(self, name: str, rank: int, size: int, deadline_s: float, work_s: float | None = None) -> Any:
        """Gloo opens all sockets here, by the deadline; NCCL does with the first transfer. Transfers have longer."""
        store = distributed.PrefixStore(name, self._store)
        if self._cuda:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s if work_s is None else work_s)
            return distributed.ProcessGroupNCCL(store, rank, size, options)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [self._listener]
        options._timeout = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
        made = distributed.ProcessGroupGloo(store, rank, size, options)
        made._set_default_timeout(timedelta(seconds=self._timeout_s))
        return made

    @property
    def card(self) -> bytes:
        """What others need to read this process's memory; all zeros where state does not lie there."""
        return Neighbours(self._read_memory and not self._cuda).card

    def find(self, theirs: bytes) -> Process | None:
        """The process of a card where this one may read its memory, into its own."""
        return find(theirs) if self._read_memory and not self._cuda else None

    @property
    def names(self) -> tuple[str, ...]:
        """The groups that exist."""
        return tuple(self._groups)


def lost_key(device: int) -> str:
    """Where the store says that a device's process has ended; absent as long as it lives."""
    return f"lost/{device}"


def tell_lost(store: distributed.Store, device: int, why: str) -> None:
    """Let those who wait at the store know that a device's process has ended."""
    store.set(lost_key(device), why)
    store.add(_LOSSES, 1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view as bytes: gloo knows few dtypes, and moving needs none of them."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:  # contiguous whatever its stride says
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
