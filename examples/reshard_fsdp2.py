"""Moves an FSDP2 model and its Adam state from four ranks to two and back to four, on processes of this machine.

    python examples/reshard_fsdp2.py

Parameters and moments are DTensors before and after; the library sees their local tensors and which box of the whole
each one is. Sizes that the ranks do not divide leave uneven and empty shards. The ranks that leave give their shards
away, those that join get theirs, and training goes on as on ranks that never changed.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nereus.engine.library import (
    Options,
    Shard,
    describe,
    optimizer_shards,
    plan_routes,
    reshard,
    restore_optimizer,
    target_shards,
)
from nereus.engine.library.dtensor import local_shards, place_of, wrap
from nereus.engine.library.local import run_local

RANKS = 4
SIZES = (10, 6, 3, 7)
"""Widths of the layers: 6 rows on four ranks are 2, 2, 2, 0 and 3 rows are 1, 1, 1, 0."""
BATCH = 12


class Job:
    """An FSDP2 model and its optimizer on the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(5)
        self.mesh = mesh
        self.model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(SIZES)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.adam: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch: Tensor) -> float:
        """One update on this rank's part of a batch; the mean loss of the whole batch."""
        mine = batch.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        loss = (self.model(mine) ** 2).mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean, group=self.mesh.get_group())
        return float(mean / self.mesh.size())

    def whole(self) -> dict[str, Tensor]:
        """Every parameter and every state tensor, gathered."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = gathered(parameter)
            for key, value in self.adam.state.get(parameter, {}).items():
                found[f"{name}@{key}"] = gathered(value)
        return found

    def shards(self) -> dict[str, Shard]:
        """What this rank holds, as local tensors."""
        return local_shards(optimizer_shards(dict(self.model.named_parameters()), self.adam, place_of))


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a DTensor; another tensor as it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def change(old: Job | None, mesh: DeviceMesh) -> tuple[Job | None, int]:
    """The job on another mesh, on its ranks; and the bytes this rank received. Collective over all ranks of both."""
    before = {} if old is None else old.shards()
    tensors, source = describe(before)
    job = None if mesh.get_coordinate() is None else Job(mesh)
    parameters = {} if job is None else dict(job.model.named_parameters())
    after = local_shards(target_shards(parameters, tensors, place_of))
    _, target = describe(after)
    arrived = {name: shard.tensor for name, shard in after.items()}
    plan = plan_routes(tensors.values(), source, target)
    options = Options(timeout_s=30, verify=True)
    report = reshard(plan, {name: shard.tensor for name, shard in before.items()}, arrived, options=options)
    if job is not None:
        job.adam = restore_optimizer(torch.optim.AdamW, parameters, tensors, arrived, wrap)
    return job, report.received_bytes


def rank_main(_: int) -> list[tuple[int, int, float]]:
    """Two steps on four ranks, two on ranks 0 and 1, two on four; (tensors compared, bytes, loss error) each time."""
    batches = torch.randn(6, BATCH, SIZES[0], generator=torch.Generator().manual_seed(1))
    four = DeviceMesh("cpu", list(range(RANKS)))
    two = DeviceMesh("cpu", [0, 1])
    unchanged, job = Job(four), Job(four)
    found: list[tuple[int, int, float]] = []
    held: dict[str, Tensor] = {}
    current: Job | None = job
    for index, mesh in enumerate((four, two, four)):
        received = 0
        if index:
            held = {} if current is None else current.whole()
            current, received = change(current, mesh)
        compared = 0 if current is None else equal(current.whole(), held)
        error = 0.0
        for batch in batches[2 * index : 2 * index + 2]:
            wanted = unchanged.step(batch)
            if current is not None:
                error = max(error, abs(current.step(batch) - wanted) / wanted)
        if index:
            found.append((compared, received, error))
    return found


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> int:
    """The number of tensors that are equal bit for bit; all must be, where this rank knows what they were."""
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert not wanted or found.keys() == wanted.keys()
    return len(wanted)


def main() -> None:
    """Four ranks, two, four."""
    by_rank = run_local(RANKS, rank_main, timeout_s=90)
    for what, results in zip(("4 -> 2 ranks", "2 -> 4 ranks"), zip(*by_rank, strict=True), strict=True):
        compared, received = (sum(result[i] for result in results) for i in (0, 1))
        print(
            f"{what}: {compared} tensors equal bit for bit, {received:,} bytes moved, "
            f"loss differs by at most {max(error for *_, error in results):.1e} from ranks that never changed"
        )


if __name__ == "__main__":
    main()
