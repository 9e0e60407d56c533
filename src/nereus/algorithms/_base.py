"""What PPO, GRPO and ReMax share: one actor, a reference, an optional reward model, the clipped token-mean loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus.algorithms import _calls as calls
from nereus.algorithms import _losses as losses
from nereus.core import Call, ModelSpec, SettingsError, Workflow, Workload
from nereus.core.ports import Columns


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """Options every algorithm has. `reward_model` False: rewards come from the task's verifier alone."""

    clip: float = 0.2
    kl_coefficient: float = 0.01
    entropy_coefficient: float = 0.0
    reward_model: bool = True

    def __post_init__(self) -> None:
        self.require("clip", above=0.0)
        self.require("kl_coefficient", at_least=0.0)
        self.require("entropy_coefficient", at_least=0.0)

    def require(
        self, option: str, *, above: float | None = None, at_least: float = float("-inf"), at_most: float = float("inf")
    ) -> None:
        """Raises SettingsError when an option is out of range."""
        value = getattr(self, option)
        if above is not None and not value > above:
            raise SettingsError(f"{self.name}: {option} is {value}, must be above {above:g}")
        if not at_least <= value <= at_most:
            limit = f"at least {at_least:g}" if at_most == float("inf") else f"between {at_least:g} and {at_most:g}"
            raise SettingsError(f"{self.name}: {option} is {value}, must be {limit}")

    @property
    def name(self) -> str:
        """As written in YAML."""
        return type(self).__name__.lower()

    def models(self) -> tuple[str, ...]:
        """The roles it needs a model for."""
        return tuple(dict.fromkeys(call.model_stage.model for call in self.calls()))

    def calls(self) -> tuple[Call, ...]:
        """The calls of one RL step."""
        forward = (calls.GENERATE, calls.REFERENCE_LOG_PROBS, *self.reward_calls(), calls.OLD_LOG_PROBS)
        return calls.with_update(forward, calls.UPDATE_ACTOR, calls.ACTOR_TRAINING)

    def reward_calls(self) -> tuple[Call, ...]:
        """The calls of the reward model, if there is one."""
        return (calls.REWARD_SCORES,) if self.reward_model else ()

    def workflow(self, specs: Mapping[str, ModelSpec]) -> Workflow:
        """Its calls, and the trained actor's weights to the one that generates."""
        used = {model: specs[model] for model in self.models() if model in specs}
        return Workflow(self.calls(), used, ((calls.ACTOR_TRAINING, calls.ACTOR_GENERATION),))

    def check(self, workload: Workload) -> None:
        """Any workload will do."""

    def outputs(self, call: str) -> tuple[str, ...]:
        """What a call computes."""
        return calls.OUTPUTS[call]

    def denominator(self, call: str, columns: Columns) -> float:  # noqa: ARG002 -- the same for every update
        """Response tokens of the mini-batch, so that the loss is their mean however they are shared out (D5.7)."""
        return float(columns["response_lengths"].sum())

    def loss(self, call: str, outputs: Columns, columns: Columns) -> tuple[Any, dict[str, Any]]:
        """The clipped policy loss."""
        if call != calls.UPDATE_ACTOR:
            raise SettingsError(f"{self.name}: no loss for call {call!r}, valid: {calls.UPDATE_ACTOR}")
        return losses.policy_loss(outputs, columns, self.clip, self.entropy_coefficient)
