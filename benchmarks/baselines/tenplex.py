"""Tenplex's own state transformer over its in-memory file server.

    build/tenplex/mlfsd, build/tenplex/tenplex-state-transformer        built from its public source (make tenplex)

Nothing of Tenplex is here: this writes the structure files that the transformer reads, uploads the state over HTTP, and
starts one transformer a target rank. One server plays all hosts, so the network is loopback. Its public code joins
shards in the random order of a map, so the tensors it gets wrong are counted.
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.transitions.ranks import WAIT_S, die_with_parent
from benchmarks.transitions.scenario import Scenario
from benchmarks.transitions.state import KINDS, Size, State, Tensor, Units, filled, wrong

PROGRAMS = Path(__file__).parents[2] / "build" / "tenplex"
HOST, PORT = "127.0.0.1", 20_010
TREE = "/job/0/{step}/{rank}/{path}.numpy.ndarray"

Entry = tuple[list[str], Tensor, str]
"""Key path, tensor, kind."""


class Side:
    """A server for each run, as what it has stored would weigh on the next. Writing to it counts, as saving does."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.server: subprocess.Popen[bytes] | None = None
        ranks = range(scenario.devices)
        self.state = {rank: filled(scenario.size, scenario.source, rank) for rank in ranks}
        self.folder = Path(tempfile.mkdtemp())
        for units in {scenario.source, scenario.target}:
            _write_structure(self.folder, scenario.size, units)

    def once(self) -> dict[str, Any]:
        """Upload from the source ranks, transform for all target ranks at once."""
        self._serve()
        began_s = time.perf_counter()
        connection = http.client.HTTPConnection(HOST, PORT, timeout=WAIT_S)
        for rank, state in self.state.items():
            for path, tensor, kind in _entries(self.scenario.size, self.scenario.source, rank):
                _upload(connection, TREE.format(step="a", rank=rank, path="/".join(path)), state[tensor.name, kind])
        uploaded_s = time.perf_counter() - began_s
        targets = [device for unit in self.scenario.target.devices for device in unit]
        started = [subprocess.Popen(self._command(rank), stdout=self.log, stderr=self.log) for rank in targets]
        try:
            codes = [process.wait(WAIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            last = Path(self.log.name).read_text(errors="replace").strip().splitlines()[-1]
            raise RuntimeError(f"its transformer ended with {codes}: {last[:200]}")
        return {"seconds": time.perf_counter() - began_s, "upload_s": uploaded_s}

    def wrong(self) -> list[str]:
        """What it would hand to the target ranks."""
        found = []
        connection = http.client.HTTPConnection(HOST, PORT, timeout=WAIT_S)
        for rank in (device for unit in self.scenario.target.devices for device in unit):
            state: State = {}
            for path, tensor, kind in _entries(self.scenario.size, self.scenario.target, rank):
                state[tensor.name, kind] = _download(connection, TREE.format(step="b", rank=rank, path="/".join(path)))
            found += wrong(state, self.scenario.size, self.scenario.target, rank)
        return found

    def rest(self) -> None:
        """The server goes, with all that it stores."""
        self._stop()

    def close(self) -> None:
        """End the server and remove the files."""
        self._stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self) -> None:
        self._stop()
        self.log = (self.folder / "log.txt").open("wb")
        command = [str(PROGRAMS / "mlfsd"), "-ctrl-port", str(PORT), "-host", HOST]
        self.server = subprocess.Popen(command, stdout=self.log, stderr=self.log, preexec_fn=die_with_parent)
        deadline_s = time.monotonic() + 10
        while True:
            try:
                http.client.HTTPConnection(HOST, PORT, timeout=1).connect()
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)

    def _stop(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.log.close()
            self.server = None

    def _command(self, rank: int) -> list[str]:
        size, source, target = self.scenario.size, self.scenario.source, self.scenario.target
        options = {
            "ckpt-struct-dir": self.folder,
            "source-pp-degree": source.pp,
            "target-pp-degree": target.pp,
            "source-mp-degree": source.tp,
            "target-mp-degree": target.tp,
            "source-size": sum(map(len, source.devices)),
            "target-size": sum(map(len, target.devices)),
            "precision": "fp32",
            "input-timestamp": "a",
            "output-timestamp": "b",
            "source-hosts": HOST,
            "target-hosts": HOST,
            "port": PORT,
            "gpus-per-host": 8,
            "mdp-library": "megatron-lm",
            "sequence-length": 1024,
            "jobid": 0,
            "num-layers": size.layers,
            "model": "gpt",
            "model-size": "bench",
            "vocab-size": size.vocab,
            "step": 1,
            "target-rank": rank,
        }
        words = [word for name, value in options.items() for word in (f"-{name}", str(value))]
        return [str(PROGRAMS / "tenplex-state-transformer"), *words]


def _entries(size: Size, units: Units, rank: int) -> list[Entry]:
    """What a rank has under Megatron's names: parameters, then the moments by the optimizer's numbers."""
    held = [tensor for tensor, _, _ in units.held(size, rank)]
    layers = [tensor.layer for tensor in held if tensor.layer is not None and tensor.layer >= 0]
    first = min(layers, default=0)
    found: list[Entry] = [(_key(tensor, first), tensor, "param") for tensor in held]
    numbered = sorted(held, key=lambda tensor: len(tensor.shape) == 1)
    for number, tensor in enumerate(numbered):
        found += [(["optimizer", "state", str(number), kind], tensor, kind) for kind in KINDS[1:]]
    return found


def _key(tensor: Tensor, first: int) -> list[str]:
    root = ["model", "language_model"]
    ends = {
        "embed": ["embedding", "word_embeddings", "weight"],
        "norm": ["encoder", "final_layernorm.weight"],
        "head": ["lm_head", "weight"],
    }
    if tensor.name in ends:
        return root + ends[tensor.name]
    _, layer, name = tensor.name.split(".")
    return [*root, "encoder", f"layers.{int(layer) - first}.{name}.weight"]


def _write_structure(folder: Path, size: Size, units: Units) -> None:
    copies = len(units.devices)
    degrees = f"pp{units.pp:02d}/mp{units.tp:02d}/dp{copies:02d}"
    here = folder / "megatron-lm" / "fp32" / "gpt" / "bench" / degrees
    ranks, keys = {}, {}
    for copy, unit in enumerate(units.devices):
        for rank in unit:
            pp_rank, tp_rank = units.at(rank) or (0, 0)
            ranks[rank] = {"pp_rank": pp_rank, "mp_rank": tp_rank, "dp_rank": copy}
            tree = _structure(size, units, rank)
            keys[rank] = [path for path, _, kind in _entries(size, units, rank) if kind == "param"]
            name = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if units.pp > 1 else "")
            (here / f"rank{rank:02d}").mkdir(parents=True, exist_ok=True)
            (here / f"rank{rank:02d}" / f"{name}.json").write_text(json.dumps(tree))
    (here / "rank_map.json").write_text(json.dumps(ranks))
    (here / "model_keys.json").write_text(json.dumps(keys))


