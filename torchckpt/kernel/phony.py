"""Phony: a tensor without elements, whose only use is its edge in the autograd graph (the idea is torchgpipe's)."""
from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["phony"]


def phony(device: torch.device) -> Tensor:
    """Make a phony on ``device``. Autograd runs the node that returns it in the thread of that device.

    Phonies are not cached: a phony made under a tensor mode or on a side stream must not be used after it.
    """
    return torch.empty(0, device=device)
