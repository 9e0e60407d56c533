"""What candidates cost, as columns: the answer of the cost model and the input of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.cost.rows import Floats


@dataclass(frozen=True, slots=True)
class Prices:
    """By row of the candidates of one model-stage. Bytes are those of the fullest device of a unit.

    `call_s` maps each call of the model-stage to seconds. `sync_s` is this side's part of weight synchronisations:
    what a target takes to receive, or a source to send; parts add up. `resident_bytes` stay between calls,
    `transient_bytes` is the most that one of its calls adds; both are maxima over pp ranks, not yet of one rank.
    """

    call_s: Mapping[str, Floats]
    sync_s: Floats
    resident_bytes: Floats
    transient_bytes: Floats


@dataclass(frozen=True, slots=True)
class CallPrices:
    """One call by row: predicted seconds, and `ideal` seconds of its busiest pp rank by operation class.

    Waiting for other pp ranks counts as class `pp`, in such an amount that weighing `ideal` gives `seconds`.
    """

    seconds: Floats
    ideal: Mapping[str, Floats]
