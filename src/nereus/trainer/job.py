"""The built-in RL job: the coordinator of one run, and the Job port the controller drives."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from nereus.core import (
    EMU,
    Assignment,
    Boundary,
    Call,
    EMUSet,
    LogicalState,
    ModelStage,
    Observation,
    OutOfMemoryError,
    Plan,
    Stage,
    TransitionError,
    Work,
    Workflow,
    expand,
)
from nereus.core.ports import ClusterSource
from nereus.cost.schedule import waits
from nereus.cost.state import schemas
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.engine.executor import logical_digests
from nereus.trainer import checkpoint, dispatch, measure
from nereus.trainer.calls import Accounts, Calls
from nereus.trainer.config import JobConfig
from nereus.trainer.table import SampleTable
from nereus.trainer.weights import moving_s
from nereus.trainer.wiring import Wiring

log = logging.getLogger(__name__)

EVALUATION_SEED = 0x5EED

MAX_MEMORY_EVENTS = 8
"""Out-of-memory events of one step after which no further plan is tried."""


class RLJob:
    """Runs RL steps under whatever units exist. `step` counts finished steps, `position` consumed sample ids.

    With `verify`, the hash of every parameter must be that of the trained one after each weight synchronisation.
    """

    def __init__(
        self,
        config: JobConfig,
        workflow: Workflow,
        crew: Crew,
        source: ClusterSource,
        plan: Plan,
        run_dir: Path,
        verify: bool = False,
    ) -> None:
        self.config = config
        self.workflow = workflow
        self.crew = crew
        self.source = source
        self.plan = plan
        self.units = expand(plan)
        self.run_dir = run_dir
        self.verify = verify
        self.step = 0
        self.position = 0
        self.table: SampleTable | None = None
        self.logical: dict[ModelStage, LogicalState] = {ms: LogicalState() for ms in workflow.model_stages}
        self.metrics: dict[str, float] = {}
        self.call_s: dict[str, float] = {}
        self.accounts = Accounts()
        self.stopping = False
        self._wiring = Wiring(workflow, crew, config.timeout_s)
        self._began_s = time.monotonic()
        self._out_of_memory: OutOfMemoryError | None = None
        self._memory_events = 0
        self._leaving: frozenset[int] = frozenset()
        self._adopted = False
        self._step_s: float | None = None
        self._peaks: dict[int, int] = {}

    # The Job port

    def boundaries(self) -> Iterator[Boundary]:
        """Run to the last step. An out-of-memory event ends a step early: the same step goes on under a new plan."""
        while self.step < self.config.steps and not self.stopping:
            self._run_step()
            yield Boundary(self.step, self.elapsed_s)
            if self._out_of_memory is not None and (not self._adopted or self._memory_events > MAX_MEMORY_EVENTS):
                raise self._out_of_memory
            self._after_boundary()

    def observe(self, boundary: Boundary) -> Observation:
        """Facts since the last boundary; starts workers for devices that have come. Raises WorkerLostError."""
        self.crew.raise_lost()
        wanted = self.source.available(boundary)
        self.crew.start(wanted - self.crew.started())
        ready = self.crew.ready()
        return measure.observation(
            boundary,
            self.table,
            devices=ready & wanted,
            departing=(ready & self.units.devices) - wanted,
            peaks=self._peaks,
            accounts=self.accounts,
            call_s=self.call_s,
            step_s=self._step_s,
            out_of_memory=None if self._out_of_memory is None else str(self._out_of_memory),
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """At a boundary nothing is in flight; what workers built around their positions would keep them in memory."""
        self.crew.call(sorted(self.units.devices), Message("rest"), self.config.timeout_s)
        yield

    def adopt(self, units: EMUSet, plan: Plan | None = None) -> None:
        """Use these units from now on. Without a plan the transition stopped, and no group is left where it ran.

        Raises WorkerLostError when it stopped because a worker died; `units` are then what a checkpoint can be made of.
        """
        before, self.units = (frozenset(self.units), self.plan), units
        if plan is None:
            self.crew.raise_lost()
            self._wiring.reset()
        missing = [str(ms) for ms in self.workflow.model_stages if not units.of(ms)]
        if missing:
            raise TransitionError(f"after the transition no unit is left of {', '.join(missing)}")
        self.plan = plan or realised(self.plan, units)
        self._adopted = before != (frozenset(units), self.plan)
        self._wiring.wire(units)
        # What a transition held for a while says nothing about the steps to come.
        self.crew.call(sorted(units.devices), Message("reset_peak"), self.config.timeout_s)

    def restart(self, plan: Plan) -> EMUSet:
        """Write a checkpoint, load it into the units of `plan`."""
        path = self.checkpoint()
        for device in sorted(self.units.devices & self.crew.ready()):
            self.crew.call((device,), Message("unload"), self.config.timeout_s)
        self._wiring.wire(EMUSet(()))
        self.plan, self.units = plan, expand(plan)
        self.load(path)
        self._adopted = True
        return self.units

    # Starting and ending

    @property
    def elapsed_s(self) -> float:
        """Seconds since the job was made."""
        return time.monotonic() - self._began_s

    def load(self, source: Path | None = None) -> None:
        """Fill every unit: trained models from a checkpoint when one is given, all else from the model directories."""
        manifest = checkpoint.read_manifest(source) if source is not None else None
        if manifest is not None and source is not None:
            self.step, self.position = manifest.step, manifest.position
            self.logical |= dict(manifest.logical)
            self.table = checkpoint.read_table(source)
        origin = {target: trained for trained, target in self.workflow.weight_syncs}
        for ms in self.units.model_stages:
            stored = manifest.units.get(origin.get(ms, ms)) if manifest is not None else None
            fields = {
                "path": self.config.models[ms.model].path,
                "checkpoint": str(source) if stored is not None else None,
                "stored": stored,
                "logical": self.logical[ms],
            }
            for unit in self.units.of(ms):
                self.crew.call(unit.devices, Message("load", {**fields, "unit": unit}), self.config.timeout_s)
        self._wiring.wire(self.units)

    def checkpoint(self) -> Path:
        """Write the trained models from one whole unit each. Raises TransitionError when none is left of a model."""
        final = self.run_dir / "checkpoints" / f"step-{self.step}"
        units = {ms: self._whole(ms) for ms in self.workflow.model_stages if self.workflow.updated(ms)}
        manifest = checkpoint.Manifest(self.step, self.position, units, dict(self.logical), self.config.seed)
        unfinished = self.table if self.table is not None and self.table.step == self.step else None
        with checkpoint.writing(final) as temporary:
            for ms, unit in units.items():
                fields = {"unit": unit, "directory": str(temporary), "update": self.logical[ms].update_count}
                self.crew.call(unit.devices, Message("checkpoint", fields), self.config.timeout_s)
            checkpoint.complete(temporary, final, manifest, unfinished)
        return final

    def _whole(self, model_stage: ModelStage) -> EMU:
        """A unit whose workers all live."""
        lost = self.units.devices - self.crew.started()
        whole = self.units.without_devices(lost).of(model_stage)
        if not whole:
            devices = ", ".join(map(str, sorted(lost)))
            raise TransitionError(f"no whole unit of {model_stage} is left, its state is lost with device {devices}")
        return whole[0]

    # One step

    def _run_step(self) -> None:
        began_s = time.perf_counter()
        self._adopted, self._out_of_memory = False, None
        if self.table is None:
            self.accounts, self.call_s = Accounts(), {}
            self.table = self._new_table()
        try:
            self._run_calls(self.table)
        except OutOfMemoryError as error:
            log.warning("step %d: %s", self.step + 1, error)
            self._out_of_memory = error
            self._memory_events += 1
            self._wiring.forget()
            self._step_s = None
        else:
            self._step_s = time.perf_counter() - began_s
            self._finish_step(self.table)
        self._peaks = self._read_peaks()

    def _finish_step(self, table: SampleTable) -> None:
        self.metrics = measure.metrics(self.config, table, self.accounts, self.call_s, self._step_s or 0.0)
        self.metrics["nereus/devices"] = float(len(self.units.devices))
        self.step += 1
        self.position += table.samples
        self._memory_events = 0
        every = self.config.evaluate_every
        if every and (self.step % every == 0 or self.step == self.config.steps):
            try:
                self.metrics["val/score"] = self.evaluate()
            except OutOfMemoryError as error:
                self._out_of_memory = error
                self._wiring.forget()

    def _after_boundary(self) -> None:
        if self.table is not None and self.table.step < self.step:
            self.table = None
        wanted = self.source.available(Boundary(self.step, self.elapsed_s))
        self.crew.stop(self.crew.started() - self.units.devices - wanted)
        leaving, known = self.units.devices - wanted, self._leaving
        self._leaving = leaving
        every = self.config.checkpoint_every
        if leaving - known:
            # The controller found no plan without them. They may go with the only copy of something.
            path = self.checkpoint()
            log.warning("devices %s are leaving and still in use; checkpoint written to %s", sorted(leaving), path)
        elif every and self.step % every == 0 and self.table is None:
            self.checkpoint()

    def _new_table(self) -> SampleTable:
        work = self.config.workload
        ids = np.arange(self.position, self.position + work.sequences, dtype=np.int64)
        table = SampleTable(self.step, ids)
        table.columns["groups"] = ids // work.samples_per_prompt
        table.set_tokens("prompt", [self.config.task.prompt(int(index)).tokens for index in table.columns["groups"]])
        return table

    def _calls(self) -> Calls:
        return Calls(self.config, self.crew, self.plan, self.units.of, self.logical, self.accounts)

    def _run_calls(self, table: SampleTable) -> None:
        """Forward work first, then advantages at the coordinator, then updates and weight synchronisation.

        Weights are synchronised as soon as they are updated, while other models still are on devices of their own.
        """
        calls = self._calls()
        order = [self.workflow.call(name) for name in self.workflow.order()]
        updates = [call for call in order if call.work is Work.UPDATE]
        before = self._tasks(calls, table, [call for call in order if call.work is not Work.UPDATE])
        self.call_s |= dispatch.run(self.crew, before, self.config.timeout_s)
        if "advantages" not in table.columns:
            self._score(table)
        after = self._tasks(calls, table, updates)
        for source, target in self.workflow.weight_syncs:
            needed = frozenset(call.name for call in updates if call.model_stage == source) - table.done
            start = partial(calls.sync, source, target, self._wiring.sync(target))
            more_s = moving_s(schemas(self.workflow)[target], self.units.of(source), self.units.of(target))
            after.append(dispatch.Task("sync", self._devices(source, target), needed, start, more_s))
        self.call_s |= dispatch.run(self.crew, after, self.config.timeout_s)
        for source, target in self.workflow.weight_syncs if self.verify else ():
            self._check_weights(source, target)

    def _check_weights(self, source: ModelStage, target: ModelStage) -> None:
        """Raises TransitionError that names parameters in which the two differ."""
        known = schemas(self.workflow)
        wanted, found = (
            logical_digests(self.crew, known[ms], self.units.of(ms), self.config.timeout_s) for ms in (source, target)
        )
        changed = [name for name, kind in found if found[name, kind] != wanted[name, kind]]
        if changed:
            named = ", ".join(changed[:5])
            raise TransitionError(f"{target}: another hash than in {source}: {named} ({len(changed)} in all)")

    def _tasks(self, calls: Calls, table: SampleTable, wanted: Sequence[Call]) -> list[dispatch.Task]:
        """The calls not done yet, each after those that it waits for in the cost model."""
        tasks, turns = [], waits(self.workflow, self.plan)
        for call in wanted:
            if call.name not in table.done:
                before = frozenset(turns[call.name]) - table.done
                start = partial(calls.routine, call, table)
                tasks.append(dispatch.Task(call.name, self._devices(call.model_stage), before, start))
        return tasks

    def _devices(self, *model_stages: ModelStage) -> frozenset[int]:
        return frozenset(device for ms in model_stages for unit in self.units.of(ms) for device in unit.devices)

    def _score(self, table: SampleTable) -> None:
        """Rewards and advantages, computed once over the whole batch in fp64 (D5.1)."""
        began_s = time.perf_counter()
        rows = np.arange(table.samples)
        prompts = [self.config.task.prompt(int(index)) for index in table.columns["groups"]]
        for prefix, name in (("response", ""), ("greedy_response", "greedy_")):
            if f"{prefix}_tokens" not in table.columns:
                continue
            scores = [self.config.task.score(p, r) for p, r in zip(prompts, table.tokens(prefix, rows), strict=True)]
            verifier = np.array(scores, dtype=np.float64)
            model = table.columns.get(f"{name}reward_scores", np.zeros(table.samples))
            weights = self.config.reward
            table.columns[f"{name}verifier_scores"] = verifier
            table.columns[f"{name}rewards"] = weights.model_weight * model + weights.verifier_weight * verifier
        table.columns["response_mask"] = table.mask()
        table.columns |= self.config.algorithm.advantages(table.columns)
        self.call_s["adv"] = time.perf_counter() - began_s

    # Looking

    def evaluate(self) -> float:
        """Mean verifier score of held-out prompts, sampled with a fixed seed by the generation units."""
        call = next(call for call in self.workflow.calls if call.model_stage.stage is Stage.GENERATION)
        held_out = self.config.task.held_out()
        prompts = [held_out[index % len(held_out)] for index in range(self.config.evaluate_samples)]
        calls = Calls(self.config, self.crew, self.plan, self.units.of, self.logical, Accounts())
        result: list[list[int]] = []

        def routine() -> dispatch.Routine:
            ids = np.arange(len(prompts), dtype=np.int64)
            tokens = [prompt.tokens for prompt in prompts]
            result.extend((yield from calls.generate(call, tokens, ids, step=0, seed=EVALUATION_SEED)))

        devices = self._devices(call.model_stage)
        dispatch.run(self.crew, [dispatch.Task("evaluate", devices, frozenset(), routine)], self.config.timeout_s)
        return float(np.mean([self.config.task.score(p, r) for p, r in zip(prompts, result, strict=True)]))

    def _read_peaks(self) -> dict[int, int]:
        devices = sorted(self.units.devices & self.crew.ready())
        replies = self.crew.call(devices, Message("memory", {"reset_peak": True}), self.config.timeout_s)
        return {device: int(reply.fields["peak_bytes"]) for device, reply in replies.items()}


def realised(plan: Plan, units: EMUSet) -> Plan:
    """The plan with the layouts and devices that exist; micro-batches and recompute modes stay as they are."""
    assignments = []
    for ms in units.model_stages:
        mine = units.of(ms)
        candidate = replace(plan.of(ms).candidate, layout=mine[0].layout, dp=len(mine))
        assignments.append(Assignment(candidate, tuple(unit.devices for unit in mine)))
    return Plan(tuple(assignments))
