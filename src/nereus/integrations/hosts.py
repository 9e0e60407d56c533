"""What the trainers of other frameworks can be told to do: the capabilities that a plan for them stays inside."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from nereus.core import Capabilities, Pin, SettingsError, Stage, Workflow
from nereus.core.plan import RECOMPUTE

PLACED = {
    "colocated": "all roles take turns on the same devices",
    "disaggregated": "generation has devices of its own, the other roles take turns on the rest",
    "any": "roles share devices or have their own",
}
"""Who shares devices, in words."""
FLAT_ENGINES = ("verl", "openrlhf")
"""Frameworks whose generation engines have no pipeline."""
BACKENDS: Mapping[str, Mapping[str, int]] = {
    "verl": {"fsdp": 3, "megatron": 1},
    "openrlhf": {"deepspeed": 2},
    "nemo-rl": {"dtensor": 3, "megatron": 1},
    "slime": {"megatron": 1},
    "roll": {"megatron": 1, "fsdp2": 3},
    "areal": {"fsdp": 3, "megatron": 1},
}
"""What trains in each framework, its own default first, with the ZeRO level that it starts from."""
LEVELS: Mapping[str, tuple[int, ...]] = {
    "fsdp": (2, 3),
    "fsdp2": (2, 3),
    "deepspeed": (0, 1, 2, 3),
    "dtensor": (3,),
    "megatron": (0, 1),
}
"""ZeRO levels that a backend can be set to."""
NAMES = tuple(BACKENDS)


@dataclass(frozen=True, slots=True)
class Trainer:
    """A framework with what trains in it. Backends by any name that holds `megatron` or `dtensor` cut models."""

    framework: str
    backend: str
    zero: int

    @classmethod
    def parse(cls, text: str) -> Trainer:
        """Of `FRAMEWORK[:BACKEND]`. Raises SettingsError."""
        framework, colon, backend = text.partition(":")
        if framework not in BACKENDS:
            near = difflib.get_close_matches(framework, NAMES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingsError(f"--for {text!r}: framework {framework!r}, valid: {', '.join(NAMES)}{hint}")
        known = BACKENDS[framework]
        if colon and backend not in known:
            raise SettingsError(f"--for {text!r}: {framework} trains with {' or '.join(known)}, not {backend!r}")
        chosen = backend or next(iter(known))
        return cls(framework, chosen, known[chosen])

    @property
    def cuts(self) -> bool:
        """Whether it can cut a model inside a layer."""
        return "megatron" in self.backend or "dtensor" in self.backend

    def check(self, asked: Mapping[str, object]) -> None:
        """Raises SettingsError where fields of `Capabilities` that were asked for are more than it can be set to."""
        valid: dict[str, tuple[object, ...]] = {"zero": LEVELS[self.backend], "recompute": self._recompute}
        if "megatron" not in self.backend:
            valid["vpp"] = (1,)
        for name, choices in valid.items():
            values = asked.get(name, ())
            beyond = [value for value in values if value not in choices] if isinstance(values, tuple) else []
            if beyond:
                raise SettingsError(
                    f"--{name} {beyond[0]}: {self.framework} with {self.backend} can do {', '.join(map(str, choices))}"
                )

    @property
    def _recompute(self) -> tuple[str, ...]:
        return RECOMPUTE if self.cuts else ("none", "full")

    def capabilities(self, workflow: Workflow, placement: str, cp: int = 1, tp: int = 1) -> Capabilities:
        """FSDP and DeepSpeed shard, DTensor cuts by TP, Megatron by PP too; all of them offload.

        `cp` and `tp` are those of a file: what it asks for its host can do.
        """
        cut, stages = self.cuts, workflow.model_stages
        whole = [ms for ms in stages if ms.stage is not Stage.GENERATION]
        pins = {} if "megatron" in self.backend else {ms: Pin(tp=None if cut or tp > 1 else 1, pp=1) for ms in whole}
        if self.framework in FLAT_ENGINES:
            pins |= {ms: Pin(pp=1) for ms in stages if ms.stage is Stage.GENERATION}
        return Capabilities(
            recompute=self._recompute,
            zero=(self.zero,),
            expert_parallel=cut and workflow.specs["actor"].experts > 0,
            cp=tuple(sorted({1, cp})),
            sequence_parallel=cut,
            offload=True,
            uneven_shares=False,
            asynchronous=workflow.asynchronous,
            placement=placement,
            pins=pins,
        )


def limits(host: str, able: Capabilities) -> str:
    """What the search is limited to, in words."""
    trained = [pin for ms, pin in able.pins.items() if ms.stage is not Stage.GENERATION]
    words = [
        PLACED[able.placement],
        "no TP or PP where models train or infer" if any(pin.tp == 1 for pin in trained) else "",
        "no PP where models train or infer" if any(pin.tp is None for pin in trained) else "",
        "no PP in engines" if len(trained) < len(able.pins) else "",
        f"ZeRO {' or '.join(map(str, able.zero))}",
        f"CP {' or '.join(map(str, able.cp))}",
        "DP and micro-batches that divide the batch",
    ]
    return f"only what {host} runs is looked at: {'; '.join(filter(None, words))}"
