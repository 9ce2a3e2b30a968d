"""Runtime: storages, allocations, and operations that really run during a trace."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "allocations", "hooks_of_all_modules", "is_freed", "is_transformed", "lasting", "parts_of", "storage_of",
    "without_modes",
]


def storage_of(tensor: Tensor) -> int:
    """An identifier of the tensor's storage: equal for views of one tensor. A sparse tensor has its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def lasting(tensor: Tensor) -> StorageWeakRef | None:
    """A weak reference to the storage of ``tensor``; None where there is not one storage."""
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None  # type: ignore[no-untyped-call]


def is_freed(storage: StorageWeakRef | None) -> bool:
    """Whether nobody holds the storage of a :func:`lasting` any more."""
    return storage is not None and bool(storage.expired())  # type: ignore[no-untyped-call]


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with storages that make up ``tensor``: itself, or the indices and values of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided else []


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    from torch.autograd import forward_ad

    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def hooks_of_all_modules() -> tuple[Any, ...]:
    """The global module hooks, without torch's own: those come and go, and do not change results."""
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
    """Inside this context, operations really run, also during a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def allocations(run: Callable[[], Any], device: str = "cpu") -> list[int]:
    """The bytes that ``run()`` allocates on ``device``, in order of time; negative numbers are bytes that it frees.

    The numbers come from the legacy memory profiler, which starts without a tracing library.
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
