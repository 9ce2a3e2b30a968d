"""Parallel: modules that torch has wrapped for several devices or processes."""
from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

__all__ = ["is_flattened", "replicated_kinds", "sharded_kinds"]


def sharded_kinds() -> tuple[Any, ...]:
    """The classes of FSDP, of both versions; none where it is not imported, for nothing is sharded then."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    return () if module is None else (module.FSDPModule, module.FullyShardedDataParallel)


def replicated_kinds() -> tuple[Any, ...]:
    """The class of ``torch.distributed._composable.replicate``."""
    module: Any = sys.modules.get("torch.distributed._composable.replicate")
    return () if module is None else (module.DDP,)


def is_flattened(module: nn.Module) -> bool:
    """Whether the first version of FSDP has put plain tensors in the place of its parameters."""
    is_managed = bool(getattr(module, "_is_fsdp_managed_module", False))
    return is_managed and any(isinstance(value, Tensor) for value in vars(module).values())
