"""What a launch configuration says, whatever the framework: one vocabulary that every key table fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nereus.core import SettingsError


class Refusal(StrEnum):
    """Every reason for which a configuration is not imported."""

    UNREADABLE = "unreadable"
    """Not the syntax of a shell script, YAML, JSON or `key=value` lines."""
    FOREIGN = "foreign"
    """No key of the framework is in it."""
    UNRESOLVED = "unresolved"
    """A value that the answer depends on is a variable that the file does not set."""
    NO_DEVICES = "no_devices"
    """Neither the file nor the framework's defaults say how many devices there are."""
    NO_BATCH = "no_batch"
    """Neither the file nor the framework's defaults say how many prompts a step has."""
    NO_MODEL = "no_model"
    """The file names no model and none was given beside it."""
    INVALID = "invalid"
    """A value has the wrong type or contradicts another."""


class RefusedImportError(SettingsError):
    """A configuration cannot be imported. `reason` is one of a closed list, the message says what to do."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Part:
    """How one model-stage is laid out, in the file's words; None where neither file nor framework says.

    `sp`: Ulysses or ring sequence-parallel degree (the devices that share a sequence outside the model's cut).
    `shard`: devices that one copy of the weights is sharded over (FSDP, ZeRO-3), -1 for all of them.
    """

    backend: str | None = None
    devices: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    expert_tp: int | None = None
    sp: int | None = None
    vpp: int | None = None
    zero: int | None = None
    shard: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline_layout: str | None = None
    """Megatron's text for the layers of every stage."""
    micro_batch: int | None = None
    """Sequences on a device at once."""
    step_micro_batch: int | None = None
    """Sequences of all replicas together at once (older verl); `micro_batch` is this divided by the replicas."""
    tokens: int | None = None
    """Tokens on a device at once, where micro-batches are packed by tokens."""
    param_offload: bool | None = None
    optimizer_offload: bool | None = None
    recompute: str | None = None
    """none, selective or full."""
    sequence_parallel: bool | None = None
    """Megatron's cut of activations along the sequence inside a TP group."""
    dtype: str | None = None


class MiniBatch(StrEnum):
    """What a framework counts when it states its mini-batch."""

    PROMPTS = "prompts"
    SAMPLES = "samples"
    UPDATES = "updates"
    """The number of updates in a step."""
    ACCUMULATION = "accumulation"
    """Micro-batches that are accumulated on each replica."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One RL step. `mini_batch` counts what `mini_batch_unit` says."""

    prompts: int
    samples_per_prompt: int | None = None
    mini_batch: int | None = None
    mini_batch_unit: MiniBatch = MiniBatch.SAMPLES
    epochs: int = 1
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    max_sequence_tokens: int | None = None
    prompts_are_samples: bool = False
    """`prompts` counts responses, not prompts."""
    stream_prompts: int | None = None
    """What a streaming job waits for before an update, where `prompts` is 0."""
    packed: bool | None = None
    """Micro-batches are packed by tokens instead of counted in sequences."""
    unpadded: bool = False
    """Sequences of a micro-batch lie end to end instead of being padded to the longest."""
    loss: str = "eager"
    """What makes log-probabilities of logits, as `core.workload.LOSSES` names it."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A launch configuration.

    `defaults` maps a field, such as `rollout.tp`, to the framework's key whose default was taken because the file
    leaves it out. `unresolved` names variables that the file does not set, with the key and line that use them.
    """

    framework: str
    algorithm: str | None
    models: Mapping[str, str]
    """Model by role as the file names it; roles without an entry use the actor's."""
    roles: tuple[str, ...]
    """Roles that the job runs: actor, reference, critic, reward."""
    nodes: int | None
    devices_per_node: int | None
    """As the framework counts them: verl, slime and OpenRLHF count the training devices, the others the pool."""
    devices: int
    """Everything the job needs."""
    colocated: bool
    """Whether training and generation take turns on the same devices."""
    actor: Part
    rollout: Part
    batch: Batch
    reference: Part | None = None
    critic: Part | None = None
    reward: Part | None = None
    rollout_nodes: int | None = None
    """Nodes that only generate, where the framework counts them."""
    kv_share: float | None = None
    """Share of a device's memory that the generation engine may use."""
    device_lists: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Device ids by the framework's name of a role, where the file lists them."""
    colocates_others: bool = False
    """The file asks for colocation, but its framework leaves generation out of it."""
    asynchronous: bool = False
    idle_offload: bool = False
    """The framework itself moves idle state to the host where stages share devices."""
    context_tokens: int | None = None
    """The context that the file gives the model, where it does."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    unresolved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
