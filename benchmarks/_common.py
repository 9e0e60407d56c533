"""What the benchmarks share: a job on real worker processes, and a task whose sequences all have one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nereus.clusters.local import Local
from nereus.core import Plan
from nereus.core.ports import Prompt
from nereus.cost.state import schemas
from nereus.engine.crew import Crew
from nereus.engine.executor import TransitionExecutor
from nereus.engine.worker import DeviceSettings
from nereus.trainer.config import JobConfig
from nereus.trainer.job import RLJob
from nereus.trainer.program import PROGRAM, Options


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Random prompts of one length; nothing ends a response early. The score is the share of even tokens."""

    vocabulary: int
    prompt_tokens: int

    def prompt(self, index: int) -> Prompt:
        """Tokens drawn by `index`."""
        random = np.random.Generator(np.random.Philox(key=[index, 0]))
        return Prompt(index, tuple(random.integers(0, self.vocabulary, self.prompt_tokens).tolist()))

    def held_out(self) -> Sequence[Prompt]:
        """None: nothing is learned."""
        return ()

    def score(self, prompt: Prompt, response: Sequence[int]) -> float:  # noqa: ARG002
        """The share of even tokens."""
        return sum(token % 2 == 0 for token in response) / len(response)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """None."""
        return ()

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """None."""
        return ()


@contextmanager
def running(
    config: JobConfig, source: Local, plan: Plan, run_dir: Path, kind: type[RLJob] = RLJob
) -> Iterator[tuple[RLJob, TransitionExecutor]]:
    """A loaded job on one worker per device of `source`, and the executor of its transitions."""
    workflow, cluster = config.algorithm.workflow(config.specs), source.cluster()
    known = schemas(workflow)
    limits = {
        device: DeviceSettings(cluster.kind(device).memory_bytes, cluster.kind(device).speed) for device in cluster.ids
    }
    with Crew(limits, PROGRAM, Options(config, workflow, known), timeout_s=config.timeout_s) as crew:
        crew.start(cluster.ids)
        crew.wait_ready(cluster.ids, config.timeout_s)
        job = kind(config, workflow, crew, source, plan, run_dir)
        job.load()
        yield job, TransitionExecutor(crew, known, config.timeout_s)
