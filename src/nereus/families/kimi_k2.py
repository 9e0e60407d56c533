"""Kimi K2: DeepSeek-V3 with more experts, fewer heads and one dense layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nereus.families.deepseek_v3 import DeepseekV3


@dataclass(frozen=True)
class KimiK2(DeepseekV3):
    """Kimi K2."""

    model_type: ClassVar[str] = "kimi_k2"
