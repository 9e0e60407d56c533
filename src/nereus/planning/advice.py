"""What to change: what would make a job fit that does not, or relieve the next bottleneck of one that does.

Every answer is a search of a changed problem, so its numbers are those of a plan. Nothing here is a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from nereus.core import (
    Capabilities,
    Cluster,
    Device,
    InfeasibleError,
    Lengths,
    Link,
    ModelStage,
    Pin,
    Plan,
    Workload,
)
from nereus.core.sizes import show_bytes, show_seconds
from nereus.planning.judge import Scored
from nereus.planning.problem import Problem
from nereus.planning.search import search
from nereus.planning.tight import surely

MOST_DEVICES = 16_384
MOST_TIMES = 16
"""A pool that would have to grow by more is no advice."""
WORTH = 0.005
"""A change that shortens the step by a smaller share is not worth a line."""
CAPS = 16
"""A response cap is looked for in so many steps of the present one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, in words, and the step it gives; `now_s` is None where nothing fits today.

    `kind` is one of option, pin, micro_batch, response, devices, memory, link.
    """

    kind: str
    change: str
    step_s: float
    now_s: float | None
    plan: Plan

    @property
    def gain(self) -> float:
        """Share of today's step that it saves; 0 where nothing fits today."""
        return 0.0 if self.now_s is None else 1 - self.step_s / self.now_s

    def describe(self) -> str:
        """One line with its numbers."""
        if self.now_s is None:
            return f"{self.change}: fits, {show_seconds(self.step_s)} s a step"
        seconds = f"{show_seconds(self.step_s)} s instead of {show_seconds(self.now_s)} s a step"
        return f"{self.change}: {seconds} ({-self.gain:+.0%})"


@dataclass(frozen=True, slots=True)
class _Change:
    """A changed problem with its name."""

    kind: str
    words: str
    problem: Problem
    used: Callable[[Plan], str] | None = None
    """The words for what the plan made use of, where the change allows several things."""


def remedies(problem: Problem, widest: Capabilities, short_bytes: Mapping[int, int]) -> tuple[Advice, ...]:
    """The smallest change of each kind that makes an infeasible job fit, those that need no hardware first.

    `widest` is what the job's host could be told to do beyond what the problem allows today; `short_bytes` is what
    each device lacks under the leanest plan, as the search says.
    """
    options = tuple(_options(problem, widest))
    found = list(_tried(options))
    if len(options) > 1 and not found:  # none of them alone
        found += _tried(tuple(_together(options, problem)))
    found += _tried(_unpinned(problem, widest))
    return (*found, *_shorter(problem), *_larger_pool(problem), *_more_memory(problem, short_bytes))


def gains(problem: Problem, now_s: float, widest: Capabilities) -> tuple[Advice, ...]:
    """What relieving each limit of a job whose step takes `now_s` would give, the largest gain first."""
    doubled = [_Change("devices", _pool_words(problem, 2), replace(problem, cluster=grown(problem.cluster, 2)))]
    changes = (*_options(problem, widest), *_unpinned(problem, widest), *_links(problem), *_capped_at_p95(problem))
    memory = _Change("memory", f"twice the memory of a device ({_memory_words(problem, 2)})", _memory(problem, 2))
    found = [replace(advice, now_s=now_s) for advice in _tried((*doubled, memory, *changes))]
    worth = [advice for advice in found if advice.kind == "devices" or advice.gain > WORTH]
    return tuple(sorted(worth, key=lambda advice: -advice.gain))


def grown(cluster: Cluster, times: int) -> Cluster:
    """The cluster `times` over: more nodes like its own, or more devices of its node where nodes make no difference."""
    flat = cluster.links["intra"] == cluster.links["inter"]
    ids, nodes = max(cluster.ids) + 1, max(device.node for device in cluster.devices) + 1
    more = tuple(
        Device(copy * ids + device.id, device.node + (0 if flat else copy * nodes), device.kind)
        for copy in range(1, times)
        for device in cluster.devices
    )
    return Cluster((*cluster.devices, *more), cluster.kinds, cluster.links)


def capped(workload: Workload, tokens: int) -> Workload:
    """The workload when no response may be longer than `tokens`; without quantiles the mean stays, if it can."""
    response = workload.response
    if response.quantiles:
        quantiles = tuple(min(length, float(tokens)) for length in response.quantiles)
        mean = response.mean * sum(quantiles) / max(sum(response.quantiles), 1e-9)
        capped_at = Lengths(mean, min(response.p95, tokens), min(response.maximum, tokens), quantiles)
    else:
        mean, p95, longest = (min(length, float(tokens)) for length in (response.mean, response.p95, response.maximum))
        capped_at = Lengths(mean, p95, longest)
    return replace(workload, response=capped_at, max_response_tokens=min(workload.max_response_tokens, tokens))


