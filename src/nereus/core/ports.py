"""Every interface a plugin or a host implements, on one page."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nereus.core.cluster import Cluster
from nereus.core.decision import Adapt, ControllerState, Decision, Options, Outcome, Payback
from nereus.core.emu import EMUSet
from nereus.core.errors import NereusError
from nereus.core.observation import Boundary, Observation, Trigger
from nereus.core.plan import Plan
from nereus.core.spec import ModelSpec, TensorSpec
from nereus.core.transition import TransitionDAG
from nereus.core.workflow import Workflow
from nereus.core.workload import Workload

Columns = Mapping[str, Any]
"""Columns of the sample table: numpy arrays at the coordinator, tensors inside a loss. First dim: samples."""


class Family(Protocol):
    """families/: one architecture. Torch-free."""

    @property
    def trainable(self) -> bool:
        """Whether the built-in trainer runs it; any other is planned for other hosts only."""
        ...

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes from a Hugging Face `config.json`. Raises SettingsError for what is not supported."""
        ...

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The `config.json` of a spec."""
        ...

    def tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Every tensor with its global shape and cut."""
        ...

    def legal_tp(self, spec: ModelSpec) -> tuple[int, ...]:
        """TP degrees that cut the heads evenly, ascending."""
        ...


class Algorithm(Protocol):
    """algorithms/: one RL algorithm. Torch-free: losses use methods of the tensors they are given."""

    def models(self) -> tuple[str, ...]:
        """The roles it needs a model for."""
        ...

    def workflow(self, specs: Mapping[str, ModelSpec]) -> Workflow:
        """Its calls and weight synchronisations."""
        ...

    def check(self, workload: Workload) -> None:
        """Raises SettingsError when the workload does not suit it."""
        ...

    def outputs(self, call: str) -> tuple[str, ...]:
        """What a forward or update call computes: of `log_probs`, `entropy`, `values` and `scores`."""
        ...

    def advantages(self, columns: Columns) -> dict[str, Any]:
        """Columns made from the whole batch in fp64 at the coordinator; `stat/NAME` keys are values of metric NAME."""
        ...

    def denominator(self, call: str, columns: Columns) -> float:
        """What a mini-batch's summed loss of an update call is divided by (D5.7)."""
        ...

    def loss(self, call: str, outputs: Columns, columns: Columns) -> tuple[Any, dict[str, Any]]:
        """Loss summed over a micro-batch's tokens, and sums to report. Shapes: (samples, response tokens)."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in the global order; `facts` is what the verifier needs."""

    id: int
    tokens: tuple[int, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Tokenizer(Protocol):
    """Text to token ids and back, for tasks whose prompts are text."""

    def encode(self, text: str, chat: bool = False) -> tuple[int, ...]:
        """Token ids of a text; with `chat`, of one user message in the chat template, ready for the answer."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a response."""
        ...


class Task(Protocol):
    """tasks/: one source of prompts and rewards."""

    def prompt(self, index: int) -> Prompt:
        """The prompt at a position of the global, endless, seeded order."""
        ...

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that training never sees."""
        ...

    def score(self, prompt: Prompt, response: Sequence[int]) -> float:
        """The verifier's reward of a response (token ids, without padding)."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """A sampled stop token ends the response and belongs to it."""
        ...

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """Token ids that are never sampled and get no probability."""
        ...


class ClusterSource(Protocol):
    """clusters/: one source of devices."""

    def cluster(self) -> Cluster:
        """Every device that may ever be there, with kinds and links."""
        ...

    def available(self, boundary: Boundary) -> frozenset[int]:
        """The device ids the job may use from this boundary on. Never empty."""
        ...


class AdmissionRule(Protocol):
    """controller/admission/: whether an opportunistic change is worth it. Urgent ones are not asked about."""

    @property
    def margin(self) -> float:
        """γ of Eq. (2)."""
        ...

    def admits(self, payback: Payback, step: int) -> tuple[bool, str]:
        """The verdict and its arithmetic in words."""
        ...


class Brain(Protocol):
    """controller/brain.py: pure; the same inputs give the same decisions."""

    def take_in(self, state: ControllerState, seen: Observation) -> tuple[ControllerState, tuple[Trigger, ...]]:
        """Calibrate; compare with the values at the last replan."""
        ...

    def propose(self, state: ControllerState) -> Options:
        """Plans that fit, fastest first, each with its way there."""
        ...

    def decide(self, state: ControllerState, triggers: Sequence[Trigger], options: Options) -> Decision:
        """Keep, adapt or restart."""
        ...

    def rebase(self, state: ControllerState, triggers: Sequence[Trigger]) -> ControllerState:
        """New reference values, even when the answer was no."""
        ...

    def settle(self, state: ControllerState, decision: Adapt, outcome: Outcome) -> ControllerState:
        """What exists now and what the move cost."""
        ...

    def begin(self, state: ControllerState, plan: Plan, units: EMUSet) -> ControllerState:
        """The state after a restart; calibration is kept."""
        ...


class Job(Protocol):
    """An RL job that can be changed at its boundaries: the built-in trainer, a host framework, or a simulation."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last finished step, names as in verl."""
        ...

    def boundaries(self) -> Iterator[Boundary]:
        """Run the job; yield at every safe boundary."""
        ...

    def observe(self, boundary: Boundary) -> Observation:
        """What happened since the last boundary."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """In-flight work has ended inside this context."""
        ...

    def adopt(self, units: EMUSet, plan: Plan | None = None) -> None:
        """Use these units from now on; with `plan`, also its micro-batches and recompute modes."""
        ...

    def restart(self, plan: Plan) -> EMUSet:
        """Start again under `plan` from the last checkpoint."""
        ...


class Executor(Protocol):
    """Carries out a transition on live state."""

    def execute(self, dag: TransitionDAG) -> Outcome:
        """Returns what exists; does not raise for a lost peer."""
        ...


class Transport(Protocol):
    """Moves contiguous byte buffers between ranks; those of a pair arrive in the order both sides post them."""

    @property
    def device(self) -> Any:
        """Where buffers must lie to travel."""
        ...

    def post(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]
    ) -> tuple[list[Any], list[NereusError]]:
        """Start to send each (rank, buffer) and to fill each (rank, buffer): handles, and what could not be started."""
        ...

    def wait(self, handle: Any, what: str) -> None:
        """Until a transfer has ended. Raises TransportError, which says `what`, past the deadline."""
        ...


class Recorder(Protocol):
    """report/recorders/: one sink for what happened."""

    def begin(self, state: ControllerState) -> None:
        """The state before the first boundary."""
        ...

    def record(
        self,
        boundary: Boundary,
        seen: Observation,
        triggers: Collection[Trigger],
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        """One tick."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of one step, names as in verl."""
        ...
