"""The tensors of a torch module that are state: parameters once each, and the buffers a checkpoint would have."""

from __future__ import annotations

import torch


def module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name → tensor. A parameter with several names (tied) has the first; non-persistent buffers are not state."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.removeprefix(f"{prefix}." if prefix else "") not in part._non_persistent_buffers_set:
                found[name] = buffer
    return found
