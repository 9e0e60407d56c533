"""What every admission rule must hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.controller.admission.every_n import EveryN
from nereus.controller.admission.payback import Payback as Rule
from nereus.core import Payback, SettingsError, plugins
from nereus.core.ports import AdmissionRule

PACKAGE = "nereus.controller.admission"
NAMES = plugins.names(PACKAGE)


def rule(name: str) -> AdmissionRule:
    made: AdmissionRule = plugins.make(PACKAGE, name, {})
    return made


def test_the_four_rules_are_there() -> None:
    assert set(NAMES) == {"payback", "always", "every_n", "never"}


@pytest.mark.parametrize("name", NAMES)
@given(cost=st.floats(0, 1e3), loss=st.floats(-1e3, 0), horizon=st.floats(1, 100), step=st.integers(0, 100))
def test_no_rule_admits_a_change_that_saves_nothing(
    name: str, cost: float, loss: float, horizon: float, step: int
) -> None:
    made = rule(name)
    assert not made.admits(Payback(cost, loss, horizon, made.margin), step)[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_comes_with_its_arithmetic(name: str) -> None:
    made = rule(name)
    words = made.admits(Payback(0.8, 0.4, 6.0, made.margin), 4)[1]
    assert "saves 0.4 s/step" in words
    assert "costs 0.8 s" in words
    assert "2.0 of 6.0 steps" in words


@given(cost=st.floats(0, 100), saving=st.floats(1e-3, 100), horizon=st.floats(1, 100), margin=st.floats(0.01, 1))
def test_payback_is_equation_2(cost: float, saving: float, horizon: float, margin: float) -> None:
    admitted = Rule(margin).admits(Payback(cost, saving, horizon, margin), 0)[0]
    assert admitted == (cost / saving <= margin * horizon)


def test_margin_zero_admits_not_even_what_is_free() -> None:
    assert not Rule(0.0).admits(Payback(0.0, 1.0, 10.0, 0.0), 0)[0]


@pytest.mark.parametrize("margin", [-0.1, 1.1])
def test_a_margin_outside_zero_to_one_is_refused(margin: float) -> None:
    with pytest.raises(SettingsError, match="margin"):
        Rule(margin)


def test_the_rules_differ_where_they_should() -> None:
    dear = Payback(100.0, 0.1, 2.0, 0.5)
    verdicts = {name: rule(name).admits(dear, 4)[0] for name in NAMES}
    assert verdicts == {"payback": False, "always": True, "every_n": False, "never": False}
    assert EveryN(n=3).admits(dear, 6)[0]
    cheap = Payback(0.1, 1.0, 4.0, 0.5)
    assert Rule().admits(cheap, 4)[0]
    assert not rule("never").admits(cheap, 4)[0]
