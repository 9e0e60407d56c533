"""Messages over a pipe."""

from __future__ import annotations

import multiprocessing
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nereus.core import TransportError
from nereus.engine import connection
from nereus.engine.connection import Message, receive, send

DTYPES = st.sampled_from(["u1", "i8", "f4", "f8", "?"])


@settings(max_examples=50, deadline=None)
@given(st.lists(DTYPES.flatmap(lambda d: arrays.arrays(d, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)))))
def test_arrays_arrive_as_they_were(values: list[np.ndarray]) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        send(ours, Message("x", {"n": 1}, {str(i): value for i, value in enumerate(values)}))
        got = receive(theirs)
    assert (got.name, got.fields) == ("x", {"n": 1})
    assert len(got.arrays) == len(values)
    for i, value in enumerate(values):
        other = got.arrays[str(i)]
        assert (other.dtype, other.shape, other.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_a_strided_array_arrives_by_value() -> None:
    ours, theirs = multiprocessing.Pipe()
    value = np.arange(12).reshape(3, 4).T[1:]
    with ours, theirs:
        send(ours, Message("x", {}, {"v": value}))
        assert np.array_equal(receive(theirs).arrays["v"], value)


def test_a_message_to_many_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled: list[bytes] = []

    def dumps(what: object) -> bytes:
        pickled.append(pickle.dumps(what))
        return pickled[-1]

    monkeypatch.setattr(connection, "pickle", SimpleNamespace(dumps=dumps, loads=pickle.loads))
    message = Message("x", {"n": 1}, {"v": np.arange(3)})
    for _ in range(3):
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            send(ours, message)
            got = receive(theirs)
            assert (got.name, got.fields, got.arrays["v"].tolist()) == ("x", {"n": 1}, [0, 1, 2])
    assert len(pickled) == 1


def test_a_wrong_size_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        ours.send_bytes(pickle.dumps(("x", {}, [("v", "<f8", (3,))])))
        ours.send_bytes(b"12345678")
        with pytest.raises(TransportError, match="array v has 8 bytes, not 24"):
            receive(theirs)
