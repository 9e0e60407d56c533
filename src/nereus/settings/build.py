"""From settings to the values the rest of the project is given. Nothing is started here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from nereus.controller.monitor import Thresholds
from nereus.core import Boundary, Lengths, ModelSpec, SettingsError, Workflow, Workload, plugins
from nereus.core.ports import AdmissionRule, Algorithm, ClusterSource, Recorder, Task
from nereus.planning.legal import check_pins
from nereus.planning.problem import Problem
from nereus.settings import models
from nereus.settings.pins import capabilities, check_devices
from nereus.settings.schema import Plugin, Settings, typed
from nereus.settings.source import unknown_key
from nereus.trainer.config import JobConfig, ModelSource, OptimizerConfig, RewardConfig, SamplingConfig

ALGORITHMS, TASKS, CLUSTERS = "nereus.algorithms", "nereus.tasks", "nereus.clusters"
ADMISSION, RECORDERS = "nereus.controller.admission", "nereus.report.recorders"

PROMPTS_LOOKED_AT = 256
P95_OF_MEAN = -math.log(0.05)
"""p95 / mean of answers that end with the same probability at every token."""


def algorithm(settings: Settings) -> Algorithm:
    """The RL algorithm."""
    made: Algorithm = _make("algorithm", ALGORITHMS, settings.algorithm)
    if settings.reward.model_weight > 0 and "reward" not in made.models():
        raise SettingsError("reward.model_weight is above 0, but the algorithm runs no reward model")
    if settings.reward.model_weight == 0 and "reward" in made.models():
        raise SettingsError(
            "reward.model_weight is 0, so the reward model would run for nothing: give it a weight, "
            "or set algorithm.reward_model: false"
        )
    return made


def specs(settings: Settings) -> Mapping[str, ModelSpec]:
    """The sizes of every model the algorithm uses."""
    return models.specs(settings, algorithm(settings).models())


def workflow(settings: Settings) -> Workflow:
    """The calls of one RL step."""
    return algorithm(settings).workflow(specs(settings))


def task(settings: Settings) -> Task:
    """The source of prompts. Raises SettingsError when it does not go with the models."""
    if settings.task is None:
        raise SettingsError("task is missing: training needs prompts; planning alone does not")
    extra = {"seed": settings.run.seed}
    options = _options("task", TASKS, settings.task, extra)
    if "tokenizer" in _option_names(plugins.load(TASKS, settings.task.use)):
        directory = options.get("tokenizer", settings.models.actor)
        options["tokenizer"] = _tokenizer(directory)
    made: Task = plugins.make(TASKS, settings.task.use, options)
    if settings.run.evaluate_every and not made.held_out():
        raise SettingsError("run.evaluate_every is set, but the task holds out no prompts")
    return made


def workload(settings: Settings, source: Task | None = None) -> Workload:
    """The expected workload; prompt lengths are those of `source` when they are not given."""
    asked, limit = settings.workload, settings.sampling.max_response_tokens
    sequences = asked.prompts * asked.samples_per_prompt
    if asked.expected_response_tokens > limit:
        raise SettingsError(
            f"workload.expected_response_tokens is {asked.expected_response_tokens:g}, "
            f"above sampling.max_response_tokens {limit}"
        )
    if asked.expected_prompt_tokens is not None:
        prompt = Lengths.constant(asked.expected_prompt_tokens)
    elif source is not None:
        looked_at = range(min(PROMPTS_LOOKED_AT, asked.prompts * settings.run.steps))
        prompt = Lengths.measured([len(source.prompt(index).tokens) for index in looked_at])
    else:
        raise SettingsError("workload.expected_prompt_tokens is missing: there is no task to measure prompts of")
    made = Workload(
        prompts=asked.prompts,
        samples_per_prompt=asked.samples_per_prompt,
        prompt=prompt,
        response=expected_lengths(asked.expected_response_tokens, sequences, limit),
        mini_batch=asked.mini_batch,
        max_response_tokens=limit,
        epochs=asked.epochs,
    )
    algorithm(settings).check(made)
    return made


def expected_lengths(mean: float, sequences: int, limit: int) -> Lengths:
    """Answers that end with the same probability at every token, cut at `limit`: p95 is 3 means, the longest ln(n)."""
    p95, longest = mean * P95_OF_MEAN, mean * max(P95_OF_MEAN, 1 + math.log(sequences))
    return Lengths(mean, min(p95, limit), min(longest, limit))


def trainable(settings: Settings) -> bool:
    """Whether there is everything to train with: a task, and a directory for every model."""
    return settings.task is not None and all(
        isinstance(models.chosen(settings, role), str) for role in algorithm(settings).models()
    )


def job_config(settings: Settings) -> JobConfig:
    """Everything the built-in job is told, checked as far as it can be without starting it."""
    flow, source = workflow(settings), task(settings)
    work = workload(settings, source)
    _check_tokens(settings, flow, source, work)
    return JobConfig(
        algorithm=algorithm(settings),
        task=source,
        models={role: ModelSource(_directory(settings, role), flow.specs[role]) for role in flow.specs},
        workload=work,
        optimizers={ms.model: _optimizer(settings, ms.model, work) for ms in flow.model_stages if flow.updated(ms)},
        sampling=SamplingConfig(**settings.sampling.model_dump()),
        reward=RewardConfig(**settings.reward.model_dump()),
        capabilities=capabilities(settings, flow),
        steps=settings.run.steps,
        seed=settings.run.seed,
        evaluate_every=settings.run.evaluate_every,
        evaluate_samples=settings.run.evaluate_samples,
        checkpoint_every=settings.run.checkpoint_every,
        micro_batch_tokens=settings.workload.micro_batch_tokens,
        timeout_s=settings.run.timeout_s,
        read_memory=settings.run.read_memory,
    )


def problem(settings: Settings, devices: int | None = None) -> Problem:
    """What the planner is asked: the job on the devices of its start, or on the first `devices` of its cluster.

    Raises SettingsError for pins that no plan can meet.
    """
    flow, source = workflow(settings), cluster_source(settings)
    cluster = source.cluster()
    work = workload(settings, None if settings.workload.expected_prompt_tokens else task(settings))
    able = capabilities(settings, flow)
    check_pins(Problem(flow, work, cluster, able))
    check_devices(settings, cluster)
    if devices is None:
        now = source.available(Boundary(0, 0.0))
    elif 1 <= devices <= len(cluster.ids):
        now = frozenset(cluster.ids[:devices])
    else:
        raise SettingsError(f"{devices} devices, the cluster has 1 to {len(cluster.ids)}")
    return Problem(flow, work, cluster.only(now), able)


def cluster_source(settings: Settings) -> ClusterSource:
    """Where devices come from."""
    plugin = settings.cluster
    if isinstance(pool := plugin.options.get("pool"), dict):  # a cluster section of its own
        inner = _section("cluster.pool", pool)
        options = {"use": inner.use, **_options("cluster.pool", CLUSTERS, inner, {})}
        plugin = Plugin(use=plugin.use, **{**plugin.options, "pool": options})
    made: ClusterSource = _make("cluster", CLUSTERS, plugin)
    return made


def admission_rule(settings: Settings) -> AdmissionRule:
    """Which opportunistic changes are worth it."""
    made: AdmissionRule = _make("admission", ADMISSION, settings.admission)
    return made


def thresholds(settings: Settings) -> Thresholds:
    """When a drift is worth a replan."""
    monitor = settings.monitor
    return Thresholds(monitor.length_threshold, monitor.memory_threshold, monitor.lookahead_steps)


def recorders(settings: Settings, run_dir: Path) -> tuple[Recorder, ...]:
    """The sinks of what happens; those that write files do so in the run directory."""
    extra = {"directory": str(run_dir)}
    return tuple(
        _make(f"recorders.{index}", RECORDERS, plugin, extra) for index, plugin in enumerate(settings.recorders)
    )


def _section(where: str, data: Mapping[str, Any]) -> Plugin:
    if not isinstance(data.get("use", "local"), str):
        raise SettingsError(f"{where}.use is {data['use']!r}: expected the name of a cluster")
    return Plugin(**{"use": "local", **data})


def _make(where: str, package: str, plugin: Plugin, extra: Mapping[str, Any] | None = None) -> Any:
    return plugins.make(package, plugin.use, _options(where, package, plugin, extra or {}))


def _options(where: str, package: str, plugin: Plugin, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plugin, typed, and of `extra` what it takes and was not given. Raises SettingsError."""
    kind = plugins.load(package, plugin.use)
    if not is_dataclass(kind):
        return plugin.options
    names = _option_names(kind)
    hints = get_type_hints(kind)
    options = {name: value for name, value in extra.items() if name in names}
    for name, value in plugin.options.items():
        if name not in names:
            raise SettingsError(unknown_key((*where.split("."), name), ("use", *names)))
        try:
            options[name] = typed(hints[name], value)
        except SettingsError as error:
            raise SettingsError(f"{where}.{name} is {value!r}: {error}") from None
    for field in fields(kind):
        required = field.init and field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in options and field.name != "tokenizer":
            raise SettingsError(f"{where}.{field.name} is missing: {plugin.use} needs it")
    return options


