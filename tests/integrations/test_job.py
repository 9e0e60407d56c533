"""From a configuration to a planning problem and its own plan: batches, lengths, devices, what is legal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nereus.clusters.named import machine
from nereus.core import InfeasibleError, Lengths, ModelStage, SettingsError, Work
from nereus.integrations import Imported, Refusal, RefusedImportError, batch, job, read_text
from nereus.integrations.imported import Batch, MiniBatch, Part
from nereus.planning.judge import misfit
from nereus.planning.problem import Problem
from tests.integrations import texts

GENERATION, TRAINING = ModelStage.parse("actor/generation"), ModelStage.parse("actor/training")
REFERENCE = ModelStage.parse("reference/inference")


def built(found: Imported, kind: str = "h100", **given: object) -> job.ImportedJob:
    return job.build(found, job.pool(found, kind), job.specs(found), **given)  # type: ignore[arg-type]


def small(**changes: object) -> Imported:
    """Eight colocated devices, FSDP."""
    base = Imported(
        framework="verl", algorithm="grpo", models={"actor": "Qwen/Qwen2.5-7B"}, roles=("actor", "reference"), nodes=1,
        devices_per_node=8, devices=8, colocated=True, actor=Part(devices=8, zero=3, micro_batch=1, recompute="full"),
        rollout=Part(devices=8, tp=2), reference=Part(devices=8, zero=3),
        batch=Batch(64, 4, 16, MiniBatch.PROMPTS, max_prompt_tokens=512, max_response_tokens=512),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_verl_job() -> None:
    made = built(read_text("verl", texts.VERL, "run.sh"))
    assert [call.name for call in made.workflow.calls] == [
        "generate",
        "reference_log_probs",
        "old_log_probs",
        "update_actor",
    ]
    assert (made.workload.sequences, made.workload.mini_batch, made.workload.updates) == (2048, 512, 4)
    assert made.plan is not None
    training = made.plan.of(TRAINING)
    assert (training.candidate.layout.tp, training.candidate.layout.pp, training.candidate.dp) == (4, 2, 2)
    assert training.units == (tuple(range(8)), tuple(range(8, 16)))
    assert (training.candidate.micro_batch, training.candidate.recompute) == (2, "full")
    assert made.plan.of(GENERATION).candidate.dp == 8
    assert len(made.plan.partitions) == 1
    assert any("rollout.tp: taken from verl's default" in line for line in made.assumptions)


def test_a_value_that_nothing_sets_is_said_to_be_left_out() -> None:
    text = texts.VERL.replace("$@\n", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$MICRO")
    (line,) = (line for line in built(read_text("verl", text, "run.sh")).assumptions if "MICRO" in line)
    assert re.search(r"run.sh line \d+: .*ppo_micro_batch_size_per_gpu=\$\{MICRO\} is as if not given", line)


def test_a_dtype_is_the_files_or_assumed_aloud_never_guessed() -> None:
    assert any("the file names no dtype" in line for line in built(small()).assumptions)
    half = small(actor=replace(small().actor, dtype="float16"))
    assert job.specs(half)["actor"].dtype == "fp16"
    assert not any("no dtype" in line for line in built(half).assumptions)
    with pytest.raises(RefusedImportError, match=r"dtype 'int8', valid: bfloat16, .*fp32") as refused:
        job.specs(small(actor=replace(small().actor, dtype="int8")))
    assert refused.value.reason is Refusal.INVALID


def test_disjoint_devices_make_two_partitions() -> None:
    made = built(read_text("nemo-rl", texts.NEMO_RL, "grpo.yaml"))
    assert made.plan is not None
    assert made.plan.of(TRAINING).devices == frozenset(range(16))
    assert made.plan.of(GENERATION).devices == frozenset(range(16, 24))
    assert [len(partition.devices) for partition in made.plan.partitions] == [8, 16]


def test_listed_devices_are_kept() -> None:
    made = built(read_text("roll", texts.ROLL, "rlvr.yaml"))
    assert made.plan is not None
    assert made.plan.of(GENERATION).devices == frozenset(range(12))
    assert made.plan.of(REFERENCE).devices == frozenset(range(10))
    # 1 sequence x 32 accumulated x 8 replicas
    assert made.workload.mini_batch == 256


def test_a_streaming_job_updates_after_the_prompts_it_waits_for() -> None:
    made = built(small(batch=replace(small().batch, prompts=0, stream_prompts=32)))
    assert made.workload.prompts == 32


@pytest.mark.parametrize(
    ("unit", "mini_batch", "expected"),
    [
        (MiniBatch.PROMPTS, 16, 64),
        (MiniBatch.SAMPLES, 32, 32),
        (MiniBatch.UPDATES, 4, 64),
        (MiniBatch.ACCUMULATION, 4, 32),  # 1 x 4 x 8 replicas
        (MiniBatch.PROMPTS, 128, 256),  # more than the batch: one update
        (MiniBatch.SAMPLES, 48, 32),  # the next that divides 256
    ],
)
def test_what_a_mini_batch_counts(unit: MiniBatch, mini_batch: int, expected: int) -> None:
    found = small(batch=replace(small().batch, mini_batch=mini_batch, mini_batch_unit=unit))
    assert built(found).workload.mini_batch == expected


def test_trajectories_count_as_responses() -> None:
    found = small(batch=replace(small().batch, prompts=64, samples_per_prompt=8, prompts_are_samples=True))
    assert batch.step(found).prompts == 8


def test_prompt_and_response_beyond_the_context_are_refused_at_import() -> None:
    found = small(models={"actor": "Qwen/Qwen2.5-Math-7B"})  # a context of 4,096
    ends = replace(found.batch, max_prompt_tokens=1024, max_response_tokens=4000)
    with pytest.raises(SettingsError, match=r"1024 \+ response 4000 .* context of 4096"):
        built(replace(found, batch=ends))
    longer = built(replace(found, batch=ends, context_tokens=8192))
    assert any("context of 8192" in note for note in longer.notes)


def test_a_pool_that_is_too_small_names_both_numbers() -> None:
    found = read_text("verl", texts.VERL, "run.sh")
    for nodes, size in ((1, 8), (1, 7)):
        cluster = machine(f"h100x{size}", nodes)
        with pytest.raises(InfeasibleError, match=rf"16 devices \(2 nodes x 8\), there are {size}"):
            job.build(found, cluster, job.specs(found))


def test_uneven_stages_are_accepted_and_explained() -> None:
    found = small(models={"actor": "deepseek-ai/DeepSeek-V3"}, nodes=16, devices=128, actor=Part(devices=128, pp=16))
    made = built(replace(found, rollout=Part(devices=128, tp=32)), "h200")
    assert made.plan is not None
    counts = [len(made.plan.of(TRAINING).candidate.layout.layers_of(rank, 61)) for rank in range(16)]
    assert sum(counts) == 61
    assert any("61 layers on pp 16: stages of 4" in note for note in made.notes)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part(pp=4, first_stage_layers=4), (4, 8, 8, 8)),
        (Part(pp=4, last_stage_layers=4), (8, 8, 8, 4)),
        (Part(pp=4, first_stage_layers=6, last_stage_layers=6), (6, 8, 8, 6)),
        (Part(pp=4, pipeline_layout="Et*7|t*7|t*7|t*7L"), (7, 7, 7, 7)),
        (Part(pp=2, vpp=2, pipeline_layout="Ettt|(t*8|)*2t*9L"), (11, 17)),
    ],
)
def test_stages_as_the_file_gives_them(part: Part, expected: tuple[int, ...]) -> None:
    found = small(actor=replace(part, devices=8, micro_batch=1))
    made = built(found)
    assert made.plan is not None
    assert made.plan.of(TRAINING).candidate.layout.stage_layers == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout": Part(devices=8, tp=8)}, "28 heads on tp 8: valid TP 1, 2, 4"),
        ({"actor": Part(devices=8, tp=4, pp=4)}, "needs 16 devices, it has 8"),
        ({"actor": Part(devices=8, pp=8, first_stage_layers=27)}, "leave 1 of 28 for 7 more"),
        ({"kv_share": 0.05}, "leaves 0 bytes"),
    ],
)
def test_a_configuration_that_cannot_run_says_why(changes: dict[str, object], reason: str) -> None:
    made = built(small(**changes))
    assert made.plan is None
    assert reason in made.unplaced


def test_experts_are_cut_by_one_rule() -> None:
    found = small(models={"actor": "Qwen/Qwen3-30B-A3B"}, actor=Part(devices=4, tp=4, ep=48), devices=8)
    assert "ep 48 must divide dp * cp * tp = 1 * 1 * 4 = 4 and the 128 experts" in built(found).unplaced
    fine = built(small(models={"actor": "Qwen/Qwen3-30B-A3B"}, actor=Part(devices=8, tp=4, ep=8)))
    assert fine.plan is not None
    assert fine.plan.of(TRAINING).candidate.ep == 8


@pytest.mark.parametrize(("expert_tp", "ep", "noted"), [(None, 8, 0), (1, 8, 0), (4, 8, 1), (4, 1, 0), (1, 1, 1)])
def test_a_cut_inside_experts_that_is_not_planned_is_noted(expert_tp: int | None, ep: int, noted: int) -> None:
    part = Part(devices=8, tp=4, ep=ep, expert_tp=expert_tp)
    made = built(small(models={"actor": "Qwen/Qwen3-30B-A3B"}, actor=part))
    assert sum(f"TP of {expert_tp} inside experts is not planned" in note for note in made.notes) == noted


@pytest.mark.parametrize(
    ("algorithm", "planned"),
    [("rloo", "grpo"), ("reinforce_plus_plus", "grpo"), ("dapo", "grpo"), ("GRPO", ""), ("group_norm", ""),
     ("gae", "grpo"), ("remax", ""), (None, "")],
)  # fmt: skip
def test_an_algorithm_planned_as_another_is_an_assumption(algorithm: str | None, planned: str) -> None:
    made = built(small(algorithm=algorithm))
    said = [line for line in made.assumptions if line.startswith("algorithm")]
    assert len(said) == bool(planned)
    assert all(f"{algorithm!r} is planned as {planned}:" in line for line in said)


def test_resampling_that_is_not_planned_is_noted() -> None:
    for extra, noted in (("", False), (" algorithm.filter_groups.enable=True", True)):
        found = read_text("verl", texts.VERL.rstrip() + extra, "run.sh")
        assert any("filter_groups" in note for note in found.notes) == noted


def test_with_experts_an_imported_layout_has_its_replicas_side_by_side() -> None:
    made = built(small(models={"actor": "Qwen/Qwen3-30B-A3B"}, actor=Part(devices=8, tp=1, pp=2, ep=4)))
    assert made.plan is not None
    assert made.plan.of(TRAINING).units == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_fewer_kv_heads_than_tp_ranks_are_replicated() -> None:
    made = built(small(models={"actor": "Qwen/Qwen3-30B-A3B"}, rollout=Part(devices=8, tp=8)))
    assert made.plan is not None
    assert any("4 KV heads on tp 8: they are replicated" in note for note in made.notes)


def test_devices_that_no_unit_takes_are_named() -> None:
    made = built(small(actor=Part(devices=8, tp=1, pp=3)))
    assert made.plan is not None
    assert len(made.plan.of(TRAINING).devices) == 6
    assert any("8 devices are no multiple of 3: 2 stay idle" in note for note in made.notes)


@pytest.mark.parametrize(
    ("prompts", "samples", "part", "parts"),
    [
        (256, 1, Part(devices=7), ["dp 7 does not divide", "256", "4 and 8"]),
        (64, 1, Part(devices=32, micro_batch=16), ["micro-batch 16 is larger", "64 / 32 = 2 < 16"]),
        (4, 1, Part(devices=8), ["mini-batch of 4", "dp 8", "is 0"]),
        (1024, 1, Part(devices=12), ["dp 12 does not divide", "1024", "8 and 16"]),
        (16, 1, Part(devices=3, micro_batch=4), ["dp 3 does not divide", "16", "2 and 4"]),
        (64, 1, Part(devices=8, micro_batch=3), ["micro-batch 3 does not divide a replica's share of 8"]),
    ],
)
def test_exact_batches_refuse_what_does_not_divide(prompts: int, samples: int, part: Part, parts: list[str]) -> None:
    devices = part.devices or 8
    whole = Batch(prompts, samples, prompts, MiniBatch.PROMPTS, max_prompt_tokens=64, max_response_tokens=64)
    found = small(batch=whole, actor=part, rollout=Part(devices=devices), devices=devices, nodes=None, reference=None)
    with pytest.raises(SettingsError) as error:
        built(found, exact=True)
    assert all(text in str(error.value) for text in ("batch: exact", *parts)), str(error.value)
    made = built(found)  # without it the same shares are legal, and said
    assert made.workload.sequences == prompts
    assert any(parts[0] in note for note in made.notes)


def test_a_mini_batch_of_no_sequence_is_refused() -> None:
    found = small(batch=replace(small().batch, mini_batch=1000, mini_batch_unit=MiniBatch.UPDATES))
    with pytest.raises(RefusedImportError, match="holds no sequence"):
        built(found)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("data.train_batch_size=0", "is 0, which only a job with devices that only generate may say"),
        ("data.train_batch_size=64 algorithm.adv_estimator=1.5", "is no name, such as gae"),
    ],
)
def test_values_that_name_no_verl_job_are_refused(said: str, message: str) -> None:
    with pytest.raises(RefusedImportError, match=message) as refused:
        read_text("verl", f"python3 -m verl.trainer.main_ppo {said} trainer.nnodes=1", "run.sh")
    assert refused.value.reason is Refusal.INVALID


def test_token_budgets_become_micro_batches() -> None:
    packed = replace(small().batch, packed=True)
    made = built(small(batch=packed, actor=Part(devices=8, zero=3, sp=2, tokens=4096, micro_batch=1)))
    assert made.plan is not None
    candidate = made.plan.of(TRAINING).candidate
    assert (candidate.cp, candidate.dp, candidate.micro_batch) == (2, 4, 8)  # 2 x 4096 tokens, 1024 a sequence


NEMO = texts.NEMO_RL.replace("train_micro_batch_size: 1", "train_micro_batch_size: 2")
PADDED = texts.VERL.replace("rollout.n=8", "rollout.n=8 actor_rollout_ref.model.use_remove_padding=False")


@pytest.mark.parametrize(
    ("framework", "text", "packed"),
    [
        ("verl", texts.VERL, True),  # its default
        ("verl", PADDED, False),
        ("nemo-rl", texts.NEMO_RL, False),
        ("nemo-rl", NEMO.replace("  precision", "  sequence_packing: {enabled: true}\n  precision", 1), True),
        ("nemo-rl", NEMO.replace("  precision", "  dynamic_batching: {enabled: true}\n  precision", 1), True),
        ("slime", texts.SLIME, True),
        ("areal", texts.AREAL, True),
        ("roll", texts.ROLL, False),
        ("roll", texts.ROLL.replace("actor_train:", "actor_train:\n  use_sequence_packing: true"), True),
        ("roll", texts.ROLL.replace("actor_train:", "actor_train:\n  use_dynamic_batching_in_train: true"), True),
        ("openrlhf", texts.OPENRLHF, False),
        ("openrlhf", texts.OPENRLHF.rstrip() + " --packing_samples", True),
        ("openrlhf", texts.OPENRLHF.rstrip() + " --use_dynamic_batch", True),
        ("openrlhf", texts.OPENRLHF.rstrip() + " --ring_attn_size 2", True),
    ],
)
def test_who_packs_micro_batches(framework: str, text: str, packed: bool) -> None:
    made = built(read_text(framework, text, "a"))
    assert made.workload.packed is packed
    assert any(("packed" if packed else "padded to the longest") in line for line in made.assumptions)


FSDP = texts.VERL.replace("--config-name=ppo_megatron_trainer.yaml", "").replace("actor.megatron.", "actor.other.")


@pytest.mark.parametrize(
    ("more", "loss"),
    [
        ("", "in_place"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "fused"),
        ("actor_rollout_ref.actor.entropy_from_logits_with_chunking=True", "in_place_chunked"),
        ("actor_rollout_ref.actor.entropy_coeff=0.001", "eager"),
        ("actor_rollout_ref.actor.strategy=megatron", "vocab_parallel"),
    ],
)
def test_copies_of_logits_are_those_of_the_loss(more: str, loss: str) -> None:
    made = built(read_text("verl", FSDP.replace("rollout.n=8", f"rollout.n=8 {more}"), "run.sh"))
    assert made.workload.loss == loss
    assert sum("logits" in line for line in made.assumptions) == 1


def test_a_packed_micro_batch_of_nemo_rl_has_room_for_so_many_of_the_greatest_length() -> None:
    text = NEMO.replace("  precision", "  sequence_packing: {enabled: true}\n  precision", 1)
    made = built(read_text("nemo-rl", text, "a"), prompt=Lengths.constant(100), response=Lengths(400, 900, 2000))
    assert made.plan is not None
    assert made.plan.of(TRAINING).candidate.micro_batch == 2 * 4096 // 500


def test_lengths_that_are_given_replace_what_is_assumed() -> None:
    made = built(small(), response=Lengths(100, 200, 300))
    assert made.workload.response.mean == 100
    assert not any("every response" in line for line in made.assumptions)
    assert any("every prompt has 512 tokens" in line for line in made.assumptions)


def test_lengths_share_the_bound_of_a_sequence() -> None:
    whole = replace(small().batch, max_prompt_tokens=4096, max_response_tokens=4096, max_sequence_tokens=4096)
    made = built(small(batch=whole))
    assert made.workload.prompt.maximum + made.workload.response.maximum == 4096
    with pytest.raises(SettingsError, match="allows 4096 together"):
        built(small(batch=whole), prompt=Lengths.constant(3000), response=Lengths.constant(3000))


def test_no_model_is_a_refusal_and_one_can_be_given() -> None:
    found = small(models={})
    with pytest.raises(RefusedImportError) as error:
        job.specs(found)
    assert error.value.reason is Refusal.NO_MODEL
    assert job.specs(found, {"actor": "Qwen/Qwen3-8B"})["reference"].layers == 36


def test_an_unknown_model_is_named_with_its_role_and_a_known_one_inside_a_path_is_found() -> None:
    with pytest.raises(SettingsError, match="actor: model 'my-own-net' is unknown"):
        job.specs(small(models={"actor": "my-own-net"}))
    found = small(models={"actor": "sft-qwen2.5-7b-math/global_step_300"})
    assert job.specs(found)["actor"].layers == 28
    assert any("sizes of Qwen/Qwen2.5-7B" in line for line in built(found).assumptions)


def test_roles_decide_the_calls() -> None:
    plain = built(small(roles=("actor",), reference=None)).workflow
    assert {call.name for call in plain.calls} == {"generate", "old_log_probs", "update_actor"}
    ppo = built(small(roles=("actor", "reference", "critic", "reward"), critic=Part(devices=8), reward=Part(devices=8)))
    assert {str(ms) for ms in ppo.workflow.model_stages} == {
        "actor/generation", "actor/training", "critic/training", "reference/inference", "reward/inference",
    }  # fmt: skip
    assert ppo.workflow.call("update_actor").work is Work.UPDATE
    assert built(small(asynchronous=True)).workflow.asynchronous


def test_idle_state_that_stays_on_a_full_device_refuses_the_plan() -> None:
    """A colocated engine with 0.6 of the device wakes beside an optimizer that was not moved away."""
    found = small(kv_share=0.6, devices=2, actor=Part(devices=2, zero=3, micro_batch=1, recompute="full"))
    found = replace(
        found, rollout=Part(devices=2, tp=2), reference=Part(devices=2, zero=3), nodes=1, devices_per_node=2
    )
    made = built(found, "a100-80")
    assert made.plan is not None
    problem = Problem(made.workflow, made.workload, made.cluster, made.capabilities)
    assert misfit(problem, problem.model(), made.plan) is not None


def test_no_responses_make_no_batch() -> None:
    with pytest.raises(RefusedImportError, match="64 prompts with 0 responses each") as caught:
        batch.step(small(batch=replace(small().batch, samples_per_prompt=0)))
    assert caught.value.reason is Refusal.NO_BATCH


def test_machines_follow_the_configuration() -> None:
    found = read_text("verl", texts.VERL, "run.sh")
    assert len(job.pool(found, "h100").devices) == 16
    assert len(job.pool(found, "h200x4").devices) == 16
    assert len(job.pool(found, "h100", nodes=4).devices) == 32
    assert len(job.pool(replace(found, devices_per_node=16), "h100").devices) == 16


def test_an_engine_in_fp8_is_priced_so_in_every_plan() -> None:
    of = built(small(rollout=replace(small().rollout, dtype="fp8")))
    assert (of.workflow.precision(GENERATION), of.workflow.precision(TRAINING)) == ("fp8", "bf16")
    assert built(small()).workflow.precision(GENERATION) == "bf16"


def test_a_machine_is_what_the_framework_makes_of_it() -> None:
    of = built(read_text("nemo-rl", texts.NEMO_RL, "job.yaml"))
    (kind,) = of.cluster.kinds.values()
    assert kind.host_bytes_per_s < machine("h100").kinds["h100"].host_bytes_per_s
    assert any("pageable" in line for line in of.assumptions)


@pytest.mark.parametrize(("framework", "told"), [("openrlhf", True), ("verl", False)])
def test_an_optimizer_that_steps_on_the_host_is_told_of(framework: str, told: bool) -> None:
    """DeepSpeed's offloaded Adam never comes back; verl loads the optimizer for its step, as is counted."""
    base = small(framework=framework)
    found = replace(base, actor=replace(base.actor, optimizer_offload=True))
    assert any("steps on the host" in note for note in built(found).notes) is told


def test_a_host_can_do_what_its_file_asks_of_it() -> None:
    """DeepSpeed and FSDP cut models by TP only where a file says so."""
    for tp, fixed in ((None, 1), (1, 1), (2, None)):
        made = built(small(framework="openrlhf", actor=Part(devices=8, zero=2, micro_batch=1, tp=tp)))
        assert made.capabilities.pin(TRAINING).tp == fixed
        assert made.capabilities.pin(TRAINING).pp == 1
        (words,) = (line for line in made.assumptions if "is looked at" in line)
        assert ("no TP or PP where models train" in words) == (fixed == 1)
