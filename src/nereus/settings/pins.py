"""From the `plan:` section to the job's capabilities. The planner, which knows the limits, checks pinned degrees."""

from __future__ import annotations

import difflib
import re

from nereus.core import Capabilities, Cluster, ModelStage, Pin, SettingsError, Workflow
from nereus.settings.models import family
from nereus.settings.schema import Settings

_PIN_PART = re.compile(r"(tp|pp|dp|mb)=?(\d+)")


def capabilities(settings: Settings, flow: Workflow) -> Capabilities:
    """What the planner may choose from. Raises SettingsError for unknown names and lists that allow nothing."""
    plan = settings.plan
    pins = {}
    for name, section in plan.pin.items():
        model_stage = _model_stage(name, flow)
        pins[model_stage] = Pin(**section.model_dump())
    _check_choices(settings, flow, pins)
    return Capabilities(
        tp=plan.tp,
        pp=plan.pp,
        micro_batches=plan.micro_batches,
        recompute=tuple(plan.recompute),
        uneven_shares=plan.batch != "exact",
        pins=pins,
    )


def _model_stage(name: str, flow: Workflow, where: str = "plan.pin") -> ModelStage:
    valid = [str(ms) for ms in flow.model_stages]
    if name not in valid:
        near = difflib.get_close_matches(name, valid, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"{where}: {name!r} is not a model-stage of this job, valid: {', '.join(valid)}{hint}")
    return ModelStage.parse(name)


def parse_pin(text: str, flow: Workflow) -> tuple[ModelStage, Pin]:
    """`actor/training=tp4,pp2,dp8,mb2`; degrees that are left out stay free. Raises SettingsError."""
    name, equals, rest = text.partition("=")
    parts = [_PIN_PART.fullmatch(part.strip()) for part in rest.split(",")]
    if not equals or not all(parts):
        raise SettingsError(f"--pin {text!r}: expected MODEL/STAGE=tp4,pp2,dp8,mb1 (any of tp, pp, dp, mb)")
    degrees: dict[str, int] = {}
    for part in parts:
        assert part is not None
        if part[1] in degrees:
            raise SettingsError(f"--pin {text!r}: {part[1]} is given twice")
        degrees[part[1]] = int(part[2])
    return _model_stage(name.strip(), flow, "--pin"), Pin(
        degrees.get("tp"), degrees.get("pp"), degrees.get("dp"), degrees.get("mb")
    )


def check_devices(settings: Settings, cluster: Cluster) -> None:
    """Raises SettingsError for a pin that needs more devices than the cluster or the pin itself has."""
    for name, pin in settings.plan.pin.items():
        check_pin_devices(f"plan.pin.{name}", Pin(**pin.model_dump()), cluster)


def check_pin_devices(where: str, pin: Pin, cluster: Cluster) -> None:
    """Raises SettingsError for a pin that needs more devices than the cluster or the pin itself has."""
    size = (pin.tp or 1) * (pin.pp or 1) * (pin.dp or 1)
    if size > len(cluster.ids):
        raise SettingsError(f"{where} needs {size} devices, the cluster never has more than {len(cluster.ids)}")
    if pin.devices is None:
        return
    if len(set(pin.devices)) != len(pin.devices):
        raise SettingsError(f"{where}.devices names a device twice: {list(pin.devices)}")
    if size > len(pin.devices):
        raise SettingsError(f"{where} needs {size} devices, it names {len(pin.devices)}")


def _check_choices(settings: Settings, flow: Workflow, pins: dict[ModelStage, Pin]) -> None:
    """Lists of degrees must leave every model-stage that is not pinned at least one."""
    for model_stage in flow.model_stages:
        spec, pin = flow.spec(model_stage), pins.get(model_stage, Pin())
        legal_tp = family(spec.family).legal_tp(spec)
        if settings.plan.tp and pin.tp is None and not set(settings.plan.tp) & set(legal_tp):
            raise SettingsError(
                f"plan.tp is {_join(settings.plan.tp)}: {model_stage} has {spec.heads} heads with {spec.kv_heads} KV "
                f"heads, valid degrees: {_join(legal_tp)}"
            )
        if settings.plan.pp and pin.pp is None and min(settings.plan.pp) > spec.layers:
            raise SettingsError(
                f"plan.pp is {_join(settings.plan.pp)}, all beyond the {spec.layers} layers of {model_stage}"
            )


def _join(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
