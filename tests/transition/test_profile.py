"""What is remembered of schemas and layouts has a bound, and forgetting changes no answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import Layout
from nereus.transition import sizes
from nereus.transition.profile import Recent
from tests.support.models import decoder


@given(st.lists(st.integers(0, 9)), st.integers(1, 4))
def test_the_last_keys_asked_for_are_remembered(asked: list[int], most: int) -> None:
    known, made = Recent[int, int](most), list[int]()
    for at, key in enumerate(asked):

        def square(key: int = key) -> int:
            made.append(key)
            return key * key

        before = len(made)
        assert known.get(key, square) == key * key
        recent = list(dict.fromkeys(reversed(asked[:at])))[:most]
        assert (len(made) == before) is (key in recent)


def test_sizes_of_many_layouts_are_the_same_however_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = decoder(layers=6)
    layouts = [Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3, 5)]
    monkeypatch.setattr(sizes, "KNOWN_LAYOUTS", 2)
    few = sizes.Sizes(schema)
    for _ in range(2):  # the second time most have been forgotten
        for old in layouts:
            alone = sizes.Sizes(schema)
            assert np.array_equal(few.overlap(old, layouts[0]), alone.overlap(old, layouts[0]))
            assert np.array_equal(few.stored(old), alone.stored(old))
            assert np.array_equal(few.owned(old), alone.owned(old))
