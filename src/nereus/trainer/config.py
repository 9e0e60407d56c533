"""What the built-in job is told: plain values, resolved and checked, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereus.core import Capabilities, ModelSpec, SettingsError, Workload, plugins
from nereus.core.ports import Algorithm, Task
from nereus.cost.state import family_of


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a role's weights come from (a Hugging Face directory) and their sizes."""

    path: str
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW of one trained model. The rate warms up linearly, then goes linearly from `lr` to `lr_end`."""

    lr: float
    lr_end: float | None = None
    warmup_updates: int = 0
    total_updates: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def rate(self, update: int) -> float:
        """Learning rate of the update with this 0-based number."""
        end = self.lr if self.lr_end is None else self.lr_end
        share = min(1.0, update / self.total_updates) if self.total_updates else 0.0
        warm = min(1.0, (update + 1) / self.warmup_updates) if self.warmup_updates else 1.0
        return warm * (self.lr + (end - self.lr) * share)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How responses are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_response_tokens: int = 64

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise SettingsError(f"sampling: need temperature > 0 and 0 < top_p <= 1, got {self}")


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """The reward is a weighted sum of the reward model's score and the task's verifier."""

    model_weight: float = 0.0
    verifier_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class JobConfig:
    """One RL job. `workload` carries the lengths expected before anything was measured."""

    algorithm: Algorithm
    task: Task
    models: Mapping[str, ModelSource]
    workload: Workload
    optimizers: Mapping[str, OptimizerConfig]
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    capabilities: Capabilities = field(default_factory=Capabilities)
    steps: int = 1
    seed: int = 0
    evaluate_every: int = 0
    """Steps between evaluations of held-out prompts; 0: never."""
    evaluate_samples: int = 64
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only the final one."""
    micro_batch_tokens: int | None = None
    """Upper bound of padded tokens in a micro-batch, beside its bound in sequences."""
    timeout_s: float = 120.0
    """Deadline of every wait."""
    read_memory: bool = True
    """Whether workers of one host read state from one another's memory."""

    def __post_init__(self) -> None:
        for role, spec in self.specs.items():
            if not family_of(spec).trainable:
                families = plugins.names("nereus.families")
                valid = (name for name in families if plugins.load("nereus.families", name).trainable)
                raise SettingsError(
                    f"models.{role}: {spec.family} can be planned, but the built-in trainer does not run it; "
                    f"it runs {', '.join(valid)}"
                )

    @property
    def specs(self) -> Mapping[str, ModelSpec]:
        """Sizes by role."""
        return {role: source.spec for role, source in self.models.items()}
