"""What a person watches while a job runs: one panel on a terminal, plain lines elsewhere; a line per decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live as Panelled
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nereus.core import Adapt, Boundary, ControllerState, Decision, Observation, Outcome, Plan, Restart, Trigger
from nereus.report.decision import line

COLUMNS = {
    "reward": ("critic/rewards/mean", "{:.3f}"),
    "verifier": ("verifier/mean", "{:.3f}"),
    "held out": ("val/score", "{:.3f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "step s": ("timing_s/step", "{:.2f}"),
    "predicted s": ("nereus/predicted_step_s", "{:.2f}"),
    "tokens/s": ("perf/throughput", "{:.0f}"),
    "devices": ("nereus/devices", "{:.0f}"),
}


@dataclass
class Live:
    """A recorder for people. Use as a context manager, so that the panel ends with the run."""

    console: Console = field(default_factory=Console)
    total_steps: int | None = None
    _plan: Plan | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    _values: dict[str, float] = field(default_factory=dict, init=False)
    _panel: Panelled | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._panel = Panelled(console=self.console, auto_refresh=False, transient=True)
            self._panel.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._panel is not None:
            self._panel.stop()
            self._panel = None

    def begin(self, state: ControllerState) -> None:
        """Show the first plan."""
        self._plan = state.plan
        if self._panel is None:
            self._say(f"plan: {state.plan.describe()}")
        self._refresh()

    def record(
        self,
        boundary: Boundary,
        seen: Observation,  # noqa: ARG002
        triggers: Collection[Trigger],
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        """One line when there was something to decide."""
        if triggers:
            self._say(line(boundary, tuple(triggers), decision, outcome))
        match decision:
            case Adapt(proposal=proposal) if outcome is not None and outcome.completed:
                self._plan = proposal.plan
            case Restart(plan=plan):
                self._plan = plan

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The progress of one step."""
        self._step = step
        self._values |= values
        if self._panel is None:
            self._say(f"{self._steps()}: " + ", ".join(f"{name} {value}" for name, value in self._shown(values)))
        self._refresh()

    def _steps(self) -> str:
        return f"step {self._step}" + (f"/{self.total_steps}" if self.total_steps else "")

    def _shown(self, values: Mapping[str, float]) -> list[tuple[str, str]]:
        return [(name, form.format(values[key])) for name, (key, form) in COLUMNS.items() if key in values]

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _refresh(self) -> None:
        if self._panel is None or self._plan is None:
            return
        progress = Table.grid(padding=(0, 2))
        shown = self._shown(self._values)
        progress.add_row(*(Text(name, style="dim") for name, _ in shown))
        progress.add_row(*(value for _, value in shown))
        plans = Table.grid(padding=(0, 2))
        for text in self._plan.describe().split("; "):
            plans.add_row(Text(text))
        self._panel.update(Panel(Group(progress, Text(""), plans), title=self._steps()), refresh=True)
