"""Names: note on each traced node the module that runs it, by temporary forward hooks."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchckpt.graph.annotate.annotations import inside_module
from torchckpt.regions.flags import thread

__all__ = ["named_modules"]


@contextmanager
def named_modules(root: nn.Module, at_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside this context, traced nodes get the qualified name of the module that runs them. No module is changed.

    ``at_end()`` is called at the end of the forward of ``root``, while its modules still hold the traced tensors.
    """
    names = {module: name for name, module in root.named_modules() if name}
    entered: list[AbstractContextManager[None]] = []
    tracing = thread.tracing

    def enter(module: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond
            return
        if module in names and thread.tracing is tracing:
            entered.append(inside_module(names[module]))
            entered[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if module in names and thread.tracing is tracing:
            entered.pop().__exit__(None, None, None)
        elif module is root and thread.tracing is tracing:
            at_end()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while entered:  # by modules whose forward did not end: torch calls no hook of theirs where tracing fails
            entered.pop().__exit__(None, None, None)
