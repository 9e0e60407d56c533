"""The transitions' benchmark: its state, its count of the least bytes, its trials, and one tiny run of every side."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks._result import Result
from benchmarks.transitions import __main__ as bench
from benchmarks.transitions import smallest
from benchmarks.transitions.scenario import Scenario, units
from benchmarks.transitions.sides import Side, compare
from benchmarks.transitions.state import KINDS, SIZES, Tensor, Units, filled, values, wrong
from benchmarks.transitions.trials import KINDS as TRIAL_KINDS
from benchmarks.transitions.trials import Kind, Trial, drawn

from nereus.core import EMU

TINY = SIZES["tiny"]


def test_shards_put_together_are_the_whole_tensor() -> None:
    for tensor in TINY.tensors:
        for kind in KINDS:
            rows = 1 if tensor.dim is None else tensor.shape[tensor.dim]
            whole = values(tensor, kind, 0, rows)
            assert whole.shape == tensor.shape
            parts = [values(tensor, kind, *tensor.interval(2, rank)) for rank in range(2)]
            if tensor.dim is None:
                assert all(torch.equal(part, whole) for part in parts)
            else:
                assert torch.equal(torch.cat(parts, tensor.dim), whole)
    flat = values(Tensor("a", (3, 4), 1, 0), "param", 1, 3)
    assert (flat[1, 0] - flat[0, 0], flat[0, 1] - flat[0, 0]) == (4, 1)


def test_the_state_has_the_size_that_is_compared_everywhere() -> None:
    assert SIZES["full"].bytes == 641_839_104
    held = units(2, 2, 1)
    assert sum(held.stored_bytes(TINY, device) for device in range(4)) > TINY.bytes  # norms are held twice


def test_a_bit_that_differs_and_a_tensor_too_many_or_too_few_are_found() -> None:
    held = units(2, 1, 1)
    state = filled(TINY, held, 1)
    assert wrong(state, TINY, held, 1) == []
    state["head", "param"][0, 0] += 1
    state["other", "param"] = torch.zeros(1)
    del state["layers.1.q", "exp_avg"]
    assert wrong(state, TINY, held, 1) == ["head param", "layers.1.q exp_avg", "other param"]


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        (units(2, 2, 1), units(4, 1, 1), 0.5),  # kept order: 0.75
        (units(4, 1, 2), units(8, 1, 1), 0.0),  # a free merge
        (units(2, 1, 1), units(2, 1, 2), 1.0),
        (units(1, 1, 1), units(1, 1, 8), 7.0),
        (units(4, 1, 1), units(4, 1, 1), 0.0),
    ],
)
def test_the_least_bytes_of_known_changes(source: Units, target: Units, share: float) -> None:
    scenario = Scenario("", SIZES["full"], source, target)
    assert scenario.minimum_bytes / SIZES["full"].bytes == pytest.approx(share, abs=2e-3)


def test_no_deal_of_positions_needs_less() -> None:
    scenario = Scenario("", TINY, units(2, 2, 1), units(4, 1, 1))
    lacks = []
    for order in itertools.permutations(range(4)):
        dealt = Units(4, 1, (order,))
        total = 0
        for device in range(4):
            mine = {tensor.name: (start, stop) for tensor, start, stop in scenario.source.held(TINY, device)}
            for tensor, start, stop in dealt.held(TINY, device):
                low, high = mine.get(tensor.name, (0, 0))
                kept = max(0, min(stop, high) - max(start, low))
                total += (stop - start - kept) * tensor.row_elements * 4 * len(KINDS)
        lacks.append(total)
    assert scenario.minimum_bytes == min(lacks) < max(lacks)


def test_a_scenario_survives_its_command_line() -> None:
    scenario = Scenario("there", TINY, units(2, 1, 2), units(1, 2, 2))
    assert Scenario.from_json(scenario.to_json()) == scenario
    assert Scenario("", TINY, units(2, 1, 1), units(2, 1, 3)).copies() == {2: 0, 3: 1, 4: 0, 5: 1}


@pytest.mark.parametrize("kind", TRIAL_KINDS)
def test_a_trial_can_be_done_step_by_step_and_both_stand_on_the_others_devices(kind: Kind) -> None:
    """An order exists: found here by trying all steps, with room for one unit a device and last copies kept."""
    for seed in range(20):
        trial = drawn(kind, seed)
        assert trial == drawn(kind, seed)
        assert _order_exists(trial)
        for one, other in (kind.model_stages, kind.model_stages[::-1]):
            new = {d for unit in trial.goal.of(one) for d in unit.devices}
            old = {d for unit in trial.start.of(other) for d in unit.devices}
            assert new & old


def _order_exists(trial: Trial) -> bool:
    goal = frozenset(trial.goal.units)
    seen: set[frozenset[EMU]] = set()
    stack = [frozenset(trial.start.units)]
    while stack:
        now = stack.pop()
        if now == goal:
            return True
        if now in seen:
            continue
        seen.add(now)
        taken = {device for unit in now for device in unit.devices}
        for unit in now - goal:
            if any(other.model_stage == unit.model_stage for other in now - {unit}):
                stack.append(now - {unit})
        stack.extend(now | {unit} for unit in goal - now if not taken & set(unit.devices))
    return False


def test_a_part_that_breaks_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaking(quick: bool) -> list[object]:
        raise ZeroDivisionError(str(quick))

    monkeypatch.setattr("benchmarks.transitions.extend.run", breaking)
    out = tmp_path / "all" / "bench.json"
    assert bench.main(["--only", "extend", "--quick", "--json", str(out)]) == 1
    (line,) = json.loads(out.read_text())["extend"]["results"]
    assert "ZeroDivisionError" in line["notes"]
    assert line["measured"] is None


def test_a_run_that_is_interrupted_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(quick: bool) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.transitions.extend.run", lambda **_: [Result("one", "report", 1.0)])
    monkeypatch.setattr("benchmarks.transitions.scale_out.run", interrupted)
    out = tmp_path / "bench.json"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--only", "extend", "scale_out", "--json", str(out)])
    kept = json.loads(out.read_text())
    assert list(kept) == ["extend"]
    assert kept["extend"]["results"][0]["measured"] == 1.0


def test_small_transitions_lie_beside_their_shortest_order() -> None:
    for case in smallest.cases(10, limited=True):
        assert case.any_groups <= case.shortest
        assert case.bound - 1 <= case.shortest <= case.ours + 1


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="memory and bytes are read from /proc")
def test_the_quick_run_moves_a_tiny_state_bit_for_bit_with_the_fewest_bytes(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert bench.main(["--only", "reshard", "--quick", "--json", str(out)]) == 0
    lines = {line["name"]: line for line in json.loads(out.read_text())["reshard"]["results"]}
    least = Scenario("", TINY, units(2, 2, 1), units(4, 1, 1)).minimum_bytes
    assert lines["executor: payload received / M*"]["measured"] == least
    for name in ("executor, s", "executor, sent, s", "direct exchange, s"):
        assert "equal bit for bit" in lines[name]["notes"]
        written = lines[name]["details"]["answers"][0]["written_bytes"]
        assert written < least / 2 if name == "executor, s" else least <= written < 1.5 * least


def test_a_side_that_is_not_there_or_fails_says_why() -> None:
    scenario = Scenario("", TINY, units(1, 1, 1), units(1, 1, 1))
    missing = Side("missing", "nowhere:Work", "no-such-environment")
    broken = Side("broken", "benchmarks.transitions.nowhere:Work")
    found = compare((missing, broken), scenario, 1)
    assert found["missing"].reason == "not installed: make baselines"
    assert "benchmarks.transitions.nowhere" in str(found["broken"].reason)
