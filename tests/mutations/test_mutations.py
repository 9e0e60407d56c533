"""Every mutation in the catalogue is noticed, and by a failing test rather than by code that cannot be imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutations import harness
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.harness import Mutation


@pytest.mark.mutation
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_turns_its_test_red(mutation: Mutation, tmp_path: Path) -> None:
    code, output = harness.run(mutation, tmp_path)
    assert code == harness.SOME_FAILED, f"{mutation.test} did not notice: {mutation.name}\n{output[-3000:]}"


@pytest.mark.mutation
@pytest.mark.timeout(300)
def test_without_a_change_the_copy_passes(tmp_path: Path) -> None:
    untouched = replace(MUTATIONS[0], after=MUTATIONS[0].before)
    code, output = harness.run(untouched, tmp_path)
    assert code == harness.ALL_PASSED, output[-3000:]


def test_a_mutation_that_no_longer_applies_is_reported(tmp_path: Path) -> None:
    stale = replace(MUTATIONS[0], before="text that is nowhere")
    with pytest.raises(ValueError, match="occurs 0 times"):
        harness.broken_copy(stale, tmp_path)
