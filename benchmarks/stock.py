"""Stock: layers under ``torch.utils.checkpoint``, for comparison."""
from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Stock"]


class Stock(nn.Module):
    """``module`` as a region of ``torch.utils.checkpoint``."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(self.module, *inputs, use_reentrant=False, **self.options)
