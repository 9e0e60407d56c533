"""Work on a CUDA device beside what else it does, with a deadline; on other devices just the work.

Owns how long the host waits for a stream. Written against the documented behaviour of torch's streams, events and
caching allocator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nereus.core import TransportError

POLL_S = 2e-4


@contextmanager
def beside(
    device: torch.device, used: Iterable[torch.Tensor], left_s: Callable[[], float], cuda: Any = torch.cuda
) -> Iterator[None]:
    """A stream of its own for what runs inside; at the end the host waits until that is done, no longer than `left_s`.

    `used` are the tensors that the stream works on: where this ends with an error somebody may let go of them while a
    kernel still writes, and the allocator must not hand their memory out before. Raises TransportError.
    """
    if device.type != "cuda":
        yield
        return
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    for tensor in used:
        if tensor.is_cuda:
            tensor.record_stream(stream)
    with cuda.stream(stream):
        yield
        done = cuda.Event()
        done.record(stream)
    wait(done, left_s, "moving state")


def wait(done: Any, left_s: Callable[[], float], what: str) -> None:
    """Until an event has happened: `synchronize` would wait for ever for a peer that stopped."""
    while not done.query():
        if left_s() <= 0:
            raise TransportError(f"{what} did not end on the device by the deadline")
        time.sleep(POLL_S)
