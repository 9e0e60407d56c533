"""Moves a plain torch module and its Adam state from TP2,PP2 to TP4, on four processes of this machine.

    python examples/reshard_module.py

The module is cut by hand; the library is told which box of which tensor each rank holds, and nothing else. Afterwards
every parameter, moment and step counter equals, bit for bit, the cut of a module that was never sharded, and so it does
after one more step of the optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nereus.engine.library import (
    LogicalTensor,
    Options,
    Region,
    describe,
    optimizer_shards,
    place_positions,
    plan_routes,
    reshard,
    restore_optimizer,
    target_shards,
)
from nereus.engine.library.local import run_local

LAYERS, HIDDEN, WIDE = 4, 64, 256
RANKS = 4
CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""The dim that tensor parallelism cuts; other tensors are whole on each tp rank."""

Layout = tuple[int, int]
"""TP and PP degrees."""


class Block(nn.Module):
    """One layer; `wide` is this rank's part of the inner width."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, wide)
        self.down = nn.Linear(wide, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stage(layers: range, tp: int) -> dict[str, nn.Parameter]:
    """Parameters of some layers as one rank stores them, by global names."""
    blocks = {layer: Block(WIDE // tp) for layer in layers}
    return {f"{layer}.{name}": p for layer, block in blocks.items() for name, p in block.named_parameters()}


def layers_of(layout: Layout, position: int) -> range:
    """The layers of a position; positions count tp ranks first."""
    each = LAYERS // layout[1]
    first = position // layout[0] * each
    return range(first, first + each)


def box(name: str, shape: tuple[int, ...], layout: Layout, position: int) -> Region:
    """The part of a tensor that a position holds."""
    dim = CUTS.get(name.split(".", 1)[1])
    return Region.whole(shape) if dim is None else Region.chunk(shape, dim, layout[0], position % layout[0])


class Reference:
    """The module that is never sharded. Every process has the same one: its gradients are what a real job reduces."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(WIDE) for _ in range(LAYERS))
        self.named = dict(self.blocks.named_parameters())
        self.adam = torch.optim.AdamW(self.named.values(), lr=1e-2, weight_decay=0.1)
        self.batch = torch.randn(16, HIDDEN)

    def step(self) -> None:
        """One update."""
        x = self.batch
        for block in self.blocks:
            x = block(x)
        self.adam.zero_grad()
        (x**2).mean().backward()
        self.adam.step()

    def cut(self, name: str, region: Region) -> Tensor:
        """A box of a parameter."""
        return self.named[name].detach()[tuple(map(slice, region.start, region.stop))]


def follow(reference: Reference, mine: dict[str, nn.Parameter], boxes: dict[str, Region]) -> None:
    """Give every parameter its part of the reference's gradient."""
    for name, parameter in mine.items():
        whole = reference.named[name].grad
        assert whole is not None
        parameter.grad = whole[tuple(map(slice, boxes[name].start, boxes[name].stop))].clone()


def check(
    reference: Reference, mine: dict[str, nn.Parameter], adam: torch.optim.Optimizer, boxes: dict[str, Region]
) -> int:
    """Compare all that this rank holds with the cut of the reference; the number of tensors compared."""
    count = 0
    for name, parameter in mine.items():
        assert torch.equal(parameter.detach(), reference.cut(name, boxes[name])), name
        wanted = reference.adam.state[reference.named[name]]
        assert adam.state[parameter].keys() == wanted.keys()
        for key, value in wanted.items():
            index = tuple(map(slice, boxes[name].start, boxes[name].stop)) if value.dim() else ()
            got = adam.state[parameter][key]
            assert got.dtype == value.dtype, (name, key)
            assert torch.equal(got, value[index]), (name, key)
            count += 1
    return count + len(mine)


def rank_main(rank: int, changes: list[tuple[Layout, Layout]]) -> list[tuple[int, int, int]]:
    """(tensors compared, bytes received, bytes of the whole state) for each change of layout."""
    return [change(rank, before, after) for before, after in changes]


def change(rank: int, before: Layout, after: Layout) -> tuple[int, int, int]:
    """Train under `before`, move to `after`, train on."""
    reference = Reference()
    shapes = {name: tuple(parameter.shape) for name, parameter in reference.named.items()}
    mine = stage(layers_of(before, rank), before[0])
    boxes = {name: box(name, shapes[name], before, rank) for name in mine}
    for name, parameter in mine.items():
        parameter.data.copy_(reference.cut(name, boxes[name]))
    adam: torch.optim.Optimizer = torch.optim.AdamW(mine.values(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        reference.step()
        follow(reference, mine, boxes)
        adam.step()
    compared = check(reference, mine, adam, boxes)

    old = optimizer_shards(mine, adam, lambda name, _: (shapes[name], boxes[name]))
    tensors, source = describe(old)
    positions = [held_at(tensors, after, position) for position in range(RANKS)]
    target = place_positions(tensors.values(), source, positions, range(RANKS))

    boxes = {name: region for name, region in target.of(rank).items() if name in shapes}
    mine = stage(layers_held(boxes), after[0])
    new = target_shards(mine, tensors, lambda name, _: (shapes[name], boxes[name]))
    arrived = {name: shard.tensor for name, shard in new.items()}
    plan = plan_routes(tensors.values(), source, target)
    options = Options(timeout_s=30, verify=True)
    report = reshard(plan, {name: shard.tensor for name, shard in old.items()}, arrived, options=options)

    adam = restore_optimizer(torch.optim.AdamW, mine, tensors, arrived)
    compared += check(reference, mine, adam, boxes)
    reference.step()
    follow(reference, mine, boxes)
    adam.step()
    compared += check(reference, mine, adam, boxes)
    return compared, report.received_bytes, sum(tensor.bytes for tensor in tensors.values())


def held_at(tensors: dict[str, LogicalTensor], layout: Layout, position: int) -> dict[str, Region]:
    """The box of every parameter and state tensor that a position holds; step counters are whole."""
    layers = layers_of(layout, position)
    mine = {name: tensor.shape for name, tensor in tensors.items() if int(name.split(".")[0]) in layers}
    return {
        n: box(n.split("@")[0], shape, layout, position) if shape else Region.whole(()) for n, shape in mine.items()
    }


def layers_held(boxes: dict[str, Region]) -> range:
    """The layers among some names."""
    found = sorted({int(name.split(".")[0]) for name in boxes})
    return range(found[0], found[-1] + 1)


def main() -> None:
    """There and back."""
    changes = [((2, 2), (4, 1)), ((4, 1), (2, 2))]
    by_rank = run_local(RANKS, rank_main, changes, timeout_s=90)
    for (before, after), results in zip(changes, zip(*by_rank, strict=True), strict=True):
        moved, state = sum(received for _, received, _ in results), results[0][2]
        print(
            f"TP{before[0]},PP{before[1]} -> TP{after[0]},PP{after[1]}: "
            f"{sum(compared for compared, _, _ in results)} tensors equal bit for bit, "
            f"{moved:,} bytes moved, {moved / state:.2f} of the state"
        )


if __name__ == "__main__":
    main()
