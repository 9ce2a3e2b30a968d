"""Selective: whether what torch's selective contexts keep goes through the caller's saved-tensor hooks."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from torchckpt.errors import Fault, called, raise_fault
from torchckpt.regions.core.options import shown
from torchckpt.regions.core.scope import level_of
from torchckpt.regions.kept.record import hooks_entered
from torchckpt.regions.private import caching_mode, heeds_hooks, hooks_in_force, look_through, pop_hooks, push_hooks
from torchckpt.regions.state.boundary import Hooks
from torchckpt.typing import ContextFunction

__all__ = ["heeding"]


def heeding(context_fn: ContextFunction | None, respects: bool) -> ContextFunction | None:
    """``context_fn``, whose selective contexts heed the hooks that are in force around the region, if ``respects``."""
    name = "respect_saved_tensors_hooks"
    if not isinstance(respects, bool):
        with called("checkpoint"):
            raise_fault(Fault(f"{name} is not a bool or None", shown(respects), f"{name}=True"))
    # In a graph torch takes no notice of hooks. The default here is torch's old behaviour, without its warning.
    if not respects or not callable(context_fn) or torch.compiler.is_dynamo_compiling():
        return context_fn
    if not heeds_hooks:
        rule = f"{name} needs selective contexts that look for hooks, which torch has from 2.15 on"
        with called("checkpoint"):
            raise_fault(Fault(rule, f"torch {torch.__version__}", f"{name}=None"))
    return partial(_contexts, context_fn)


def _contexts(make: ContextFunction) -> Any:
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], caching_mode)):
        return made
    others = level_of(hooks_entered()).others
    made[0].respect_saved_tensors_hooks = True
    return _heeding(made[0], others[-1]) if others else made[0], made[1]


@contextmanager
def _heeding(mode: AbstractContextManager[Any], users: Hooks) -> Iterator[None]:
    """``mode``, inside of which the hooks of the region in force name ``users`` as the hooks around it."""
    pack, unpack = own = hooks_in_force(False)
    named = partial(pack)
    look_through(named, users=users)
    _put(named, unpack)
    try:
        with mode:
            yield
    finally:
        _put(*own)
        named.__dict__.clear()  # the graph holds it, and must not hold the user's hooks


def _put(*hooks: Any) -> None:
    pop_hooks()
    push_hooks(*hooks)
