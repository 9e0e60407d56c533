"""NeMo RL: YAML of its GRPO and PPO examples."""
