"""Messages between the coordinator and a worker: a small pickled header, arrays as raw contiguous buffers.

The pipes join processes that one parent started; nothing here listens on a network.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.core import TransportError


@dataclass(frozen=True, slots=True)
class Message:
    """A command or a reply. `fields` are small values, `arrays` travel without pickling."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    _header: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def header(self) -> bytes:
        """All but the arrays, pickled once for however many are sent it: plans of large jobs take milliseconds."""
        if not self._header:
            shapes = [(key, array.dtype.str, array.shape) for key, array in self.arrays.items()]
            self._header.append(pickle.dumps((self.name, dict(self.fields), shapes)))
        return self._header[0]


def send(connection: Connection, message: Message) -> None:
    """Write one message. Raises OSError when the other side is gone."""
    connection.send_bytes(message.header)
    for array in map(np.ascontiguousarray, message.arrays.values()):
        if array.nbytes:
            connection.send_bytes(array.reshape(-1).view(np.uint8).data)


def receive(connection: Connection) -> Message:
    """Read one message. Raises EOFError or OSError when the other side is gone, TransportError for a wrong size."""
    name, fields, shapes = pickle.loads(connection.recv_bytes())
    arrays: dict[str, NDArray[Any]] = {}
    for key, dtype, shape in shapes:
        array = arrays[key] = np.empty(shape, np.dtype(dtype))
        if array.nbytes:
            payload = connection.recv_bytes()
            if len(payload) != array.nbytes:
                raise TransportError(f"message {name}: array {key} has {len(payload):,} bytes, not {array.nbytes:,}")
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(payload, np.uint8)
    return Message(name, fields, arrays)
