"""Launch configurations written for the tests, one for each framework."""

from __future__ import annotations

VERL = """#!/bin/bash
set -x
NNODES=${NNODES:-2}
train_tp=4
MODEL=$HOME/models/Qwen2.5-7B-Instruct
ARGS=(
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=$((1024 * 3))
    # data.train_batch_size=8
)

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \\
    algorithm.adv_estimator=grpo "${ARGS[@]}" \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${train_tp} \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    trainer.nnodes=$NNODES trainer.n_gpus_per_node=8 $@
"""

OPENRLHF = """ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
   --ref_num_nodes 1 --ref_num_gpus_per_node 4 --critic_num_nodes 1 --critic_num_gpus_per_node 4 \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 \\
   --colocate_actor_ref --pretrain meta-llama/Meta-Llama-3-8B --remote_rm_url http://localhost:5000 \\
   --micro_train_batch_size 4 --train_batch_size 128 --rollout_batch_size 512 --n_samples_per_prompt 1 \\
   --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --adam_offload --gradient_checkpointing
"""

NEMO_RL = """
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32}
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  train_global_batch_size: 512
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  precision: bfloat16
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
    expert_model_parallel_size: 1
    sequence_parallel: true
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    colocated: {enabled: false, resources: {gpus_per_node: 8, num_nodes: 1}}
    vllm_cfg: {tensor_parallel_size: 4, pipeline_parallel_size: 1, gpu_memory_utilization: 0.6}
data: {max_input_seq_length: 1024}
cluster: {gpus_per_node: 8, num_nodes: 3}
"""

SLIME = """SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/models/glm.sh"
PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 2
   --decoder-last-pipeline-num-layers 15
   --context-parallel-size 2
   --expert-model-parallel-size 8
   --recompute-granularity full
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
)
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py \\
   --actor-num-nodes 2 \\
   --actor-num-gpus-per-node 8 \\
   --colocate ${MODEL_ARGS[@]} \\
   --hf-checkpoint /root/Qwen3-30B-A3B \\
   --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 \\
   --global-batch-size 256 --advantage-estimator grpo --use-kl-loss \\
   --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 \\
   ${PERF_ARGS[@]}
"""

ROLL = """
num_gpus_per_node: 8
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
adv_estimator: reinforce
pretrain: Qwen/Qwen2.5-7B
actor_train:
  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 32}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, recompute_granularity: full}
  device_mapping: list(range(0,16))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}"}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, tensor_parallel_size: 2}}
  device_mapping: list(range(0,12))
reference:
  strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 1}}
  device_mapping: "list(range(0,8)) + [8, 9]"
"""

AREAL = """
cluster: {n_nodes: 2, n_gpus_per_node: 8}
allocation_mode: sglang:d4t2+megatron:(attn:d1p2t2c2|ffn:d1p2e4)
actor:
  path: Qwen/Qwen3-30B-A3B
  dtype: bfloat16
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 10240}
  ppo_n_minibatches: 4
  kl_ctl: 0.0
gconfig: {n_samples: 4, max_new_tokens: 1024}
train_dataset: {batch_size: 256, max_length: 1024}
sglang: {context_length: 32768, mem_fraction_static: 0.8}
rollout: {max_head_offpolicyness: 2}
"""
