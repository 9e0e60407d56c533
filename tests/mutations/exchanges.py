"""Mutations of what is found once for groups that are alike: when they are, and what all flows of one move."""

from __future__ import annotations

from tests.mutations.harness import Mutation

ALIKE = "tests/transition/test_alike.py::test_jobs_that_differ_in_anything_but_their_devices_do_not_share_their_flows"

EXCHANGES = (
    Mutation(
        "share flows whatever of the units are the sources",
        "transition/exchanges.py",
        "key = (len(sources), *(",
        "key = (*(",
        ALIKE,
    ),
    Mutation(
        "share flows whatever the layouts",
        "transition/exchanges.py",
        "*(unit.layout for unit in units), places",
        "places",
        ALIKE,
    ),
    Mutation(
        "share flows wherever the units lie on each other",
        "transition/exchanges.py",
        "units), places, nodes, lacking)",
        "units), nodes, lacking)",
        ALIKE,
    ),
    Mutation(
        "share flows with what is copied on a device and without",
        "transition/exchanges.py",
        "places, nodes, lacking)",
        "places, nodes)",
        ALIKE,
    ),
    Mutation(
        "sum what several owners could send as if they sent nothing else",
        "transition/flows.py",
        "        loads[owner] += elements\n",
        "        pass\n",
        ALIKE,
    ),
    Mutation(
        "sum flows without what devices copy from themselves",
        "transition/flows.py",
        "        for low, high, at in own:\n            total[at, at] +=",
        "        for low, high, at in own[:0]:\n            total[at, at] +=",
        ALIKE,
    ),
)
