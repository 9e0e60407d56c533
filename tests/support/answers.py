"""Files as `nereus plan --json` prints them, for plans that a test writes down."""

from __future__ import annotations

import json
from pathlib import Path

from nereus.core import Cluster, Plan, Workflow, Workload, codec


def write(path: Path, plan: Plan, workflow: Workflow, workload: Workload, cluster: Cluster) -> Path:
    """The parts of an answer that say what the plan is of."""
    nodes = [{"node": device.node, "kind": device.kind, "ids": str(device.id)} for device in cluster.devices]
    pool = {"nodes": nodes, "kinds": codec.encode(cluster.kinds), "links": codec.encode(cluster.links)}
    parts = {"plan": plan, "workflow": workflow, "workload": workload}
    data = {"schema": 1, "cluster": pool} | {name: codec.encode(value) for name, value in parts.items()}
    path.write_text(json.dumps(data))
    return path
