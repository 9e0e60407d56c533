"""When a signal triggers: rises and falls, devices that come and go, peaks before they become an event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.controller.monitor import PRESSURE, Thresholds, Watch, watch, without_trend
from nereus.core import ControllerState, EMUSet, Estimate, Horizon, Observation, SettingsError
from tests.fakes import MIB, estimate, lengths, plan, seen, state

NOW = plan(0, 1)
CAPACITY = 64 * MIB


def base(**fields: object) -> ControllerState:
    """Two of four devices in use; the last replan was at length 10."""
    return state(NOW, 4, references={"length": 10.0}, **fields)


def look(before: ControllerState, observation: Observation, predicted: Estimate | None = None) -> Watch:
    return watch(before, observation, predicted or estimate(1.0, {0: MIB, 1: MIB}), Thresholds(), 0.1)


def signals(found: Watch) -> dict[str, bool]:
    """Signal → urgent."""
    return {trigger.signal: trigger.urgent for trigger in found.triggers}


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(("mean", "fires"), [(12.9, False), (13.0, True), (7.1, False), (7.0, True), (10.0, False)])
def test_lengths_trigger_at_thirty_percent_up_and_down(mean: float, fires: bool) -> None:
    found = look(base(), seen(5, ALL, response=lengths(mean)))
    assert signals(found) == ({"length": False} if fires else {})
    assert found.crossed == ({"length"} if fires else set())


def test_a_u_shaped_course_triggers_on_its_way_down_and_on_its_way_up() -> None:
    course = [10, 9, 8, 7, 6, 5, 4.8, 5, 6, 7, 8, 9, 10]
    before, fired = base(), []
    for step, mean in enumerate(course):
        found = look(before, seen(step, ALL, response=lengths(mean)))
        before = replace(before, values=found.values)
        if found.triggers:
            fired.append((step, mean))
            before = replace(before, references={"length": mean})
    assert fired == [(3, 7), (6, 4.8), (9, 7), (12, 10)]


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=30))
def test_after_a_replan_the_same_length_never_triggers_again(course: list[float]) -> None:
    before = base()
    for step, mean in enumerate(course):
        for _ in range(2):
            found = look(before, seen(step, ALL, response=lengths(mean)))
            before = replace(before, values=found.values, references={"length": found.values["length"]})
        assert not found.triggers


def test_a_step_without_responses_leaves_lengths_alone() -> None:
    assert not look(base(), seen(0, ALL)).triggers


def test_a_departing_device_in_use_is_urgent_and_named() -> None:
    found = look(base(), seen(5, (0, 2, 3), departing=frozenset({1})))
    assert signals(found) == {"devices": True}
    assert found.triggers[0].why == "device 1 leaving"


def test_a_departing_device_may_also_be_listed_among_the_ready_ones() -> None:
    assert look(base(), seen(5, ALL, departing=frozenset({1}))).triggers[0].why == "device 1 leaving"


def test_a_lost_device_in_use_is_urgent_until_the_plan_leaves_it() -> None:
    lost = seen(5, (0, 2, 3))
    first = look(base(), lost)
    assert first.triggers[0].why == "device 1 lost"
    assert first.crossed == {"devices"}
    again = look(replace(base(), cluster=base().pool.only((0, 2, 3))), lost)
    assert signals(again)["devices"]
    assert not again.crossed, "the pool did not change again, so its interval has not ended"


def test_new_devices_and_unused_ones_that_go_are_no_emergency() -> None:
    came = look(replace(base(), cluster=base().pool.only((0, 1))), seen(5, ALL))
    assert (signals(came), came.triggers[0].why) == ({"devices": False}, "devices 2, 3 new")
    went = look(base(), seen(5, (0, 1, 2)))
    assert (signals(went), went.triggers[0].why) == ({"devices": False}, "device 3 gone, not in use")


def test_units_that_are_not_the_plans_are_an_emergency() -> None:
    half = EMUSet(base().units.units[:1])
    assert signals(look(replace(base(), units=half), seen(5, ALL))) == {"units": True}


def test_a_predicted_peak_beyond_the_capacity_is_urgent_before_it_happens() -> None:
    found = look(base(), seen(5, ALL, peaks={0: 10 * MIB}), estimate(1.0, {0: CAPACITY + 1, 1: MIB}))
    assert signals(found) == {"memory": True}
    assert "device 0" in found.triggers[0].why


def test_a_rising_measured_peak_triggers_before_it_reaches_the_capacity() -> None:
    before, fired_at = base(), None
    for step, peak in enumerate(range(30 * MIB, 65 * MIB, 5 * MIB)):
        found = look(before, seen(step, ALL, peaks={0: peak, 1: MIB}), estimate(1.0, {0: 30 * MIB, 1: MIB}))
        before = replace(before, values=found.values)
        if signals(found).get("memory"):
            fired_at = peak
            break
    assert fired_at is not None
    assert fired_at <= CAPACITY - 5 * MIB, "one more step must still fit when the alarm comes"
    assert found.values[PRESSURE] == pytest.approx((fired_at + 10 * MIB) / (30 * MIB), rel=0.05)


def test_a_peak_that_only_wavers_is_no_emergency() -> None:
    before = base()
    for step in range(20):
        peak = (40 + 8 * (step % 2)) * MIB
        found = look(before, seen(step, ALL, peaks={0: peak}), estimate(1.0, {0: 44 * MIB}))
        before = replace(before, values=found.values)
        assert not signals(found).get("memory")


def test_inside_the_headroom_there_is_one_warning_until_it_becomes_urgent() -> None:
    shares = [0.85, 0.91, 0.92, 0.94, 0.85, 0.93, 0.96, 0.97]
    before, fired = base(), []
    for step, share in enumerate(shares):
        found = look(before, seen(step, ALL), estimate(1.0, {0: int(share * CAPACITY)}))
        before = replace(before, values=found.values)
        if found.triggers:
            fired.append((share, found.triggers[0].urgent, found.crossed))
            before = replace(before, references={**before.references, "memory": found.values["memory"]})
    memory = frozenset({"memory"})
    assert fired == [(0.91, False, memory), (0.96, True, memory), (0.97, True, frozenset())]


def test_an_out_of_memory_event_is_urgent_and_puts_pressure_on_predictions_that_saw_room() -> None:
    event = seen(5, ALL, step_s=None, peaks={0: 60 * MIB}, out_of_memory="device 0: logits needs 9 bytes")
    found = look(base(), event, estimate(1.0, {0: 32 * MIB, 1: MIB}))
    assert signals(found) == {"memory": True}
    assert found.triggers[0].why.startswith("device 0: logits")
    assert 32 * MIB * found.values[PRESSURE] >= CAPACITY


def test_the_history_of_peaks_is_forgotten_with_the_plan_and_with_the_device() -> None:
    rising = base()
    for step, peak in enumerate((20 * MIB, 40 * MIB)):
        rising = replace(rising, values=look(rising, seen(step, ALL, peaks={0: peak, 1: peak})).values)
    assert {"trend:0", "trend:1"} <= set(rising.values)
    assert not any(":" in name or name.startswith("memory") for name in without_trend(rising.values))
    after = look(rising, seen(2, (0, 2, 3), peaks={0: 40 * MIB}))
    assert "trend:1" not in after.values


@pytest.mark.parametrize("bad", [{"length": 0.0}, {"memory": 0.0}, {"memory": 1.2}, {"lookahead_steps": -1}])
def test_thresholds_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(bad))):
        Thresholds(**bad)  # type: ignore[arg-type]


def test_a_horizon_is_one_step_then_the_average_of_past_intervals() -> None:
    horizon, found = Horizon(), []
    for step in (4, 14, 18, 18 + 20):
        horizon = horizon.crossed(step)
        found.append(horizon.steps)
    assert found == [1.0, 10.0, 7.0, 13.5]
