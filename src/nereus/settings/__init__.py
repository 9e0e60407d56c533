"""The YAML of a job: its schema, how it is read and overridden, and the values the rest of the project is given."""

from nereus.settings.build import (
    admission_rule,
    cluster_source,
    job_config,
    problem,
    recorders,
    specs,
    task,
    thresholds,
    trainable,
    workflow,
    workload,
)
from nereus.settings.schema import Settings
from nereus.settings.source import resolve

__all__ = [
    "Settings",
    "admission_rule",
    "cluster_source",
    "job_config",
    "problem",
    "recorders",
    "resolve",
    "specs",
    "task",
    "thresholds",
    "trainable",
    "workflow",
    "workload",
]
