"""The smallest example of the library: the page shows it as it is, and what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "reshard_tensor.py"


def test_the_page_shows_the_whole_example() -> None:
    code = EXAMPLE.read_text(encoding="utf-8")
    assert PAGE.partition("```python\n")[2].partition("```")[0] == code[code.index("import torch") :]


@pytest.mark.processes
def test_it_prints_what_the_page_says() -> None:
    shown = PAGE.partition("$ python examples/reshard_tensor.py\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.stdout == shown, done.stderr
