"""Runs one test against a copy of the source with one piece of text replaced.

A copy, not a patched object: worker processes import the broken code too. The copy comes first on PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALL_PASSED, SOME_FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Mutation:
    """`before` must occur once in `src/nereus/<file>`; with `after` in its place, `test` (a pytest id) must fail."""

    name: str
    file: str
    before: str
    after: str
    test: str


def broken_copy(mutation: Mutation, folder: Path) -> Path:
    """A copy of the source with the mutation in it. Raises ValueError when its text is not there exactly once."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "src" / "nereus" / mutation.file
    source = target.read_text()
    if source.count(mutation.before) != 1:
        raise ValueError(f"{mutation.name}: {mutation.before!r} occurs {source.count(mutation.before)} times, need 1")
    target.write_text(source.replace(mutation.before, mutation.after))
    return folder / "src"


def run(mutation: Mutation, folder: Path, timeout_s: float = 240.0) -> tuple[int, str]:
    """pytest's exit code and output for the mutation's test on the broken copy."""
    source = broken_copy(mutation, folder)
    options = ("-x", "-p", "no:cacheprovider", "--hypothesis-seed=0")  # the same draws every time
    command = [sys.executable, "-B", "-m", "pytest", *options, mutation.test]
    environment = os.environ | {"PYTHONPATH": str(source), "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr
