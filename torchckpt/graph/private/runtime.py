"""Runtime: what is alive, what is allocated, and what runs for real in the midst of a trace."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["allocations", "hooks_of_all_modules", "is_transformed", "parts_of", "storage_of", "without_modes"]


def storage_of(tensor: Tensor) -> int:
    """Views of one tensor have the same; a sparse tensor has one of its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def parts_of(tensor: Tensor) -> list[Tensor]:
    """What a tensor is made of: a sparse one of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided else []


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work, which has tensors of its own, or differentiation forward."""
    from torch.autograd import forward_ad

    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Those that every module calls; not torch's own, which count and name, and come and go."""
    from torch.nn.modules import module

    kinds = (
        module._global_forward_pre_hooks, module._global_forward_hooks,
        module._global_backward_pre_hooks, module._global_backward_hooks,
    )
    if not any(kinds):
        return ()
    return tuple(
        (place, hook) for place, kind in enumerate(kinds) for hook in kind.values()
        if str(getattr(hook, "__module__", "")).partition(".")[0] != "torch"
    )


def without_modes() -> AbstractContextManager[Any]:
    """Operations run for real inside, in the midst of a trace too."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def allocations(run: Callable[[], Any], device: str = "cpu") -> list[int]:
    """The bytes that ``run()`` takes from the allocator of ``device`` and, negative, gives back, in the order of time.

    The events are those of the profiler for memory, in the form that needs no tracing library to start.
    """
    from torch._C._profiler import _ExperimentalConfig

    autograd: Any = torch.autograd

    autograd._enable_profiler_legacy(
        autograd.ProfilerConfig(autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )
    try:
        run()
    finally:
        threads = autograd._disable_profiler_legacy()
    events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
    return [_event_bytes(event, device) for event in events]


def _event_bytes(event: Any, device: str) -> int:
    if device == "cpu":
        return int(event.cpu_memory_usage())
    return int(event.device_memory_usage() if hasattr(event, "device_memory_usage") else event.cuda_memory_usage())
