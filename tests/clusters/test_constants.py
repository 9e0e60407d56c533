"""Constants of cluster files and those the cost model reads are the same."""

from __future__ import annotations

from nereus.clusters._constants import KIND_CONSTANTS, LINK_CONSTANTS
from nereus.cost import collectives, decoding, kernels, layer, training


def test_a_cluster_file_may_give_every_constant_that_the_cost_model_reads() -> None:
    read = {name for module in (kernels, layer, training, decoding) for name in module.START}
    assert read <= KIND_CONSTANTS.keys()
    assert set(collectives.START) <= LINK_CONSTANTS.keys()
