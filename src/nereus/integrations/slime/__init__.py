"""slime: flags of its `train.py`, Megatron's among them."""
