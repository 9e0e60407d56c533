"""Sets of units made of blocks are the sets that the same units make one by one."""

from __future__ import annotations

import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core import EMU, EMUBlock, EMUSet, Layout, ModelStage, SettingsError
from tests.core.values import ACTOR_TRAINING, CRITIC_TRAINING, unit

KINDS = [(ms, layout) for ms in (ACTOR_TRAINING, CRITIC_TRAINING) for layout in (Layout(1), Layout(2), Layout(1, 2))]


@st.composite
def units(draw: st.DrawFn) -> list[EMU]:
    """Units of two model-stages and several layouts in any order, each model-stage on its own draw of devices."""
    left = {ms: draw(st.permutations(range(12))) for ms in (ACTOR_TRAINING, CRITIC_TRAINING)}
    found = []
    for ms, layout in draw(st.lists(st.sampled_from(KINDS), max_size=8)):
        if len(left[ms]) >= layout.size:
            found.append(EMU(ms, layout, tuple(left[ms][: layout.size])))
            left[ms] = left[ms][layout.size :]
    return found


def of_blocks(wanted: list[EMU]) -> EMUSet:
    """The same as single blocks."""
    return EMUSet.of_blocks(EMUBlock(each.model_stage, each.layout, (each.devices,)) for each in wanted)


@given(units(), st.sets(st.integers(0, 11), max_size=3))
def test_blocks_and_objects_make_the_same_set(wanted: list[EMU], gone: set[int]) -> None:
    one, other = EMUSet(tuple(wanted)), of_blocks(wanted)
    assert one == other
    assert hash(one) == hash(other)
    for ms in (ACTOR_TRAINING, CRITIC_TRAINING):
        own = sorted((each for each in wanted if each.model_stage == ms), key=lambda each: each.devices[0])
        assert one.of(ms) == other.of(ms) == tuple(own)
        by_layout = {block.layout: block for block in other.blocks(ms)}
        assert list(by_layout) == list(dict.fromkeys(each.layout for each in own))
        for layout, block in by_layout.items():
            assert block.units() == tuple(each for each in own if each.layout == layout)
    assert other.units == tuple(other) == tuple(wanted)
    assert one.devices == other.devices == {device for each in wanted for device in each.devices}
    left = tuple(each for each in wanted if not gone & set(each.devices))
    assert of_blocks(wanted).without_devices(gone) == EMUSet(left)
    assert of_blocks(wanted).without_devices(gone).units == left


def test_a_device_number_beyond_64_bits_is_refused_with_its_value() -> None:
    block = EMUBlock(ACTOR_TRAINING, Layout(1), ((1,), (2**63,)))
    with pytest.raises(SettingsError, match=r"actor/training: device 9223372036854775808, must be below 9,223,372"):
        _ = block.flat
    assert EMUBlock(ACTOR_TRAINING, Layout(1), ((2**63 - 1,),)).flat == (2**63 - 1).to_bytes(8, sys.byteorder)


@given(units(), st.randoms(use_true_random=False))
def test_the_order_of_units_counts_in_equality_but_not_in_what_exists(wanted: list[EMU], rng: object) -> None:
    shuffled = list(wanted)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert (EMUSet(tuple(wanted)) == of_blocks(shuffled)) is (wanted == shuffled)
    assert EMUSet(tuple(wanted)).same_units(of_blocks(shuffled))
    assert EMUSet(tuple(wanted)).same_units(of_blocks(wanted[1:])) is (not wanted)


@given(units())
def test_a_set_survives_pickling_with_and_without_objects(wanted: list[EMU]) -> None:
    for each in (EMUSet(tuple(wanted)), of_blocks(wanted)):
        again = pickle.loads(pickle.dumps(each))
        assert again == each
        assert again.units == tuple(wanted)


def test_the_numbers_of_a_block_are_its_devices_unit_after_unit() -> None:
    block = EMUBlock(ACTOR_TRAINING, Layout(1, 2), ((5, 2), (1 << 40, 7)))
    assert list(memoryview(block.flat).cast("q")) == [5, 2, 1 << 40, 7]
    assert EMUBlock(ACTOR_TRAINING, Layout(1, 2), ()).flat == b""


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (((0, 1), (2,)), r"actor/training: tp2 pp1 needs 2 devices, got \(2,\)"),
        (((0, 1, 2), (3,)), r"actor/training: tp2 pp1 needs 2 devices, got \(0, 1, 2\)"),
        (((0, 1), (3, 3)), r"a device appears twice in \(3, 3\)"),
        (((0, 1), (1, 2)), "device 1 is in two units of actor/training"),
    ],
)
def test_a_block_refuses_what_single_units_refuse(devices: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        EMUBlock(ACTOR_TRAINING, Layout(2), devices)


def test_blocks_of_one_model_stage_share_no_device() -> None:
    def single(ms: ModelStage, *devices: int) -> EMUBlock:
        return EMUBlock(ms, Layout(len(devices)), (devices,))

    for second in (single(ACTOR_TRAINING, 1), single(ACTOR_TRAINING, 1, 2)):
        with pytest.raises(SettingsError, match="device 1 is in two units of actor/training"):
            EMUSet.of_blocks((single(ACTOR_TRAINING, 0, 1), second))
        with pytest.raises(SettingsError, match="device 1 is in two units of actor/training"):
            EMUSet((unit(0, 1, tp=2), *second.units()))
    EMUSet.of_blocks((single(ACTOR_TRAINING, 0, 1), single(CRITIC_TRAINING, 1)))
