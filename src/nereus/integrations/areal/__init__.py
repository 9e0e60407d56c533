"""AReaL: YAML with an allocation of devices such as `sglang:d4+fsdp:d4`."""
