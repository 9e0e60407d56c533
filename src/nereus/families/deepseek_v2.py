"""DeepSeek-V2: the architecture of DeepSeek-V3 with other sizes and another choice of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nereus.families.deepseek_v3 import DeepseekV3


@dataclass(frozen=True)
class DeepseekV2(DeepseekV3):
    """DeepSeek-V2 and V2-Lite."""

    model_type: ClassVar[str] = "deepseek_v2"
    class_prefix: ClassVar[str] = "DeepseekV2"
