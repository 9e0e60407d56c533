"""OpenRLHF: flags of `openrlhf.cli.train_ppo_ray`."""