def _best(problem: Problem) -> Scored | None:
    try:
        return search(problem, 1).best[0]
    except InfeasibleError:
        return None


def _tried(changes: Iterator[_Change] | tuple[_Change, ...]) -> Iterator[Advice]:
    for change in changes:
        best = _best(change.problem)
        if best is not None:
            words = change.used(best.plan) if change.used else change.words
            yield Advice(change.kind, words, best.estimate.step_s, None, best.plan)


def _options(problem: Problem, widest: Capabilities) -> Iterator[_Change]:
    """What the host can do and the job was not allowed, one option at a time."""
    able = problem.capabilities

    def change(words: str, used: Callable[[Plan], str] | None = None, **fields: object) -> _Change:
        allowed = replace(able, **fields)  # type: ignore[arg-type]
        return _Change("option", words, replace(problem, capabilities=allowed), used)

    if missing := set(widest.recompute) - set(able.recompute):
        yield change(f"recompute {' or '.join(sorted(missing))}", recompute=widest.recompute)
    if able.micro_batches and not widest.micro_batches:
        yield change("micro-batches of any size", micro_batches=())
    if missing_zero := set(widest.zero) - set(able.zero):
        words = f"ZeRO {' or '.join(map(str, sorted(missing_zero)))}"
        levels = tuple(sorted({*able.zero, *widest.zero}))
        yield change(words, lambda plan: _zero_words(plan, problem) or words, zero=levels)
    if widest.sequence_parallel and not able.sequence_parallel:
        yield change("sequence parallelism", sequence_parallel=True)
    if widest.expert_parallel and not able.expert_parallel and any(s.experts for s in problem.workflow.specs.values()):
        yield change("expert parallelism", expert_parallel=True)
    kinds = {problem.cluster.kinds[device.kind].host_bytes_per_s for device in problem.cluster.devices}
    if widest.offload and not able.offload and min(kinds) > 0:
        yield change("offload of idle model-stages to the host", offload=True)


def _zero_words(plan: Plan, problem: Problem) -> str:
    """The levels beyond those allowed today that a plan uses, and the model-stages that do. What has no optimizer is
    whole however the levels are restricted."""
    by_level: dict[int, list[str]] = {}
    for model_stage in plan.model_stages:
        level = plan.of(model_stage).candidate.zero
        if level not in problem.capabilities.zero and (level or problem.workflow.updated(model_stage)):
            by_level.setdefault(level, []).append(str(model_stage))
    return ", ".join(f"ZeRO {level} of {' and '.join(names)}" for level, names in sorted(by_level.items()))


def _together(options: tuple[_Change, ...], problem: Problem) -> Iterator[_Change]:
    """All options at once."""
    able = problem.capabilities
    for option in options:
        chosen = option.problem.capabilities
        changed = {
            f.name: getattr(chosen, f.name) for f in fields(able) if getattr(chosen, f.name) != getattr(able, f.name)
        }
        problem = replace(problem, capabilities=replace(problem.capabilities, **changed))
    yield _Change("option", f"all of: {'; '.join(option.words for option in options)}", problem)


def _unpinned(problem: Problem, widest: Capabilities) -> Iterator[_Change]:
    """Without one of the pins that the host itself does not make; with several, without any of them last."""
    able, pins = problem.capabilities, problem.capabilities.pins
    own = {model_stage: pin for model_stage, pin in pins.items() if widest.pins.get(model_stage) != pin}
    for model_stage, pin in own.items():
        rest = {other: kept for other, kept in pins.items() if other != model_stage} | _host_pin(widest, model_stage)
        yield _Change("pin", f"no pin of {model_stage}", replace(problem, capabilities=replace(able, pins=rest)))
        if pin.micro_batch is not None and (pin.tp or pin.pp or pin.dp):
            freed = {**pins, model_stage: replace(pin, micro_batch=None)}
            words = f"another micro-batch than {pin.micro_batch} of {model_stage}"
            yield _Change("micro_batch", words, replace(problem, capabilities=replace(able, pins=freed)))
    if len(own) > 1:
        yield _Change("pin", "no pins", replace(problem, capabilities=replace(able, pins=widest.pins)))


def _host_pin(widest: Capabilities, model_stage: ModelStage) -> dict[ModelStage, Pin]:
    return {model_stage: widest.pins[model_stage]} if model_stage in widest.pins else {}


