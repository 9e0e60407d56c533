"""slime's flags. Defaults: slime/utils/arguments.py (commit 624b824) and Megatron-LM's for its parallel degrees."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from nereus.integrations._keys import Keys
from nereus.integrations._tables import Table, degree, name, part, recompute, size, switch
from nereus.integrations.imported import Batch, Imported, MiniBatch, Refusal, RefusedImportError

ROOTS = (
    "--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-batch-size", "--rollout-num-gpus",
    "--rollout-num-gpus-per-engine", "--colocate", "--global-batch-size", "--n-samples-per-prompt", "--hf-checkpoint",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--advantage-estimator", "--max-tokens-per-gpu",
)  # fmt: skip

TRAINING: Table = {
    "tp": degree("--tensor-model-parallel-size", default=1),
    "pp": degree("--pipeline-model-parallel-size", default=1),
    "cp": degree("--context-parallel-size", default=1),
    "ep": degree("--expert-model-parallel-size", default=1),
    "expert_tp": degree("--expert-tensor-parallel-size"),
    "vpp": degree("--virtual-pipeline-model-parallel-size"),
    "first_stage_layers": degree("--decoder-first-pipeline-num-layers"),
    "last_stage_layers": degree("--decoder-last-pipeline-num-layers"),
    "pipeline_layout": name("--pipeline-model-parallel-layout"),
    "micro_batch": size("--micro-batch-size"),
    "tokens": size("--max-tokens-per-gpu"),
    "optimizer_offload": switch("--optimizer-cpu-offload"),
    "recompute": recompute("--recompute-granularity", default="none"),
}
ENGINE: Table = {
    "tp": degree("--rollout-num-gpus-per-engine", default=1),
    "dp": degree("--sglang-dp-size", "--sglang-data-parallel-size"),
    "ep": degree("--sglang-ep-size", "--sglang-expert-parallel-size"),
    "pp": degree("--sglang-pp-size"),
}


def imported(keys: Keys) -> Imported:
    """What a slime command line says."""
    nodes, per_node = _nodes(keys)
    if keys.has("--debug-train-only"):
        message = f"{keys.launch.name}: --debug-train-only is no RL step: nothing is generated"
        raise RefusedImportError(Refusal.NO_BATCH, message)
    training = nodes * per_node
    colocated = keys.has("--colocate")
    generating = training if colocated else _generating(keys)
    batch, notes = _batch(keys)
    reference = keys.has("--use-kl-loss") or bool(keys.number("--kl-coef"))
    algorithm = keys.text("--advantage-estimator", default="grpo", of="algorithm")
    actor = part(
        keys, TRAINING, "actor", backend="megatron", devices=training, zero=1,
        sequence_parallel=keys.has("--sequence-parallel"), dtype="bfloat16",
    )  # fmt: skip
    return Imported(
        framework="slime",
        algorithm=algorithm,
        models={"actor": model} if (model := keys.text("--hf-checkpoint")) else {},
        roles=("actor", *(("reference",) if reference else ()), *(("critic",) if algorithm == "ppo" else ())),
        nodes=nodes,
        devices_per_node=per_node,
        devices=training + (0 if colocated else generating or 0),
        colocated=colocated,
        actor=actor,
        rollout=part(keys, ENGINE, "rollout", backend="sglang", devices=generating),
        batch=batch,
        reference=replace(actor, param_offload=True) if reference else None,
        critic=actor if algorithm == "ppo" else None,
        kv_share=keys.number("--sglang-mem-fraction-static"),
        asynchronous=any(word.endswith("train_async.py") for word in keys.launch.words),
        context_tokens=keys.integer("--sglang-context-length", "--rollout-max-context-len", needed=False),
        idle_offload=colocated and not keys.has("--no-offload-train"),
        notes=(
            "mini_batch is --global-batch-size, in samples; rollout.tp is --rollout-num-gpus-per-engine",
            "the reference waits on the host",
            *notes,
        ),
    )


def _nodes(keys: Keys) -> tuple[int, int]:
    """Nodes that train, and devices of each."""
    nodes = keys.integer("--actor-num-nodes", default=1, of="nodes") or 0
    per_node = keys.integer("--actor-num-gpus-per-node", default=8, of="devices_per_node") or 0
    if nodes < 1 or per_node < 1:
        message = f"{keys.launch.name}: --actor-num-nodes {nodes}, --actor-num-gpus-per-node {per_node}: no devices"
        raise RefusedImportError(Refusal.NO_DEVICES, message)
    return nodes, per_node


def _generating(keys: Keys) -> int | None:
    """Devices of their own that generate; None where their number stays open."""
    found = keys.integer("--rollout-num-gpus", of="rollout.devices", needed=False)
    if found is None and not keys.has("--rollout-num-gpus"):
        message = f"{keys.launch.name}: without --colocate slime needs --rollout-num-gpus, the devices that generate"
        raise RefusedImportError(Refusal.NO_DEVICES, message)
    return found


def _batch(keys: Keys) -> tuple[Batch, tuple[str, ...]]:
    prompts = keys.integer("--rollout-batch-size")
    if prompts is None:
        raise RefusedImportError(
            Refusal.NO_BATCH, f"{keys.launch.name}: --rollout-batch-size is missing, slime requires it"
        )
    whole = keys.integer("--global-batch-size")
    steps = keys.integer("--num-steps-per-rollout")
    samples = keys.integer("--n-samples-per-prompt")
    notes: tuple[str, ...] = ()
    if samples is None:
        # slime's default is 1 and its own check is that the global batch divides prompts x samples.
        samples = whole // gcd(whole, prompts) if whole else 1
        if samples == 1:
            keys.defaults["batch.samples_per_prompt"] = "--n-samples-per-prompt=1"
        else:
            notes = (
                f"--n-samples-per-prompt is missing: {samples} is the fewest with which {prompts} prompts make a "
                f"--global-batch-size of {whole}",
            )
    batch = Batch(
        prompts=prompts,
        samples_per_prompt=samples,
        mini_batch=whole if whole is not None else (prompts * samples // steps if steps else None),
        mini_batch_unit=MiniBatch.SAMPLES,
        max_prompt_tokens=keys.integer("--rollout-max-prompt-len"),
        max_response_tokens=keys.integer("--rollout-max-response-len"),
        max_sequence_tokens=keys.integer("--rollout-max-context-len"),
        packed=keys.has("--use-dynamic-batch-size"),
        unpadded=True,
        loss="vocab_parallel",
    )
    return batch, notes
