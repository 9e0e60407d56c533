"""The YAML of a job, validated (the only pydantic)."""
