"""Parallel: modules that torch has wrapped for several devices or processes."""
from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

__all__ = ["is_flattened", "replicated_kinds", "sharded_kinds"]


def sharded_kinds() -> tuple[Any, ...]:
    """The module classes of FSDP1 and FSDP2; empty if FSDP is not imported, since then no module is sharded."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    return () if module is None else (module.FSDPModule, module.FullyShardedDataParallel)


def replicated_kinds() -> tuple[Any, ...]:
    """The module class of ``torch.distributed._composable.replicate``; empty if that is not imported."""
    module: Any = sys.modules.get("torch.distributed._composable.replicate")
    return () if module is None else (module.DDP,)


def is_flattened(module: nn.Module) -> bool:
    """Whether FSDP1 has replaced the parameters of ``module`` by plain tensors, views of its flat parameter."""
    is_managed = bool(getattr(module, "_is_fsdp_managed_module", False))
    return is_managed and any(isinstance(value, Tensor) for value in vars(module).values())
