"""Megatron-LM: its training command's flags, for one trained model at a time."""
