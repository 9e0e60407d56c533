"""A framework's own process group, as the library uses it: every wait ends at one deadline, and all ranks agree.

Knows messages of bytes and verdicts, no tensors of the framework. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import distributed

from nereus.core import NereusError, SettingsError, TransitionError
from nereus.engine.groups import Group
from nereus.engine.transports.torch import Torch

VERDICT_BYTES = 1024

AnyGroup: TypeAlias = distributed.ProcessGroup | Group | None
"""A group of torch.distributed (None: the default one), or a group of the engine's own registry."""


class Peers(Torch):
    """The members of one process group, until a deadline. Ranks are those of the group."""

    def __init__(self, group: AnyGroup, timeout_s: float, read_memory: bool = True) -> None:
        super().__init__(group if isinstance(group, Group) else _wrap(group), timeout_s, read_memory)

    def swap(self, to: int, data: bytes | None, source: int, size: int) -> bytes:
        """Send to one rank and receive `size` bytes from another; either may be left out (data None, size 0)."""
        inward = torch.empty(size, dtype=torch.uint8, device=self.device)
        out = [] if data is None else [(to, torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device))]
        handles, errors = self.post(out, [(source, inward)])
        if errors:
            raise errors[0]
        for handle in handles:
            self.wait(handle, f"a message to rank {to}" if not size else f"a message from rank {source}")
        return bytes(inward.cpu().numpy().tobytes())

    def agree(self, error: str | None, token: str = "", what: str = "what they are about to do") -> None:
        """Raise TransitionError on every rank when one has an `error`, or where `token`, which says `what`, differs.

        Verdicts spread by doubling: after log2(ranks) rounds each rank has heard of every other, and a rank that
        does not answer is itself a verdict of those that wait for it.
        """
        distance = 1
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            try:
                heard = json.loads(self.swap(to, _verdict(error, token), source, VERDICT_BYTES))
                if error is None and heard["token"] != _short(token):
                    error = f"ranks {source} and {self.rank} differ in {what}"
                error = error or heard["error"]
            except NereusError as failure:
                error = error or str(failure)
            distance *= 2
        if error is not None:
            raise TransitionError(error)

    def collect(self, mine: bytes, merge: Callable[[list[bytes]], bytes]) -> bytes:
        """Everybody's bytes, merged on rank 0; every rank gets the result, or the error of whoever failed."""
        error = None
        merged = b""
        try:
            merged = self._gather(mine, merge)
        except NereusError as failure:
            error = str(failure)
        return self._spread(merged, error)

    def _gather(self, mine: bytes, merge: Callable[[list[bytes]], bytes]) -> bytes:
        if self.rank:
            self.swap(0, len(mine).to_bytes(8, "little"), 0, 0)
            if mine:
                self.swap(0, mine, 0, 0)
            return b""
        found, errors = [mine], []
        for rank in range(1, self.size):
            try:
                size = int.from_bytes(self.swap(rank, None, rank, 8), "little")
                found.append(self.swap(rank, None, rank, size) if size else b"")
            except NereusError as failure:  # the others are heard out, or they would wait
                errors.append(failure)
        if errors:
            raise errors[0]
        return merge(found)

    def _spread(self, data: bytes, error: str | None) -> bytes:
        """From rank 0 down a binomial tree. Where a parent is lost its children are told so."""
        distance = 1
        while distance <= self.rank:
            distance *= 2
        if self.rank:
            data, error = self._receive(self.rank - distance // 2, error)
        while self.rank + distance < self.size:
            self._pass(self.rank + distance, data, error)
            distance *= 2
        if error is not None:
            raise TransitionError(error)
        return data

    def _receive(self, source: int, error: str | None) -> tuple[bytes, str | None]:
        try:
            head = json.loads(self.swap(source, None, source, VERDICT_BYTES))
            data = self.swap(source, None, source, int(head["token"])) if head["token"] != "0" else b""
        except NereusError as failure:
            return b"", error or str(failure)
        return data, head["error"] or error

    def _pass(self, to: int, data: bytes, error: str | None) -> None:
        body = b"" if error is not None else data
        try:
            self.swap(to, _verdict(error, str(len(body))), to, 0)
            if body:
                self.swap(to, body, to, 0)
        except NereusError:
            return  # the next agreement names the lost rank


def _wrap(group: distributed.ProcessGroup | None) -> Group:
    if not distributed.is_initialized():
        raise SettingsError("torch.distributed is not initialised: make a process group first")
    process_group = distributed.group.WORLD if group is None else group
    rank, size = distributed.get_rank(process_group), distributed.get_world_size(process_group)
    if rank < 0:
        raise SettingsError("this process is not a member of the group that was given")
    backend = distributed.get_backend(process_group)
    return Group(f"library ({backend})", range(size), rank, process_group, "nccl" in backend)


def _verdict(error: str | None, token: str) -> bytes:
    shown: Any = None if error is None else error[:600]
    text = json.dumps({"error": shown, "token": _short(token)}, ensure_ascii=True)
    while len(text) > VERDICT_BYTES:  # characters that JSON spells out
        shown = shown[: len(shown) // 2]
        text = json.dumps({"error": shown, "token": _short(token)}, ensure_ascii=True)
    return text.ljust(VERDICT_BYTES).encode("ascii")


def _short(token: str) -> str:
    return token[:128]
