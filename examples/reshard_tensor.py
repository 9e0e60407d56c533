"""One tensor from four ranks that hold rows to two that hold columns: the smallest use of the library.

python examples/reshard_tensor.py
"""

import torch

from nereus.engine.library import Options, Placement, Region, Shard, allocate, describe, plan_routes, reshard
from nereus.engine.library.local import run_local

SHAPE = (8, 6)


def rank_main(rank: int) -> tuple[bool, int]:
    """What a framework runs on every rank of its process group."""
    whole = torch.arange(48.0).reshape(SHAPE)  # in a real job no rank has all of it
    mine = {"up": Shard(whole[2 * rank : 2 * rank + 2], SHAPE, Region.chunk(SHAPE, 0, 4, rank))}
    tensors, source = describe(mine)  # all tensors, who holds what; collective

    target = Placement({"up": {each: Region.chunk(SHAPE, 1, 2, each) for each in (0, 1)}})
    plan = plan_routes(tensors.values(), source, target)  # the same on every rank
    new = allocate(tensors, target, rank)
    old = {name: shard.tensor for name, shard in mine.items()}
    report = reshard(plan, old, new, options=Options(verify=True))  # over the default group; collective

    right = torch.equal(new["up"], whole[:, 3 * rank : 3 * rank + 3]) if rank < 2 else not new
    return right, report.received_bytes


if __name__ == "__main__":
    for rank, (right, received) in enumerate(run_local(4, rank_main)):
        print(f"rank {rank}: {'right' if right else 'WRONG'}, {received} bytes received")
