"""ROLL: YAML of its RLVR and agentic pipelines."""
