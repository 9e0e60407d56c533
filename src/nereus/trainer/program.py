"""The worker's side of the built-in job: what a device does for each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nereus.core import EMU, Kind, ModelStage, StateSchema, TransitionError, Workflow
from nereus.engine.connection import Message
from nereus.engine.groups import Group
from nereus.engine.positions import Position
from nereus.engine.worker import Worker
from nereus.families import SCORE
from nereus.trainer import checkpoint
from nereus.trainer.config import JobConfig
from nereus.trainer.decoder import gradients, hf, optimizer, pipeline
from nereus.trainer.decoder.batch import MicroBatch
from nereus.trainer.decoder.generation import generate
from nereus.trainer.decoder.model import Decoder
from nereus.trainer.decoder.parallel import Hooks, UnitGroups
from nereus.trainer.decoder.sampling import Sampling
from nereus.trainer.micro import micro_batches
from nereus.trainer.table import padded, ragged
from nereus.trainer.weights import WeightSync

PROGRAM = "nereus.trainer.program.TrainerProgram"
"""Dotted name under which workers load this program."""

BUCKET_BYTES = 25 << 20
"""Largest flat buffer of one gradient reduction."""


@dataclass(frozen=True, slots=True)
class Options:
    """What every worker is told when it starts."""

    config: JobConfig
    workflow: Workflow
    schemas: Mapping[ModelStage, StateSchema]
    node_of: Mapping[int, int] | None = None
    """The node of each device, where there are several."""


@dataclass(slots=True)
class _Prepared:
    """Gradients of an update that is ready but not yet committed."""

    update: int
    gradients: gradients.Gradients
    norm: float


class TrainerProgram:
    """Handlers of one worker. Positions live in the engine; decoders are built around them when first needed."""

    def __init__(self, worker: Worker, options: Options) -> None:
        self._worker = worker
        self._config = options.config
        self._workflow = options.workflow
        self._schemas = options.schemas
        self._groups: dict[tuple[ModelStage, str], str] = {}
        self._decoders: dict[ModelStage, tuple[Position, Decoder]] = {}
        self._prepared: dict[ModelStage, _Prepared] = {}
        self._weights = WeightSync(worker, options.schemas, options.node_of)

    def handlers(self) -> Mapping[str, Callable[[Message], Message | None]]:
        """Command name → what to do."""
        return {
            "load": self._load,
            "unload": self._unload,
            "bind": self._bind,
            "rest": self._rest,
            "generate": self._generate,
            "forward": self._forward,
            "update.prepare": self._prepare,
            "update.commit": self._commit,
            "sync": self._sync,
            "checkpoint": self._checkpoint,
        }

    # State

    def _load(self, message: Message) -> None:
        """Make a position and fill it from a checkpoint's shards or from a model directory."""
        fields = message.fields
        unit: EMU = fields["unit"]
        schema, device = self._schemas[unit.model_stage], self._worker.device
        position = self._worker.positions.create(unit, schema)
        position.logical = fields["logical"]
        if fields["stored"] is not None:
            checkpoint.fill(Path(fields["checkpoint"]), fields["stored"], schema, position, device)
            return
        spec = self._workflow.spec(unit.model_stage)
        full = schema.dtypes.get(Kind.MASTER, schema.dtypes[Kind.PARAM])
        where = (unit.layout, *unit.position(device))
        # A critic may start from a language model, which has no scalar head.
        may_lack = (SCORE,) if unit.model_stage.model == "critic" else ()
        loaded = hf.load(fields["path"], spec, schema.tensors, *where, full, may_lack)
        for (name, kind), tensor in position.tensors.items():
            if kind in (Kind.PARAM, Kind.MASTER):
                tensor.copy_(loaded[name])

    def _unload(self, _: Message) -> None:
        self._forget()
        self._worker.positions.clear()

    def _bind(self, message: Message) -> None:
        """Learn which groups serve which axis; what was built around old positions is let go."""
        self._groups = dict(message.fields["groups"])
        self._forget()

    def _rest(self, _: Message) -> None:
        """Let go of what was built around positions, before they change."""
        self._forget()

    def _forget(self) -> None:
        self._decoders.clear()
        self._weights.forget()
        self._prepared.clear()

    def _group(self, model_stage: ModelStage, axis: str) -> Group | None:
        name = self._groups.get((model_stage, axis))
        return None if name is None else self._worker.groups.get(name)

    def _decoder(self, model_stage: ModelStage, recompute: str = "none") -> Decoder:
        position = self._worker.positions[model_stage]
        known = self._decoders.get(model_stage)
        if known is not None and known[0] is position and known[1].recompute == recompute:
            return known[1]
        unit = position.unit
        meter, pacer = self._worker.meter, self._worker.pacer
        decoder = Decoder(
            self._workflow.spec(model_stage),
            position.schema.tensors,
            unit.layout,
            *unit.position(self._worker.device),
            {name: tensor for (name, kind), tensor in position.tensors.items() if kind is Kind.PARAM},
            UnitGroups(self._group(model_stage, "tp"), self._group(model_stage, "pp")),
            recompute,
            Hooks(pacer.pace, self._worker.ledger.watch, meter.communicating, meter.computing),
            temperature=self._config.sampling.temperature,
            masked_tokens=self._config.task.masked_tokens,
        )
        self._decoders[model_stage] = (position, decoder)
        return decoder

    # Calls

    def _generate(self, message: Message) -> Message:
        fields = message.fields
        unit: EMU = fields["unit"]
        settings = self._config.sampling
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            greedy=fields["greedy"],
            max_response_tokens=settings.max_response_tokens,
            stop_tokens=self._config.task.stop_tokens,
            masked_tokens=self._config.task.masked_tokens,
            seed=self._config.seed if fields["seed"] is None else fields["seed"],
        )
        prompts = ragged(message.arrays["prompt_tokens"], message.arrays["prompt_lengths"])
        ids = message.arrays["sample_ids"].tolist()
        self._check_version(unit.model_stage, fields["version"])
        waves = fields["micro_batch"] if fields["kv_bytes"] else None
        decoder = self._decoder(unit.model_stage)
        responses = generate(decoder, prompts, ids, sampling, fields["step"], waves)
        if unit.entry_device != self._worker.device:
            return self._reply()
        tokens, lengths = padded(responses)
        return self._reply({"tokens": tokens, "lengths": lengths})

    def _check_version(self, model_stage: ModelStage, wanted: int) -> None:
        """Old weights must not answer for new ones; nothing else is kept from one generation to the next."""
        held = self._worker.positions[model_stage].logical.policy_version
        if held != wanted:
            raise TransitionError(
                f"device {self._worker.device}: {model_stage} has the weights of update {held}, not of update {wanted}"
            )

    def _forward(self, message: Message) -> Message:
        fields = message.fields
        unit: EMU = fields["unit"]
        decoder = self._decoder(unit.model_stage)
        batches = self._micro_batches(message, decoder)
        found = pipeline.forward(decoder, batches, fields["outputs"])
        if unit.entry_device != self._worker.device:
            return self._reply()
        return self._reply({name: _stacked([batch[name] for batch in found]) for name in fields["outputs"]})

    def _prepare(self, message: Message) -> Message:
        """Gradients of this unit's share, summed over replicas and ready to apply; nothing is changed yet."""
        fields = message.fields
        ms: ModelStage = fields["unit"].model_stage
        decoder = self._decoder(ms, fields["recompute"])
        batches = self._micro_batches(message, decoder)
        call, algorithm = fields["call"], self._config.algorithm

        def loss(outputs: Mapping[str, torch.Tensor], batch: MicroBatch) -> Any:
            return algorithm.loss(call, outputs, batch.columns)

        with self._worker.ledger.activations():
            made, sums = pipeline.train(decoder, batches, fields["outputs"], loss, fields["scale"])
        with torch.no_grad():
            self._reduce(self._group(ms, "dp"), list(made.values()))
            norm = self._norm(ms, decoder, made)
        self._prepared[ms] = _Prepared(fields["update"], made, norm)
        return self._reply(sums=sums, grad_norm=norm)

    def _commit(self, message: Message) -> Message:
        """Apply the prepared update once: a repeated commit of the same number changes nothing (D5.6)."""
        unit, update = message.fields["unit"], message.fields["update"]
        position = self._worker.positions[unit.model_stage]
        if position.logical.update_count == update + 1:
            return self._reply()
        prepared = self._prepared.pop(unit.model_stage, None)
        if prepared is None or prepared.update != update or position.logical.update_count != update:
            raise TransitionError(f"{unit.model_stage}: update {update} was committed but is not prepared here")
        settings = self._config.optimizers[unit.model_stage.model]
        scale = optimizer.clip_scale(prepared.norm, settings.clip_norm or None)
        with self._worker.meter.computing("optimizer"):
            optimizer.step(position.tensors, prepared.gradients, settings, update, scale)
        self._worker.pacer.pace()
        position.logical = replace(position.logical, update_count=update + 1)
        return self._reply()

    def _sync(self, message: Message) -> Message:
        """Take the trained parameters that this device's generation position lacks from those that hold them."""
        fields = message.fields
        self._weights.run(fields["sources"], fields["targets"], fields["group"])
        generating = fields["targets"][0].model_stage
        if generating in self._worker.positions:
            position = self._worker.positions[generating]
            position.logical = replace(position.logical, policy_version=fields["version"])
        return self._reply()

    def _checkpoint(self, message: Message) -> None:
        """Write this device's shard, after making sure that it has seen every committed update."""
        unit: EMU = message.fields["unit"]
        position = self._worker.positions[unit.model_stage]
        update = message.fields["update"]
        if position.logical.update_count == update - 1:
            self._commit(Message("update.commit", {"unit": unit, "update": update - 1}))
        if position.logical.update_count != update:
            raise TransitionError(
                f"{unit.model_stage}: this shard is at update {position.logical.update_count}, the job at {update}"
            )
        checkpoint.write_shard(Path(message.fields["directory"]), position, self._worker.device)

    # Means

    def _micro_batches(self, message: Message, decoder: Decoder) -> list[MicroBatch]:
        budget = self._config.micro_batch_tokens
        return micro_batches(message.arrays, message.fields["micro_batch"], budget, decoder.wide, decoder.device)

    def _reduce(self, group: Group | None, tensors: Sequence[torch.Tensor]) -> None:
        """Sum gradients over replicas in flat buckets."""
        if group is None:
            return
        for bucket in _buckets(tensors):
            self._worker.ledger.check("buckets", sum(tensor.nbytes for tensor in bucket))
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._worker.ledger.hold("buckets", flat), self._worker.meter.communicating("dp"):
                group.all_reduce(flat)
                for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _norm(self, model_stage: ModelStage, decoder: Decoder, made: gradients.Gradients) -> float:
        """Global gradient norm: each logical element once (R03)."""
        total = torch.tensor([gradients.square_norm(decoder, made)], dtype=torch.float64, device=decoder.device)
        for axis in ("tp", "pp"):
            group = self._group(model_stage, axis)
            if group is not None:
                with self._worker.meter.communicating(axis):
                    group.all_reduce(total)
        return math.sqrt(float(total))

    def _reply(self, arrays: Mapping[str, np.ndarray[Any, Any]] | None = None, **fields: Any) -> Message:
        meter = {name: timing.measured_s for name, timing in self._worker.meter.take().items()}
        return Message("done", {"meter": meter, **fields}, arrays or {})


def _stacked(parts: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    """Outputs of consecutive micro-batches as one fp64 array, padded with 0 to the widest."""
    if parts[0].dim() == 1:
        return torch.cat(list(parts)).double().cpu().numpy()  # type: ignore[no-any-return]
    width = max(part.shape[1] for part in parts)
    rows = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    return torch.cat(rows).double().cpu().numpy()  # type: ignore[no-any-return]


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
