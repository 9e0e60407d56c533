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


def send(connection: Connection, message: Message) -> None:
    """Write one message. Raises OSError when the other side is gone."""
    arrays = {key: np.ascontiguousarray(array) for key, array in message.arrays.items()}
    shapes = [(key, array.dtype.str, message.arrays[key].shape) for key, array in arrays.items()]
    connection.send_bytes(pickle.dumps((message.name, dict(message.fields), shapes)))
    for array in arrays.values():
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
