"""A signal that arrives while a run starts is not lost."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from nereus.trainer.run import heard


def test_an_interrupt_that_is_swallowed_on_the_way_ends_the_start() -> None:
    before = signal.getsignal(signal.SIGINT)
    after: list[bool] = []

    def start() -> None:
        with heard():
            with suppress(KeyboardInterrupt):  # as a library's import may
                signal.raise_signal(signal.SIGINT)
            after.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert after == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_signal_nothing_happens() -> None:
    with heard():
        pass
