"""Small values that the tests of the vocabulary share, and strategies that draw legal ones."""

from __future__ import annotations

from hypothesis import strategies as st

from nereus.core import (
    EMU,
    Assignment,
    Candidate,
    Cluster,
    Device,
    DeviceKind,
    Head,
    Layout,
    Link,
    ModelSpec,
    ModelStage,
    Plan,
    Stage,
)

ACTOR_GENERATION = ModelStage("actor", Stage.GENERATION)
ACTOR_TRAINING = ModelStage("actor", Stage.TRAINING)
CRITIC_TRAINING = ModelStage("critic", Stage.TRAINING)
REWARD_INFERENCE = ModelStage("reward", Stage.INFERENCE)

SPEC = ModelSpec(
    family="llama", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn_hidden=128, vocab=16, head=Head.LM
)


def unit(*devices: int, tp: int = 1, pp: int = 1, model_stage: ModelStage = ACTOR_TRAINING) -> EMU:
    """A unit on `devices`."""
    return EMU(model_stage, Layout(tp, pp), devices)


def cluster(devices: int) -> Cluster:
    """`devices` equal devices, two to a node."""
    kind = DeviceKind("cpu", 1 << 20, {"fp32": 1e9}, 1e9)
    links = {"intra": Link(1e9, 1e-5), "inter": Link(1e8, 1e-4)}
    return Cluster(tuple(Device(i, i // 2, "cpu") for i in range(devices)), {"cpu": kind}, links)


def plan(**units: tuple[tuple[int, ...], ...]) -> Plan:
    """A plan of tp=1 units; keywords such as `actor_training` name the model-stages."""
    assignments = []
    for name, devices in units.items():
        stage = ModelStage.parse(name.replace("_", "/"))
        assignments.append(Assignment(Candidate(stage, Layout(tp=len(devices[0])), dp=len(devices)), devices))
    return Plan(tuple(assignments))


model_stages = st.builds(ModelStage, st.sampled_from(("actor", "critic", "my-model")), st.sampled_from(tuple(Stage)))
layouts = st.builds(Layout, st.integers(1, 4), st.integers(1, 3))


@st.composite
def assignments(draw: st.DrawFn, model_stage: st.SearchStrategy[ModelStage] = model_stages) -> Assignment:
    """A legal assignment on distinct devices, in any order."""
    layout, dp = draw(layouts), draw(st.integers(1, 3))
    devices = draw(st.permutations(range(layout.size * dp)))
    candidate = Candidate(
        draw(model_stage), layout, dp, draw(st.integers(1, 8)), draw(st.sampled_from(("none", "full")))
    )
    return Assignment(candidate, tuple(tuple(devices[i * layout.size : (i + 1) * layout.size]) for i in range(dp)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A legal plan of one to three model-stages."""
    stages = draw(st.lists(model_stages, min_size=1, max_size=3, unique=True))
    return Plan(tuple(draw(assignments(st.just(stage))) for stage in stages))
