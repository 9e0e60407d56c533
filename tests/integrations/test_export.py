"""Plans in other frameworks' words, and back again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nereus.core import (
    Assignment,
    Candidate,
    Cluster,
    Device,
    DeviceKind,
    InfeasibleError,
    Layout,
    Lengths,
    Link,
    ModelSpec,
    ModelStage,
    Plan,
    SettingsError,
    Stage,
    Workflow,
    Workload,
    plugins,
)
from nereus.integrations import export, job, read_text, schema, stages
from nereus.integrations.imported import Part
from nereus.integrations.pinned import stage_layers
from tests.integrations import texts

SPEC = ModelSpec("llama", 12, 512, 16, 8, 32, 1024, 1000, dtype="bf16", max_positions=8192)
GENERATION, ACTOR = ModelStage("actor", Stage.GENERATION), ModelStage("actor", Stage.TRAINING)
REFERENCE, CRITIC = ModelStage("reference", Stage.INFERENCE), ModelStage("critic", Stage.TRAINING)
WORK = Workload(64, 4, Lengths.constant(256), Lengths.constant(512), 64, 512)


def pool(nodes: int, size: int) -> Cluster:
    kind = DeviceKind("gpu", 1 << 36, {"bf16": 1e15}, 1e12)
    devices = tuple(Device(i, i // size, "gpu") for i in range(nodes * size))
    link = Link(1e11, 1e-5)
    return Cluster(devices, {"gpu": kind}, {"intra": link, "inter": link})


def workflow(name: str, reward: bool = False) -> Workflow:
    made: Workflow = plugins.make("nereus.algorithms", name, {"reward_model": reward}).workflow(
        dict.fromkeys(("actor", "reference", "critic", "reward"), SPEC)
    )
    return made


def placed(candidate: Candidate, first: int = 0) -> Assignment:
    size = candidate.layout.size * candidate.cp
    units = tuple(tuple(range(first + i * size, first + (i + 1) * size)) for i in range(candidate.dp))
    return Assignment(candidate, units)


@st.composite
def plans(draw: st.DrawFn, megatron: bool, openrlhf: bool = False) -> tuple[Plan, Workflow, Workload, Cluster]:
    """A plan that the framework can run on whole nodes, colocated or with generation apart."""
    nodes, size = draw(st.sampled_from([(1, 4), (1, 8), (2, 8), (3, 4)]))
    apart = draw(st.sampled_from([0, 0, 1, 2]))
    cluster = pool(nodes + apart, size)
    devices = nodes * size
    flow = workflow(draw(st.sampled_from(["ppo", "grpo"])), reward=not openrlhf and draw(st.booleans()))
    updates = draw(st.sampled_from([1, 2]))
    work = replace(WORK, prompts=devices * 2 * updates, mini_batch=devices * 2 * WORK.samples_per_prompt)
    work = replace(work, packed=draw(st.booleans()), loss=draw(st.sampled_from(["eager", "fused"])))
    shared = draw(st.sampled_from([1, 2]))
    micro, recompute = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["none", "full"]))
    offload = draw(st.booleans())
    assignments = []
    for stage in flow.model_stages:
        if stage == GENERATION:
            held = apart * size if apart else devices
            tp = draw(st.sampled_from([degree for degree in (1, 2, 4) if held % degree == 0]))
            assignments.append(placed(Candidate(stage, Layout(tp), held // tp, 4), devices if apart else 0))
            continue
        tp, pp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 5]))) if megatron else (1, 1)
        assume(devices % (tp * pp * shared) == 0)
        if openrlhf and stage == REFERENCE:
            recomputed, small = "none", draw(st.sampled_from([1, 2]))
        else:
            recomputed, small = (recompute if flow.updated(stage) else "none"), micro
        zero = 1 if megatron else 3
        dp = devices // (tp * pp * shared)
        made = Candidate(
            stage, Layout(tp, pp), dp, small, recomputed, 0, offload, zero, shared, sequence_parallel=tp > 1
        )
        assignments.append(placed(made))
    assume(
        not megatron or any(a.candidate.layout.size > 1 for a in assignments if a.candidate.model_stage != GENERATION)
    )
    return Plan(tuple(assignments)), flow, work, cluster


def again(framework: str, lines: list[str], name: str, flow: Workflow, cluster: Cluster) -> job.ImportedJob:
    separator = " \\\n" if framework == "openrlhf" else "\n"
    text = ("x " if framework == "openrlhf" else "") + separator.join(lines)
    found = read_text(framework, text, name)
    return job.build(found, cluster, {role: flow.specs["actor"] for role in found.roles})


def same(one: Plan, other: Plan, *names: str) -> None:
    for assignment in one.assignments:
        before = assignment.candidate
        after = other.of(before.model_stage).candidate
        assert other.of(before.model_stage).devices == assignment.devices
        for name in names:
            assert getattr(after, name) == getattr(before, name), (str(before), name)
        layers = [[list(c.layout.layers_of(rank, 12)) for rank in range(c.layout.pp)] for c in (before, after)]
        assert layers[0] == layers[1]
        assert (after.layout.tp, after.layout.pp) == (before.layout.tp, before.layout.pp)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.data())
def test_a_plan_goes_to_verl_and_back(megatron: bool, data: st.DataObject) -> None:
    plan, flow, work, cluster = data.draw(plans(megatron))
    lines = export.overrides("verl", plan, flow, work, cluster)
    made = again("verl", lines, "overrides.txt", flow, cluster)
    assert made.plan is not None, made.unplaced
    same(plan, made.plan, "dp", "cp", "ep")
    trained = made.plan.of(ACTOR).candidate
    assert (trained.micro_batch, trained.recompute) == (
        plan.of(ACTOR).candidate.micro_batch,
        plan.of(ACTOR).candidate.recompute,
    )
    assert trained.offload == plan.of(ACTOR).candidate.offload
    # Without fused kernels verl's loss replaces logits by their gradient, which "eager" counts generously.
    own = "vocab_parallel" if trained.layout.size > 1 or trained.zero < 3 else "in_place"
    assert made.workload == replace(work, loss="fused" if work.loss == "fused" else own)
    assert set(made.workflow.model_stages) == set(flow.model_stages)


def exported(made: job.ImportedJob, framework: str = "verl") -> list[str]:
    assert made.plan is not None, made.unplaced
    return export.overrides(framework, made.plan, made.workflow, made.workload, made.cluster)


def test_verl_is_given_the_memory_that_generation_allocates() -> None:
    found = read_text("verl", texts.VERL, "run.sh")
    built = job.build(found, job.pool(found, "h100"), job.specs(found))
    lines = dict(line.split("=", 1) for line in exported(built))
    assert float(lines["actor_rollout_ref.rollout.gpu_memory_utilization"]) == pytest.approx(0.6, abs=2e-3)
    assert built.plan is not None
    engine = built.plan.of(GENERATION).candidate
    # Sequences that are shorter than the longest leave room for more: the cache is the bound, not their number.
    share = built.workload.sequences // engine.dp
    assert int(lines["actor_rollout_ref.rollout.max_num_seqs"]) == share
    larger = replace(engine, kv_bytes=2 * engine.kv_bytes)
    others = tuple(a for a in built.plan.assignments if a.candidate.model_stage != GENERATION)
    plan = replace(built.plan, assignments=(placed(larger), *others), partitions=())
    with pytest.raises(InfeasibleError, match=r"an engine takes at most 95%: plan with a smaller KV budget"):
        export.overrides("verl", plan, built.workflow, built.workload, built.cluster)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 8), (2, 4), (4, 8), (2, 2)])
def test_an_engines_experts_go_to_verl_and_back(tp: int, ep: int) -> None:
    spec = replace(SPEC, family="qwen3_moe", experts=16, experts_per_token=2, expert_hidden=256)
    cluster = pool(1, 8)
    engine = Candidate(GENERATION, Layout(tp), 8 // tp, 4, ep=ep)
    plan = Plan((placed(engine), placed(ZERO3), placed(replace(ZERO3, model_stage=REFERENCE, recompute="none"))))
    flow = plugins.make("nereus.algorithms", "grpo", {"reward_model": False}).workflow(
        dict.fromkeys(("actor", "reference"), spec)
    )
    made = again("verl", export.overrides("verl", plan, flow, WORK, cluster), "overrides.txt", flow, cluster)
    assert made.plan is not None, made.unplaced
    same(plan, made.plan, "dp", "ep")


def test_a_whole_reference_on_every_device_goes_to_verl_and_back() -> None:
    flow, cluster = workflow("grpo"), pool(1, 8)
    for zero in (0, 3):
        plan = one(ZERO3, Candidate(REFERENCE, Layout(), 8, zero=zero))
        made = again("verl", export.overrides("verl", plan, flow, WORK, cluster), "overrides.txt", flow, cluster)
        assert made.plan is not None, made.unplaced
        same(plan, made.plan, "zero")


def test_packed_micro_batches_are_budgets_of_tokens_in_verl() -> None:
    found = read_text("verl", texts.VERL, "run.sh")
    prompt, response = Lengths.constant(500), Lengths(1000, 2000, 3072)
    built = job.build(found, job.pool(found, "h100"), job.specs(found), prompt, response)
    lines = dict(line.split("=", 1) for line in exported(built))
    assert lines["actor_rollout_ref.actor.use_dynamic_bsz"] == "True"
    assert lines["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == str(500 + 3072)  # two on average are shorter
    assert lines["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"] == str(500 + 3072)


def test_a_critic_of_its_own_micro_batch_is_told_what_openrlhf_can_do() -> None:
    flow, work = workflow("ppo"), WORK
    assignments = [placed(Candidate(stage, Layout(), 8, 8, zero=3)) for stage in flow.model_stages]
    plan = Plan(tuple(
        replace(a, candidate=replace(a.candidate, micro_batch=4, recompute="full")) if a.candidate.model_stage == CRITIC
        else a
        for a in assignments
    ))  # fmt: skip
    with pytest.raises(InfeasibleError, match=r"the actor has 8 and none: .* micro-batch 4 with recompute full"):
        export.overrides("openrlhf", plan, flow, work, pool(1, 8))


@pytest.mark.parametrize("idle", [(), ("reference",), ("reward",), ("reference", "reward"), ("actor", "critic")])
def test_what_waits_in_host_memory_and_what_an_engine_takes_go_to_openrlhf_and_back(idle: tuple[str, ...]) -> None:
    flow = workflow("ppo", reward=True)
    assignments = [
        placed(
            Candidate(GENERATION, Layout(2), 4, 4, kv_bytes=1 << 33)
            if stage == GENERATION
            else Candidate(stage, Layout(), 8, 1, zero=3 if flow.updated(stage) else 0, offload=stage.model in idle)
        )
        for stage in flow.model_stages
    ]
    lines = export.overrides("openrlhf", Plan(tuple(assignments)), flow, WORK, pool(1, 8))
    made = again("openrlhf", lines, "train.sh", flow, pool(1, 8))
    assert made.plan is not None, made.unplaced
    for assignment in made.plan.assignments:
        stage = assignment.candidate.model_stage
        if stage == GENERATION:
            assert assignment.candidate.kv_bytes == pytest.approx(1 << 33, rel=0.02)
        elif "actor" not in idle:  # sleep is of every role at once
            assert assignment.candidate.offload == (stage.model in idle), str(assignment.candidate)
        elif stage.model in idle:
            assert assignment.candidate.offload


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_plan_goes_to_openrlhf_and_back(data: st.DataObject) -> None:
    plan, flow, work, cluster = data.draw(plans(False, openrlhf=True))
    colocated = {a.devices for a in plan.assignments if a.candidate.model_stage != GENERATION}
    apart = plan.of(GENERATION).devices not in colocated
    if apart and CRITIC in plan.model_stages:
        with pytest.raises(InfeasibleError, match="they share devices"):
            export.overrides("openrlhf", plan, flow, work, cluster)
        return
    lines = export.overrides("openrlhf", plan, flow, work, cluster)
    made = again("openrlhf", lines, "train.sh", flow, cluster)
    assert made.plan is not None, made.unplaced
    if not apart:
        same(plan, made.plan, "dp", "cp")
    for assignment in plan.assignments:
        stage = assignment.candidate.model_stage
        if stage != GENERATION:
            assert made.plan.of(stage).candidate.micro_batch == assignment.candidate.micro_batch
    assert made.plan.of(GENERATION).candidate.layout == plan.of(GENERATION).candidate.layout
    assert (made.workload.prompts, made.workload.mini_batch) == (work.prompts, work.mini_batch)
    assert made.workload.samples_per_prompt == work.samples_per_prompt
    assert made.workload.packed == (work.packed or plan.of(ACTOR).candidate.cp > 1)  # ring attention always packs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_stage_layers_go_to_megatron_and_back(counts: list[int]) -> None:
    assert stages.counts(stages.layout(counts)) == tuple(counts)
    ends = stages.ends(counts)
    if ends is not None and len(counts) > 1:
        part = Part(pp=len(counts), first_stage_layers=ends[0], last_stage_layers=ends[1])
        found = stage_layers(part, sum(counts))
        assert (found or tuple(counts)) == tuple(counts)
        assert found is not None or len(set(counts)) == 1


def test_flags_of_megatron() -> None:
    candidate = Candidate(ACTOR, Layout(2, 4, (2, 4, 4, 2)), 1, 2, "full", zero=1, sequence_parallel=True)
    plan = Plan((placed(candidate),))
    lines = export.overrides("megatron", plan, workflow("grpo"), WORK, pool(1, 8))
    assert lines[0] == "# actor/training: 1 nodes x 8 devices, dp 1"
    assert set(lines[1:]) == {
        "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--context-parallel-size 1",
        "--expert-model-parallel-size 1", "--decoder-first-pipeline-num-layers 2",
        "--decoder-last-pipeline-num-layers 2", "--sequence-parallel", "--use-distributed-optimizer",
        "--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1",
        "--micro-batch-size 2", "--global-batch-size 64",
    }  # fmt: skip


def test_flags_of_megatron_are_those_that_slime_reads() -> None:
    candidate = Candidate(ACTOR, Layout(2, 4, (5, 1, 3, 3)), 1, 2, "selective", zero=1, cp=1)
    lines = export.overrides("megatron", Plan((placed(candidate),)), workflow("grpo"), WORK, pool(1, 8))
    text = "x --colocate --rollout-batch-size 64 --n-samples-per-prompt 4 --actor-num-nodes 1 " + " ".join(lines[1:])
    part = read_text("slime", text.replace("|", "\\|").replace("*", "\\*"), "a.sh").actor
    assert (part.tp, part.pp, part.cp, part.ep, part.micro_batch, part.recompute) == (2, 4, 1, 1, 2, "selective")
    assert stages.counts(part.pipeline_layout or "") == (5, 1, 3, 3)


def one(candidate: Candidate, *others: Candidate, generation: int = 8) -> Plan:
    engines = placed(Candidate(GENERATION, Layout(2), generation // 2, 4))
    return Plan((engines, *(placed(c) for c in (candidate, *others))))


ZERO3 = Candidate(ACTOR, Layout(), 8, 1, "full", zero=3)


@pytest.mark.parametrize(
    ("framework", "plan", "reason"),
    [
        ("verl", one(replace(ZERO3, recompute="selective")), "whole layers or none"),
        ("verl", one(ZERO3, Candidate(REFERENCE, Layout(2), 4)), "is cut"),
        ("verl", one(ZERO3, Candidate(REFERENCE, Layout(), 4, zero=3)), "the same devices"),
        ("verl", one(ZERO3, generation=4), "all or none"),
        ("verl", Plan((placed(ZERO3),)), "it must both generate and train"),
        ("verl", one(replace(ZERO3, precision="fp8")), "precision fp8"),
        ("verl", Plan((placed(Candidate(GENERATION, Layout(2, 2), 2, 4)), placed(ZERO3))), "engines have no pipeline"),
        (
            "verl",
            Plan((placed(Candidate(GENERATION, Layout(4), 2, 4, ep=2)), placed(ZERO3))),
            "ep 2 must be tp 4 times",
        ),
        ("openrlhf", one(replace(ZERO3, layout=Layout(1, 2), dp=4)), "no pipeline"),
        ("openrlhf", one(replace(ZERO3, recompute="selective")), "whole layers or none"),
        ("openrlhf", one(ZERO3, generation=4), "they share devices"),
        ("megatron", one(ZERO3), "ZeRO-3"),
        ("megatron", one(replace(ZERO3, zero=1, micro_batch=3)), "does not divide a share of 8"),
        ("megatron", one(replace(ZERO3, layout=Layout(1, 4, (2, 3, 4, 3)), dp=2, zero=1, vpp=2)), "interleaved"),
    ],
)
def test_what_a_framework_cannot_run_is_refused(framework: str, plan: Plan, reason: str) -> None:
    with pytest.raises(InfeasibleError, match=reason) as error:
        export.overrides(framework, plan, workflow("grpo"), WORK, pool(1, 8))
    assert str(error.value).startswith(f"{framework} cannot run this plan")


@pytest.mark.parametrize("framework", export.FRAMEWORKS)
def test_shares_must_be_whole(framework: str) -> None:
    plan = one(replace(ZERO3, zero=1) if framework == "megatron" else ZERO3)
    with pytest.raises(InfeasibleError, match="dp 8 does not divide 60 sequences"):
        export.overrides(framework, plan, workflow("grpo"), replace(WORK, prompts=30, mini_batch=60), pool(1, 8))


def test_devices_of_unequal_nodes_are_refused() -> None:
    cluster = pool(3, 3)
    with pytest.raises(InfeasibleError, match="2 and 3 devices of different nodes"):
        export.overrides("verl", one(ZERO3), workflow("grpo"), WORK, cluster)


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(SettingsError, match="did you mean 'megatron'"):
        export.overrides("megatrn", one(ZERO3), workflow("grpo"), WORK, pool(1, 8))


@pytest.mark.parametrize("framework", export.FRAMEWORKS)
def test_every_key_is_one_that_the_installed_framework_has(framework: str) -> None:
    if schema.keys(framework) is None:
        pytest.skip(f"{framework} is not installed")
    cut = replace(ZERO3, layout=Layout(2, 2, (5, 7)), dp=2, zero=1, recompute="full", sequence_parallel=True)
    for actor in (cut, ZERO3) if framework == "verl" else (ZERO3,) if framework == "openrlhf" else (cut,):
        critic = replace(actor, model_stage=CRITIC)
        reference = replace(actor, model_stage=REFERENCE, recompute="none")
        lines = export.overrides(framework, one(actor, critic, reference), workflow("ppo"), WORK, pool(1, 8))
        assert export.unknown_keys(framework, lines) == ()


def test_keys_of_a_package_are_read_without_importing_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "openrlhf" / "cli"
    folder.mkdir(parents=True)
    (tmp_path / "openrlhf" / "__init__.py").write_text("raise RuntimeError")
    (folder / "train_ppo_ray.py").write_text('p.add_argument("--actor.num_nodes", type=int)\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ["# a comment", "--actor.num_nodes 1", "--actor.num_gpus 8"]
    assert export.unknown_keys("openrlhf", lines) == ("--actor.num_gpus",)


def test_a_context_that_the_configuration_gives_the_model_is_given_again() -> None:
    """Positions beyond the model's own are in the file; without them its sequences would be refused."""
    flow = workflow("grpo")
    work = replace(WORK, prompt=Lengths.constant(8192), response=Lengths.constant(1024), max_response_tokens=1024)
    cluster = pool(1, 4)
    plan = Plan(tuple(placed(Candidate(ms, Layout(1), 4, 1, zero=3 if ms == ACTOR else 0)) for ms in flow.model_stages))
    lines = export.overrides("verl", plan, flow, work, cluster)
    made = again("verl", lines, "overrides.txt", flow, cluster)
    assert made.workload.prompt.maximum + made.workload.response.maximum == 9216
    assert any("9216" in note and "8192" in note for note in made.notes)
