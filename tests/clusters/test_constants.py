"""Constants of cluster files and those the cost model reads are the same."""

from __future__ import annotations

from nereus.clusters._constants import KIND_CONSTANTS, LINK_CONSTANTS
from nereus.cost import constants
from nereus.cost.site import UNCERTAINTY

MEASURED = {"group.setup_s"}
"""Of a link: what is measured for transitions, not for steps."""


def test_a_cluster_file_may_give_every_constant_that_the_cost_model_reads_and_no_other() -> None:
    assert constants.KIND.keys() | {UNCERTAINTY} == KIND_CONSTANTS.keys()
    assert constants.LINK.keys() | MEASURED == LINK_CONSTANTS.keys()
