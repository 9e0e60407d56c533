"""verl: Hydra overrides of `verl.trainer.main_ppo` and its recipes."""
