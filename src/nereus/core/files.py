"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write text beside a file, then in its place; a pipe or a terminal has nothing beside it. Raises OSError."""
    final = path.resolve()
    beside = final.with_name(f".{final.name}.{os.getpid()}")
    if final.exists() and not final.is_file():
        final.write_text(text, encoding="utf-8")
        return
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(final)
    finally:
        beside.unlink(missing_ok=True)
