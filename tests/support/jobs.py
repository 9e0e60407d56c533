"""Small RL jobs on real worker processes, under plans that a test writes down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from nereus.algorithms.grpo import Grpo
from nereus.algorithms.ppo import Ppo
from nereus.clusters.local import Local
from nereus.core import (
    Head,
    Lengths,
    Outcome,
    Plan,
    Workload,
)
from nereus.core.model_dir import ModelDir
from nereus.core.ports import Algorithm
from nereus.cost.state import schemas
from nereus.engine.crew import Crew
from nereus.engine.executor import TransitionExecutor
from nereus.engine.worker import DeviceSettings
from nereus.families.llama import Llama
from nereus.tasks.counting import VOCABULARY, Counting
from nereus.trainer import checkpoint
from nereus.trainer.config import JobConfig, ModelSource, OptimizerConfig, RewardConfig, SamplingConfig
from nereus.trainer.job import RLJob
from nereus.trainer.program import PROGRAM, Options
from nereus.trainer.table import SampleTable
from nereus.transition.budget import Budget
from nereus.transition.compile import compile as compile_transition
from tests.support.plans import Degrees as Degrees
from tests.support.plans import plan_of as plan_of

TIMEOUT_S = 60.0
CAPACITY_BYTES = 1 << 30
MAX_RESPONSE_TOKENS = 10


def make_models(directory: Path, layers: int = 4) -> Path:
    """Random tiny Llama actor, reward model and critic."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification  # seconds, only here

    torch.manual_seed(7)
    sizes = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(sizes).save_pretrained(directory / "actor")
    LlamaForSequenceClassification(sizes).save_pretrained(directory / "reward")
    return directory


def job_config(models: Path, algorithm: Algorithm | None = None, precision: str = "fp64", steps: int = 3) -> JobConfig:
    """Three steps of two mini-batches on the counting task."""
    chosen = algorithm or Ppo()
    folders = {"actor": "actor", "reference": "actor", "reward": "reward", "critic": "reward"}
    sources = {}
    for role in chosen.models():
        path = models / folders[role]
        spec = replace(Llama().spec(ModelDir.read(path).config), dtype=precision)
        head = Head.SCALAR if folders[role] == "reward" else Head.LM
        sources[role] = ModelSource(str(path), replace(spec, head=head))
    samples = 4 if isinstance(chosen, Grpo) else 1
    return JobConfig(
        algorithm=chosen,
        task=Counting(seed=3),
        models=sources,
        workload=Workload(
            prompts=12 // samples,
            samples_per_prompt=samples,
            prompt=Lengths.constant(3),
            response=Lengths.constant(MAX_RESPONSE_TOKENS),
            mini_batch=6,
            max_response_tokens=MAX_RESPONSE_TOKENS,
        ),
        optimizers={"actor": OptimizerConfig(lr=3e-3), "critic": OptimizerConfig(lr=3e-3)},
        sampling=SamplingConfig(max_response_tokens=MAX_RESPONSE_TOKENS),
        reward=RewardConfig(0.5, 0.5),
        steps=steps,
        seed=11,
        timeout_s=TIMEOUT_S,
    )


@dataclass
class Trained:
    """A short run: ids and responses by step, logical parameters by model-stage, metrics by step, transitions."""

    sample_ids: list[list[int]] = field(default_factory=list)
    responses: list[list[list[int]]] = field(default_factory=list)
    parameters: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    primitives: set[str] = field(default_factory=set)
    outcomes: list[Outcome] = field(default_factory=list)


class ReplayedJob(RLJob):
    """A job whose responses are given instead of generated."""

    replayed: Sequence[Sequence[Sequence[int]]] = ()

    def _new_table(self) -> SampleTable:
        table = super()._new_table()
        if self.replayed:
            table.set_tokens("response", self.replayed[self.step])
            table.done.add("generate")
        return table


@contextmanager
def running(
    config: JobConfig,
    plan: Plan,
    run_dir: Path,
    devices: int,
    capacity_bytes: int = CAPACITY_BYTES,
    program: str = PROGRAM,
    resume: Path | None = None,
) -> Iterator[tuple[ReplayedJob, TransitionExecutor]]:
    """A loaded job on `devices` workers, and the executor of its transitions; `resume` is a checkpoint."""
    workflow = config.algorithm.workflow(config.specs)
    limits = {device: DeviceSettings(capacity_bytes) for device in range(devices)}
    with Crew(limits, program, Options(config, workflow, schemas(workflow)), timeout_s=config.timeout_s) as crew:
        crew.start(range(devices))
        crew.wait_ready(range(devices), config.timeout_s)
        pool = Local(devices, capacity_bytes, oversubscribe=True)
        job = ReplayedJob(config, workflow, crew, pool, plan, run_dir, verify=True)
        job.load(resume)
        yield job, TransitionExecutor(crew, schemas(workflow), config.timeout_s, verify=True)


def train(
    config: JobConfig,
    plans: Sequence[Plan],
    run_dir: Path,
    devices: int,
    replayed: Sequence[Sequence[Sequence[int]]] = (),
    capacity_bytes: int = CAPACITY_BYTES,
) -> Trained:
    """Run the job under `plans[0]`; after step n change to `plans[n]` while there is one."""
    found = Trained()
    with running(config, plans[0], run_dir, devices, capacity_bytes) as (job, executor):
        job.replayed = replayed
        known = schemas(job.workflow)
        for boundary in job.boundaries():
            assert job.table is not None
            found.sample_ids.append(job.table.sample_ids.tolist())
            found.responses.append(job.table.tokens("response", job.table.sample_ids - job.table.sample_ids[0]))
            found.metrics.append(dict(job.metrics))
            if boundary.step < len(plans):
                goal = plans[boundary.step]
                capacity = dict.fromkeys(range(devices), capacity_bytes)
                dag = compile_transition(job.units, goal, known, Budget(capacity))
                found.primitives |= {primitive.name for primitive in dag.primitives}
                with job.paused():
                    outcome = executor.execute(dag)
                    assert outcome.completed, outcome.error
                    found.outcomes.append(outcome)
                    job.adopt(outcome.units, goal)
        path = job.checkpoint()
    manifest = checkpoint.read_manifest(path)
    for ms, unit in manifest.units.items():
        found.parameters[str(ms)] = dict(checkpoint.parameters(path, unit, known[ms]))
    return found


def largest_difference(a: Trained, b: Trained) -> float:
    """Largest ‖x − y‖ / ‖x‖ over all trained tensors."""
    return max(
        float((x.double() - b.parameters[ms][name].double()).norm() / x.double().norm())
        for ms, tensors in a.parameters.items()
        for name, x in tensors.items()
    )
