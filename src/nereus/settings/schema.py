"""Every key that a job's YAML may have, with its type and default (the only pydantic).

A section with `use:` names a plugin; its other keys are the options of that plugin and are checked against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PydanticSchemaGenerationError,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from nereus.core import SettingsError

Share = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


NO_NUMBER = "input should be a number"


def _is_no_number(annotation: Any, value: Any) -> bool:
    """Whether a truth stands for a number, which would pass for 1 or 0."""
    kinds = set(_kinds(annotation)) if isinstance(value, bool) else set()
    return bool not in kinds and not kinds.isdisjoint((int, float))


def _kinds(annotation: Any) -> Iterator[Any]:
    """An annotation and all it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


class Section(BaseModel):
    """A part of the file whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any, info: ValidationInfo) -> Any:
        if _is_no_number(cls.model_fields[info.field_name or ""].annotation, value):
            raise PydanticCustomError("no_number", NO_NUMBER)
        return value


class Plugin(BaseModel):
    """A plugin by name; every other key is an option of its own."""

    model_config = ConfigDict(extra="allow", frozen=True)

    use: str

    @property
    def options(self) -> dict[str, Any]:
        """What the plugin is told."""
        return dict(self.model_extra or {})


class Admission(Plugin):
    """The admission rule."""

    use: str = "payback"


class Sizes(Section):
    """A model given by its sizes: enough to plan with, not to train."""

    family: str
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    ffn_hidden: PositiveInt
    vocab: PositiveInt
    head_dim: PositiveInt | None = None
    tied_embeddings: bool = False


class Named(Section):
    """A well-known model by its name: enough to plan with, not to train."""

    name: str


DIRECTORY, NAMED, SIZES = "directory", "named", "sizes"


def _form(value: Any) -> str:
    """Which way a model is given."""
    if isinstance(value, str):
        return DIRECTORY
    named = isinstance(value, Named) or (isinstance(value, dict) and "name" in value)
    return NAMED if named else SIZES


Model = Annotated[
    Annotated[str, Tag(DIRECTORY)] | Annotated[Sizes, Tag(SIZES)] | Annotated[Named, Tag(NAMED)],
    Discriminator(_form),
]
"""A Hugging Face directory, a well-known name, or sizes alone."""


class Models(Section):
    """One model per role; roles that the algorithm does not use are ignored. The reference defaults to the actor."""

    actor: Model
    reference: Model | None = None
    reward: Model | None = None
    critic: Model | None = None


class WorkloadSection(Section):
    """What one RL step handles. The expected lengths serve until the first were measured."""

    prompts: PositiveInt
    samples_per_prompt: PositiveInt = 1
    mini_batch: PositiveInt
    epochs: PositiveInt = 1
    expected_response_tokens: PositiveFloat
    expected_prompt_tokens: PositiveFloat | None = None
    """None: measured on the task's prompts."""
    micro_batch_tokens: PositiveInt | None = None
    """Bound of padded tokens in a micro-batch, beside its bound in sequences."""


class SamplingSection(Section):
    """How responses are drawn."""

    temperature: PositiveFloat = 1.0
    top_p: Share = 1.0
    max_response_tokens: PositiveInt = 64


class RewardSection(Section):
    """Weights of the reward model's score and of the task's verifier."""

    model_weight: NonNegativeFloat = 0.0
    verifier_weight: NonNegativeFloat = 1.0


class OptimizerSection(Section):
    """AdamW of one trained model; the rate goes linearly from `lr` to `lr_end` over the run."""

    lr: PositiveFloat = 1e-6
    lr_end: PositiveFloat | None = None
    warmup_updates: NonNegativeInt = 0
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0


class Optimizers(Section):
    """One per trained role."""

    actor: OptimizerSection = OptimizerSection()
    critic: OptimizerSection = OptimizerSection(lr=1e-5)


class PinSection(Section):
    """Degrees fixed for one model-stage; what is left out stays free."""

    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    dp: PositiveInt | None = None
    micro_batch: PositiveInt | None = None
    devices: tuple[int, ...] | None = None


class PlanSection(Section):
    """What the planner may choose from; empty lists leave every legal value. `pin` is keyed `actor/training`."""

    tp: tuple[PositiveInt, ...] = ()
    pp: tuple[PositiveInt, ...] = ()
    micro_batches: tuple[PositiveInt, ...] = ()
    recompute: Annotated[tuple[Literal["none", "full"], ...], Field(min_length=1)] = ("none", "full")
    batch: Literal["any", "exact"] = "any"
    """`exact`: replicas x micro-batch x accumulation is the mini-batch, for hosts that need equal shares."""
    pin: dict[str, PinSection] = {}


class MonitorSection(Section):
    """When a drift is worth a replan."""

    length_threshold: PositiveFloat = 0.30
    memory_threshold: Share = 0.95
    lookahead_steps: NonNegativeInt = 2


class RunSection(Section):
    """How long the job runs and what it leaves behind. `directory` is relative to where the command is given."""

    steps: PositiveInt = 1
    seed: int = 0
    evaluate_every: NonNegativeInt = 0
    evaluate_samples: PositiveInt = 64
    checkpoint_every: NonNegativeInt = 0
    directory: str
    timeout_s: PositiveFloat = 120.0
    read_memory: bool = True
    """Whether workers of one host read state from one another's memory; off, it is sent over the loopback."""


class Settings(Section):
    """One job."""

    algorithm: Plugin
    task: Plugin | None = None
    models: Models
    workload: WorkloadSection
    sampling: SamplingSection = SamplingSection()
    reward: RewardSection = RewardSection()
    optimizer: Optimizers = Optimizers()
    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    cluster: Plugin
    plan: PlanSection = PlanSection()
    admission: Admission = Admission()
    monitor: MonitorSection = MonitorSection()
    run: RunSection
    recorders: tuple[Plugin, ...] = (Plugin(use="jsonl"),)


def typed(annotation: Any, value: Any) -> Any:
    """`value` as `annotation` asks, converted where YAML allows it; kinds that pydantic does not know pass as they are.

    Raises SettingsError with the reason.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return value
    if _is_no_number(annotation, value):
        raise SettingsError(NO_NUMBER)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise SettingsError(reason[0].lower() + reason[1:]) from None
