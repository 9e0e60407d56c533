"""A PPO job on a crew without processes: what the coordinator does, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus.algorithms.ppo import Ppo
from nereus.clusters.local import Local
from nereus.core import Head, Lengths, Plan, Workload
from nereus.core.ports import Algorithm
from nereus.tasks.counting import Counting
from nereus.trainer.config import JobConfig, ModelSource, OptimizerConfig, RewardConfig, SamplingConfig
from nereus.trainer.job import RLJob
from tests.settings.files import SPEC
from tests.support.plans import Degrees, plan_of
from tests.trainer.fake_crew import FakeCrew, imitate

DEGREES: dict[str, Degrees] = {
    "actor/generation": (1, 1, 2, (0, 1)),
    "reference/inference": (1, 1, 1, (0,)),
    "reward/inference": (1, 1, 1, (1,)),
    "actor/training": (1, 1, 2, (0, 1)),
    "critic/training": (2, 1, 1, (2, 3)),
}


def config(algorithm: Algorithm | None = None, **changes: Any) -> JobConfig:
    """Two mini-batches of 7 sequences a step, so that two units have shares of 4 and 3."""
    roles = (algorithm or Ppo()).models()
    heads = {"critic": Head.SCALAR, "reward": Head.SCALAR}
    sources = {role: ModelSource("nowhere", replace(SPEC, head=heads.get(role, Head.LM))) for role in roles}
    lengths = Lengths.constant(3)
    made = JobConfig(
        algorithm=algorithm or Ppo(),
        task=Counting(seed=3),
        models=sources,
        workload=Workload(14, 1, lengths, lengths, mini_batch=7, max_response_tokens=3),
        optimizers={"actor": OptimizerConfig(lr=0.5, warmup_updates=8), "critic": OptimizerConfig(lr=0.25)},
        sampling=SamplingConfig(max_response_tokens=3),
        reward=RewardConfig(0.5, 0.5),
        steps=3,
        seed=11,
        timeout_s=5.0,
    )
    return replace(made, **changes)


def plan(changes: Mapping[str, Degrees] | None = None, micro_batch: int = 2) -> Plan:
    """The plan of `DEGREES` with some model-stages changed."""
    return plan_of({**DEGREES, **(changes or {})}, micro_batch)


def job(run_dir: Path, crew: FakeCrew | None = None, **changes: Any) -> RLJob:
    """A loaded job on four imitated devices."""
    made = config(**changes)
    workflow = made.algorithm.workflow(made.specs)
    source = Local(4, "1 GiB", oversubscribe=True)
    found = RLJob(made, workflow, crew or FakeCrew(imitate, range(4)), source, plan(), run_dir)
    found.load()
    return found
