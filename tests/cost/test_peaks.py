"""The peak of every device: against plain loops over devices, and for pools of thousands."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core import Plan
from nereus.cost.peaks import Footprint, Peak, peaks
from tests.cost.jobs import ACTOR, CRITIC, GENERATION, assignment

STAGES = (GENERATION, ACTOR, CRITIC)


def footprint(name: str, rank: int, stored: int, added: int) -> Footprint:
    return Footprint(stored + rank, {f"{name} call": {"activations": added, "logits": rank}, f"{name} other": {"x": 1}})


def itself(peak: Peak) -> Peak:
    return peak


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_device_has_the_sum_of_what_is_stored_and_the_largest_call(data: st.DataObject) -> None:
    placed, held = [], {}
    for model_stage in STAGES:
        tp, pp, dp = (data.draw(st.integers(1, 3)) for _ in range(3))
        each = assignment(model_stage, tp, pp, dp, first=data.draw(st.integers(0, 6)))
        sizes = [(data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))) for _ in range(pp)]
        held[model_stage] = tuple(footprint(str(model_stage), rank, *size) for rank, size in enumerate(sizes))
        placed.append(each)
    found = peaks(Plan(tuple(placed)), lambda a: held[a.candidate.model_stage]).each(itself)
    assert set(found) == Plan(tuple(placed)).devices
    for device, peak in found.items():
        here = [
            held[a.candidate.model_stage][unit.index(device) // a.candidate.layout.tp]
            for a in placed
            for unit in a.units
            if device in unit
        ]
        assert peak.resident_bytes == sum(each.resident_bytes for each in here)
        assert peak.transient_bytes == max(sum(terms.values()) for each in here for terms in each.added.values())
        assert any(peak.terms == each.added.get(peak.call) for each in here)


def test_equal_devices_share_their_peak() -> None:
    """16,384 devices with two kinds of positions need two peaks."""
    plan = Plan((assignment(ACTOR, tp=8, pp=2, dp=1024),))
    found = peaks(plan, lambda _: (footprint("a", 0, 5, 7), footprint("a", 1, 5, 7)))
    assert len(found.found) == 2
    stored = found.each(lambda peak: peak.resident_bytes)
    assert len(stored) == 16_384
    assert (stored[7], stored[8]) == (5, 6)


def test_a_device_that_only_stores_says_so() -> None:
    found = peaks(Plan((assignment(ACTOR),)), lambda _: (Footprint(2048, {}),))
    assert found.each(lambda peak: peak.bytes) == {0: 2048}
    assert found.each(Peak.describe) == {0: "2 KiB stored"}
