"""The coordinator's side of each call: cut the table into shares, send them, put the answers back together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nereus.core import EMU, Call, Candidate, LogicalState, ModelStage, Plan, Work
from nereus.engine.connection import Message
from nereus.engine.crew import Crew
from nereus.trainer.config import JobConfig
from nereus.trainer.dispatch import Replies, Routine
from nereus.trainer.table import Array, SampleTable, align, mini_batches, padded, ragged, shares

LOSS_COLUMNS = ("advantages", "returns")


@dataclass(slots=True)
class Accounts:
    """What the replies of a step add up to."""

    timings: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    """call → device → operation class → seconds"""
    sums: dict[str, dict[str, float]] = field(default_factory=dict)
    """update call → statistic → sum over its mini-batches"""

    def add_timings(self, call: str, device: int, meter: Mapping[str, float]) -> None:
        """Add what one worker's reply says of its time."""
        classes = self.timings.setdefault(call, {}).setdefault(device, {})
        for name, seconds in meter.items():
            classes[name] = classes.get(name, 0.0) + seconds

    def add_sums(self, call: str, sums: Mapping[str, float]) -> None:
        """Add one mini-batch's statistics."""
        total = self.sums.setdefault(call, {})
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value


@dataclass(slots=True)
class Calls:
    """Makes the routine of each call. `units` and `plan` are what exists; `logical` the counters by model-stage."""

    config: JobConfig
    crew: Crew
    plan: Plan
    units: Callable[[ModelStage], tuple[EMU, ...]]
    logical: dict[ModelStage, LogicalState]
    accounts: Accounts

    def routine(self, call: Call, table: SampleTable) -> Routine:
        """The routine of one call of the workflow."""
        match call.work:
            case Work.GENERATE:
                return self._generate(call, table)
            case Work.FORWARD:
                return self._forward(call, table)
            case Work.UPDATE:
                return self._update(call, table)

    def _candidate(self, call: Call) -> Candidate:
        return self.plan.of(call.model_stage).candidate

    def _fields(self, call: Call, unit: EMU, **more: Any) -> dict[str, Any]:
        candidate = self._candidate(call)
        return {
            "call": call.name,
            "unit": unit,
            "micro_batch": candidate.micro_batch,
            "recompute": candidate.recompute,
            "kv_bytes": candidate.kv_bytes,
            **more,
        }

    def _submit(self, unit: EMU, message: Message) -> dict[int, int]:
        """Send a message to every device of a unit; ticket → device."""
        return {self.crew.submit(device, message): device for device in unit.devices}

    def _take(self, call: Call, tickets: Mapping[int, int], replies: Replies) -> dict[int, Message]:
        """Replies by device, their timings accounted for."""
        for ticket, device in tickets.items():
            self.accounts.add_timings(call.name, device, replies[ticket].fields.get("meter", {}))
        return {device: replies[ticket] for ticket, device in tickets.items()}

    def _generate(self, call: Call, table: SampleTable) -> Routine:
        greedy = "greedy_responses" in call.writes
        prompts = table.tokens("prompt", np.arange(table.samples))
        sequences = yield from self.generate(call, prompts, table.sample_ids, table.step, greedy)
        table.set_tokens("greedy_response" if greedy else "response", sequences)
        table.done.add(call.name)

    def generate(
        self,
        call: Call,
        prompts: Sequence[Sequence[int]],
        sample_ids: Array,
        step: int,
        greedy: bool = False,
        seed: int | None = None,
    ) -> Generator[Collection[int], Replies, list[list[int]]]:
        """A routine that returns one response for each prompt, in order."""
        units = self.units(call.model_stage)
        version = self.logical[call.model_stage].policy_version
        tokens, lengths = padded(prompts)
        used = [(unit, rows) for unit, rows in zip(units, shares(len(prompts), len(units)), strict=True) if len(rows)]
        tickets: dict[int, int] = {}
        for unit, rows in used:
            fields = self._fields(call, unit, step=step, greedy=greedy, seed=seed, version=version)
            arrays = {"prompt_tokens": tokens[rows], "prompt_lengths": lengths[rows], "sample_ids": sample_ids[rows]}
            tickets |= self._submit(unit, Message("generate", fields, arrays))
        replies = self._take(call, tickets, (yield tickets))
        found = [replies[unit.entry_device].arrays for unit, _ in used]
        return [sequence for arrays in found for sequence in ragged(arrays["tokens"], arrays["lengths"])]

    def _token_arrays(self, call: Call, table: SampleTable, rows: Array) -> dict[str, Array]:
        prefix = "response" if "responses" in call.reads else "greedy_response"
        arrays = table.rows(rows, ("prompt_tokens", "prompt_lengths"))
        arrays |= {
            "response_tokens": np.ascontiguousarray(table.columns[f"{prefix}_tokens"][rows]),
            "response_lengths": np.ascontiguousarray(table.columns[f"{prefix}_lengths"][rows]),
        }
        return arrays

    def _forward(self, call: Call, table: SampleTable) -> Routine:
        units = self.units(call.model_stage)
        outputs = self.config.algorithm.outputs(call.name)
        used = [(unit, rows) for unit, rows in zip(units, shares(table.samples, len(units)), strict=True) if len(rows)]
        tickets: dict[int, int] = {}
        for unit, rows in used:
            fields = self._fields(call, unit, outputs=outputs)
            tickets |= self._submit(unit, Message("forward", fields, self._token_arrays(call, table, rows)))
        replies = self._take(call, tickets, (yield tickets))
        width = table.columns["response_tokens"].shape[1]
        for output, column in zip(outputs, call.writes, strict=True):
            parts = [replies[unit.entry_device].arrays[output] for unit, _ in used]
            shape = (table.samples,) if parts[0].ndim == 1 else (table.samples, width)
            table.columns[column] = align(parts, [rows for _, rows in used], shape)
        table.done.add(call.name)

    def _update(self, call: Call, table: SampleTable) -> Routine:
        """Every mini-batch: prepare, hear that all are ready, commit (D5.6)."""
        work = self.config.workload
        batches = mini_batches(self.config.seed, table.step, table.samples, work.mini_batch, work.epochs)
        for number in range(table.updates.get(call.name, 0), len(batches)):
            yield from self._mini_batch(call, table, number, batches[number])
        state = self.logical[call.model_stage]
        position = int(table.sample_ids[-1]) + 1
        self.logical[call.model_stage] = replace(state, model_version=state.model_version + 1, position=position)
        table.done.add(call.name)

    def _mini_batch(self, call: Call, table: SampleTable, number: int, rows: Array) -> Routine:
        algorithm, units = self.config.algorithm, self.units(call.model_stage)
        count = self.logical[call.model_stage].update_count
        scale = 1.0 / algorithm.denominator(call.name, {n: c[rows] for n, c in table.columns.items() if np.ndim(c)})
        columns = (*call.reads, *LOSS_COLUMNS)
        tickets: dict[int, int] = {}
        for unit, part in zip(units, shares(len(rows), len(units)), strict=True):
            mine = rows[part]
            arrays = self._token_arrays(call, table, mine) | table.rows(mine, columns)
            fields = self._fields(call, unit, outputs=algorithm.outputs(call.name), scale=scale, update=count)
            tickets |= self._submit(unit, Message("update.prepare", fields, arrays))
        replies = self._take(call, tickets, (yield tickets))
        entries = [replies[unit.entry_device].fields for unit in units]
        names = sorted({name for entry in entries for name in entry["sums"]})
        sums = {name: scale * sum(entry["sums"].get(name, 0.0) for entry in entries) for name in names}
        self.accounts.add_sums(call.name, {**sums, "grad_norm": entries[0]["grad_norm"], "mini_batches": 1.0})
        # From here on the update counts as made: a worker that missed the message gets it again.
        self.logical[call.model_stage] = replace(self.logical[call.model_stage], update_count=count + 1)
        table.updates[call.name] = number + 1
        tickets = {}
        for unit in units:
            tickets |= self._submit(unit, Message("update.commit", {"call": call.name, "unit": unit, "update": count}))
        self._take(call, tickets, (yield tickets))

    def sync(self, source: ModelStage, target: ModelStage, group: str) -> Routine:
        """Copy parameters shard to shard from a trained model-stage to the one that generates (D5.12)."""
        sources, targets = self.units(source), self.units(target)
        devices = sorted({device for unit in (*sources, *targets) for device in unit.devices})
        version = self.logical[source].update_count
        fields = {"sources": sources, "targets": targets, "group": group, "version": version}
        tickets = {self.crew.submit(device, Message("sync", fields)): device for device in devices}
        replies = yield tickets
        for ticket, device in tickets.items():
            self.accounts.add_timings("sync", device, replies[ticket].fields.get("meter", {}))
        self.logical[target] = replace(self.logical[target], policy_version=version)