def _option_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else ()


def _tokenizer(directory: Any) -> Any:
    if not isinstance(directory, str):
        raise SettingsError("task.tokenizer is missing: the actor has no directory to take one from")
    try:
        from nereus.trainer.tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer.load(directory)
    except ImportError as error:
        raise SettingsError(f"the tokenizer needs {error.name}: pip install '.[train]'") from None


def _directory(settings: Settings, role: str) -> str:
    model = models.chosen(settings, role)
    if not isinstance(model, str):
        raise SettingsError(f"models.{role} is not given by a directory: training needs a model directory")
    return model


def _optimizer(settings: Settings, role: str, work: Workload) -> OptimizerConfig:
    section = getattr(settings.optimizer, role)
    return OptimizerConfig(**section.model_dump(), total_updates=settings.run.steps * work.updates)


def _check_tokens(settings: Settings, flow: Workflow, source: Task, work: Workload) -> None:
    """Prompts and responses fit every model's positions and the actor's vocabulary."""
    longest = int(work.prompt.maximum) + work.max_response_tokens
    for role, sizes in flow.specs.items():
        if longest > sizes.max_positions:
            raise SettingsError(
                f"prompts of {int(work.prompt.maximum)} tokens and sampling.max_response_tokens "
                f"{work.max_response_tokens} exceed the {sizes.max_positions} positions of models.{role}"
            )
    largest = max(*source.stop_tokens, *source.prompt(0).tokens)
    if largest >= flow.specs["actor"].vocab:
        raise SettingsError(
            f"task {settings.task.use if settings.task else ''}: token {largest} is beyond the actor's vocabulary of "
            f"{flow.specs['actor'].vocab}"
        )
