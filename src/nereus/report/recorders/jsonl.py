"""The run directory's record: `decisions.jsonl` (replayable), `metrics.jsonl`, `plans/step-N.json`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereus.controller.replay import Entry
from nereus.core import (
    Adapt,
    Boundary,
    ControllerState,
    Decision,
    Observation,
    Outcome,
    Plan,
    Restart,
    SettingsError,
    Trigger,
    codec,
)

DECISIONS, METRICS, PLANS = "decisions.jsonl", "metrics.jsonl", "plans"


@dataclass(frozen=True)
class Jsonl:
    """`directory` is the run directory. Lines are appended and complete, so a killed run leaves a readable record."""

    directory: str | Path

    def begin(self, state: ControllerState) -> None:
        """The state from which the next ticks can be replayed; a resumed run writes another one."""
        (Path(self.directory) / PLANS).mkdir(parents=True, exist_ok=True)
        self._append(DECISIONS, {"state": codec.encode(state)})
        self._plan(0 if state.last is None else state.last.boundary.step, state.plan)

    def record(
        self,
        boundary: Boundary,
        seen: Observation,
        triggers: Collection[Trigger],
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        """One tick."""
        self._append(DECISIONS, {"tick": codec.encode(Entry(boundary, seen, tuple(triggers), decision, outcome))})
        match decision:
            case Adapt(proposal=proposal) if outcome is not None and outcome.completed:
                self._plan(boundary.step, proposal.plan)
            case Restart(plan=plan):
                self._plan(boundary.step, plan)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line: the step and its values."""
        self._append(METRICS, {"step": step, **values})

    def _append(self, name: str, data: Mapping[str, Any]) -> None:
        path = Path(self.directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")

    def _plan(self, step: int, plan: Plan) -> None:
        path = Path(self.directory) / PLANS / f"step-{step}.json"
        path.write_text(json.dumps(codec.encode(plan), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Recording:
    """One unbroken part of a run: the state before it and its ticks."""

    state: ControllerState
    entries: tuple[Entry, ...]


def read(directory: str | Path) -> tuple[Recording, ...]:
    """The parts of a recorded run, one more for every resume. Raises SettingsError with the line number."""
    path = Path(directory) / DECISIONS
    parts: list[tuple[ControllerState, list[Entry]]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    for number, text in enumerate(lines, start=1):
        try:
            data: Mapping[str, Any] = codec.decode(Mapping[str, Any], json.loads(text))
            if "state" in data:
                parts.append((codec.decode(ControllerState, data["state"]), []))
            else:
                parts[-1][1].append(codec.decode(Entry, data["tick"]))
        except (ValueError, KeyError, IndexError, RecursionError, SettingsError) as error:
            raise SettingsError(f"{path}:{number}: not a record of this version: {error}") from None
    return tuple(Recording(state, tuple(entries)) for state, entries in parts)
