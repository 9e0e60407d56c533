"""Every mutation in the catalogue is noticed, and by a failing test rather than by code that cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.clusters.local import usable_cores
from tests.mutations import harness
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.harness import Mutation

Run = Future[tuple[int, str]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """The runs of all mutations that were selected, as many at a time as there are cores."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [found.params["mutation"] for found in parameters if found is not None and "mutation" in found.params]
    with ThreadPoolExecutor(usable_cores()) as pool:
        yield {each.name: pool.submit(harness.run, each, tmp_path_factory.mktemp("broken")) for each in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.mutation
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_turns_its_test_red(mutation: Mutation, runs: dict[str, Run]) -> None:
    code, output = runs[mutation.name].result()
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
