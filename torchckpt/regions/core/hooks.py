"""Hooks: the regions that a thread is in, by the saved-tensor hooks that it has entered.

``keep`` asks, in regions of this library and of torch, and so does a selective context that heeds hooks.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint

from torchckpt.errors import Fault, raise_fault
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.kept import KeptCalls
from torchckpt.regions.core.options import shown
from torchckpt.regions.devices import accelerators_among
from torchckpt.regions.private import (
    caching_mode,
    frame_of_torch,
    heeds_hooks,
    hooks_entered,
    hooks_in_force,
    look_through,
    only_hooks,
)
from torchckpt.regions.state.ambient import Generator, generators_of, is_same_state
from torchckpt.regions.state.boundary import Hooks
from torchckpt.typing import ContextFunction, Function

__all__ = ["Level", "Region", "heeding", "level_of"]


class TorchRegion:
    """One region of torch in one forward, as long as torch's own frame lives. It looks to ``keep`` like a ``Frame``."""

    checks, saved, module_state = True, None, None
    function: Function = staticmethod(torch.utils.checkpoint.checkpoint)

    def __init__(self) -> None:
        self.kept: KeptCalls | None = None
        self.replay: object = None
        """The hook of the replay that is under way, or was last."""

    def replays(self, generator: Generator, before: Any) -> bool:
        """Whether ``generator`` is where the forward had it: torch does not tell what it puts back."""
        return is_same_state(generator.get_state(), before)

    @property
    def generators(self) -> list[Generator]:
        """The generators whose states a replay may put back."""
        return list(generators_of(accelerators_among((), {}), ()))


_of_torch: WeakKeyDictionary[Any, TorchRegion] = WeakKeyDictionary()
"""The regions of torch by torch's own frames."""

Region: TypeAlias = Frame | TorchRegion


class Level(NamedTuple):
    """The regions around a call."""

    recording: list[Region]
    """The regions whose forward is under way, from the innermost on."""
    replayed: Region | None
    """The region that is replayed around them."""
    around: Sequence[Hooks]
    """The hooks outside of the replayed region, or of all regions if none is replayed."""
    others: Sequence[Hooks]
    """All hooks but those of regions."""


def level_of(stack: Sequence[Hooks]) -> Level:
    """The level of a call that has entered ``stack``, the outermost pair first."""
    owners = list(map(_region_of, stack))
    others = [hooks for hooks, owner in zip(stack, owners) if owner is None]
    recording: list[Region] = []
    around = stack
    for place, owner in reversed(list(enumerate(owners))):
        if owner is not None:
            region, is_replayed = owner
            around = stack[:place]
            if is_replayed:
                return Level(recording, region, around, others)
            recording.append(region)
    return Level(recording, None, around, others)


def _region_of(hooks: Hooks) -> tuple[Region, bool] | None:
    """The region that has entered ``hooks``, and whether it is replayed. None for hooks of no region."""
    pack, unpack = hooks
    owner = getattr(unpack, "__self__", None)
    if isinstance(owner, Frame):
        return owner, unpack == owner._unpack_in_replay
    entered = frame_of_torch(pack)
    if entered is None:
        return None
    frame, is_replayed = entered
    region = _of_torch.setdefault(frame, TorchRegion())
    if is_replayed and region.replay is not pack:  # a new replay, which has taken nothing so far
        region.replay = pack
        if region.kept is not None:
            region.kept.begin(None)
    return region, is_replayed


# torch's selective contexts -------------------------------------------------------------------------------------------


def heeding(context_fn: ContextFunction | None, respects: bool) -> ContextFunction | None:
    """``context_fn``, whose selective contexts heed the hooks that are in force around the region, if ``respects``."""
    name = "respect_saved_tensors_hooks"
    if not isinstance(respects, bool):
        raise_fault(Fault(f"{name} is not a bool or None", shown(respects), f"{name}=True"), "checkpoint")
    # In a graph torch takes no notice of hooks. The default here is torch's old behaviour, without its warning.
    if not respects or not callable(context_fn) or torch.compiler.is_dynamo_compiling():
        return context_fn
    if not heeds_hooks:
        rule = f"{name} needs selective contexts that look for hooks, which torch has from 2.15 on"
        raise_fault(Fault(rule, f"torch {torch.__version__}", f"{name}=None"), "checkpoint")
    return partial(_contexts, context_fn)


def _contexts(make: ContextFunction) -> Any:
    pair = make()
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], caching_mode)):
        return pair
    mode: Any = pair[0]
    mode.respect_saved_tensors_hooks = True
    others = level_of(hooks_entered()).others
    return _heeding(mode, others[-1]) if others else mode, pair[1]


@contextmanager
def _heeding(mode: AbstractContextManager[Any], users: Hooks) -> Iterator[None]:
    """``mode``; inside it, torch sees ``users`` as the hooks around the region."""
    pack, unpack = hooks_in_force(False)
    named = partial(pack)
    look_through(named, users=(partial(users[0]), users[1]))  # a partial has no mark, if the user's is of this library
    try:
        with only_hooks([*hooks_entered()[:-1], (named, unpack)]), mode:
            yield
    finally:
        named.__dict__.clear()  # the graph holds it, and must not hold the user's hooks