def _structure(size: Size, units: Units, rank: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    held = {tensor.name: (start, stop) for tensor, start, stop in units.held(size, rank)}
    for path, tensor, _ in _entries(size, units, rank):
        shape = list(tensor.shape)
        if tensor.dim is not None:
            shape[tensor.dim] = held[tensor.name][1] - held[tensor.name][0]
        at = tree
        for each in path[:-1]:
            at = at.setdefault(each, {})
        at[path[-1]] = {"tensor": shape}
    tensors = [tensor for tensor, _, _ in units.held(size, rank)]
    decayed = sum(len(tensor.shape) > 1 for tensor in tensors)
    groups = [list(range(decayed)), list(range(decayed, len(tensors)))]
    tree["optimizer"]["param_groups"] = [{"params": group} for group in groups]
    return tree


def _upload(connection: http.client.HTTPConnection, path: str, part: torch.Tensor) -> None:
    array = np.ascontiguousarray(part.numpy())
    query = urllib.parse.urlencode({"path": path, "dtype": str(array.dtype), "dims": ",".join(map(str, array.shape))})
    body = array.reshape(-1).view(np.uint8).tobytes()
    connection.request("POST", "/upload?" + query, body=body, headers={"Content-Type": "x-tensor"})
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"upload of {path}: HTTP {answer.status}")


def _download(connection: http.client.HTTPConnection, path: str) -> torch.Tensor:
    query = urllib.parse.urlencode({"path": path})
    connection.request("GET", "/query?" + query, headers={"Content-Type": "x-tensor"})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"query of {path}: HTTP {answer.status}")
    dims = [int(each) for each in answer.headers["x-tensor-dims"].split(",")]
    return torch.frombuffer(bytearray(body), dtype=torch.float32).reshape(dims)
