"""Names: which module runs what, noted while a call is traced, by hooks that are gone afterwards."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torchckpt.graph.notes import inside_module
from torchckpt.kernel.flags import thread

__all__ = ["named_modules"]


@contextmanager
def named_modules(root: nn.Module, at_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Note the qualified names of ``root``'s modules on what they run; ``root`` and its modules stay as they are.

    ``at_end()`` is called when the forward of ``root`` is done, and its modules still hold what they were traced with.
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
