"""Phony: a tensor without elements, whose only use is its edge in the autograd graph (the idea is torchgpipe's)."""
from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["phony"]


def phony(device: torch.device) -> Tensor:
    """A phony on ``device``: the engine runs the node that returns it in that device's thread.

    Not cached: one that is made under a tensor mode or on a side stream must not outlive it.
    """
    return torch.empty(0, device=device)
