"""Layers of pipeline stages in Megatron's words: of the first and the last stage, or a layout such as `Et*3|t*4L`."""

from __future__ import annotations

import re
from collections.abc import Sequence


def ends(counts: Sequence[int]) -> tuple[int | None, int | None] | None:
    """(first, last) that Megatron's even split of the other layers turns into `counts`; None where there is none.

    Both None: the even split itself.
    """
    if len(set(counts)) <= 1:
        return None, None
    middle = set(counts[1:-1])
    if len(counts) == 2 or len(middle) == 1:
        common = middle.pop() if middle else None
        return (None if counts[0] == common else counts[0]), (None if counts[-1] == common else counts[-1])
    return None


def layout(counts: Sequence[int]) -> str:
    """`counts` as a pipeline layout: embedding in front, loss behind."""
    stages = ["t" * count if count < 3 else f"t*{count}" for count in counts]
    return f"E{'|'.join(stages)}L"


def counts(text: str) -> tuple[int, ...]:
    """The layers of each stage of a pipeline layout. Raises ValueError for what is none."""
    plain = re.sub(r"[\s\"'\\]", "", text)
    while group := re.search(r"\(([^()]*)\)\*(\d+)", plain):
        if int(group.group(2)) > 1000:
            raise ValueError(text)
        plain = plain[: group.start()] + group.group(1) * int(group.group(2)) + plain[group.end() :]
    if not re.fullmatch(r"[EtmL*\d|]*", plain):
        raise ValueError(text)
    return tuple(sum(int(times or 1) for times in re.findall(r"t(?:\*(\d+))?", stage)) for stage in plain.split("|"))