def _shorter(problem: Problem) -> Iterator[Advice]:
    """The longest response cap that fits."""
    limit = int(problem.workload.response.maximum)
    size = max(limit // CAPS, 1)

    def change(steps: int) -> _Change:
        tokens = steps * size
        words = f"responses capped at {tokens:,} tokens instead of {limit:,}"
        return _Change("response", words, replace(problem, workload=capped(problem.workload, tokens)))

    most = limit // size - (limit % size == 0)
    steps = _last(lambda count: surely(change(count).problem), most)
    while steps < most and _best(change(steps + 1).problem) is not None:
        steps += 1
    if steps:
        yield from _tried((change(steps),))


def _larger_pool(problem: Problem) -> Iterator[Advice]:
    """The smallest pool that fits, in devices or nodes like those there are."""
    have, unit = len(problem.cluster.devices), _unit(problem.cluster)
    times = min(MOST_TIMES, MOST_DEVICES // have)
    whole = grown(problem.cluster, max(times, 1))
    if times < 2 or not surely(replace(problem, cluster=whole)):
        return
    lower, upper = have // unit, len(whole.devices) // unit
    while upper - lower > 1:
        middle = (lower + upper) // 2
        fits = surely(replace(problem, cluster=_front(whole, middle * unit)))
        lower, upper = (lower, middle) if fits else (middle, upper)
    while upper - 1 > have // unit and _best(replace(problem, cluster=_front(whole, (upper - 1) * unit))) is not None:
        upper -= 1
    cluster = _front(whole, upper * unit)
    words = f"{len(cluster.devices)} devices instead of {have}"
    yield from _tried((_Change("devices", words, replace(problem, cluster=cluster)),))


def _more_memory(problem: Problem, short_bytes: Mapping[int, int]) -> Iterator[Advice]:
    """The memory of a device with which the leanest plan fits."""
    kinds = {device.id: problem.cluster.kinds[device.kind] for device in problem.cluster.devices}
    times = max((1 + short / kinds[device].memory_bytes for device, short in short_bytes.items()), default=1.0)
    if times > 1:
        words = f"devices with {_memory_words(problem, times)}"
        yield from _tried((_Change("memory", words, _memory(problem, times)),))


def _links(problem: Problem) -> Iterator[_Change]:
    links = problem.cluster.links
    nodes = len({device.node for device in problem.cluster.devices})
    for name, words in (("intra", "twice the rate of the links inside a node"), ("inter", "between nodes")):
        if name == "inter" and nodes == 1:
            continue
        text = words if name == "intra" else f"twice the rate of the links {words}"
        faster = {**links, name: _faster(links[name])}
        cluster = Cluster(problem.cluster.devices, problem.cluster.kinds, faster)
        yield _Change("link", text, replace(problem, cluster=cluster))


def _faster(link: Link) -> Link:
    return replace(link, bytes_per_s=2 * link.bytes_per_s)


def _capped_at_p95(problem: Problem) -> Iterator[_Change]:
    response = problem.workload.response
    tokens = max(int(response.p95), 1)
    if tokens < response.maximum:
        words = f"responses capped at {tokens:,} tokens (p95) instead of {response.maximum:,.0f}"
        yield _Change("response", words, replace(problem, workload=capped(problem.workload, tokens)))


def _memory(problem: Problem, times: float) -> Problem:
    cluster = problem.cluster
    kinds = {
        name: replace(kind, memory_bytes=math.ceil(kind.memory_bytes * times)) for name, kind in cluster.kinds.items()
    }
    return replace(problem, cluster=Cluster(cluster.devices, kinds, cluster.links))


def _memory_words(problem: Problem, times: float) -> str:
    present = {device.kind for device in problem.cluster.devices}
    sizes = [problem.cluster.kinds[name].memory_bytes for name in sorted(present)]
    return " and ".join(f"{show_bytes(size * times)} instead of {show_bytes(size)}" for size in sizes)


def _pool_words(problem: Problem, times: int) -> str:
    have = len(problem.cluster.devices)
    return f"{times * have:,} devices instead of {have:,}"


def _unit(cluster: Cluster) -> int:
    """Devices that a pool grows by: a node, or one where nodes make no difference or are not alike."""
    sizes: dict[int, int] = {}
    for device in cluster.devices:
        sizes[device.node] = sizes.get(device.node, 0) + 1
    flat = cluster.links["intra"] == cluster.links["inter"]
    return 1 if flat or len(set(sizes.values())) > 1 else next(iter(sizes.values()))


def _front(cluster: Cluster, devices: int) -> Cluster:
    return Cluster(cluster.devices[:devices], cluster.kinds, cluster.links)


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which `holds`, which it stops doing once; 0 when there is none."""
    lower, upper = 0, most + 1
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if holds(middle) else (lower, middle)
    return lower
