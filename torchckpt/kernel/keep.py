"""``keep``: a part of a region that is not dropped, and that no replay runs again.

The forward of a region is known by the hooks that it has in force, and so is a replay. ``keep`` takes those hooks off,
at every level of nesting, so that autograd saves as it does outside of regions; hooks of others stay. What the function
returns is noted with each frame whose forward is under way. Whichever of them is replayed hands it out.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from torchckpt.errors import Fault, TransformError, raise_faults
from torchckpt.kernel.determinism import name_of
from torchckpt.kernel.flags import thread
from torchckpt.kernel.frame import Frame
from torchckpt.kernel.hooks import Hooks, hooks_entered, only
from torchckpt.kernel.kept import Kept, KeptCall
from torchckpt.kernel.private import functorch_is_active, hooks_in_force, without_selective_modes
from torchckpt.kernel.result import Near, Result, buffers_of, changed_buffers, near_to
from torchckpt.kernel.torch_region import TorchRegion, torch_region
from torchckpt.typing import Function

__all__ = ["keep"]


def keep(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` inside a region once: no replay runs it again.

    What it returns stays in memory, and so does what its own backward needs. A replay goes on from the same result, to
    the bit, also where the function would not give it twice: the router of a mixture of experts, a top-k, a collective,
    a random draw, an expensive attention. Random numbers drawn after it are those of the forward.

    >>> def block(x):
    ...     gate, expert = torchckpt.keep(lambda x: x.softmax(-1).max(-1, keepdim=True), x)
    ...     return (gate * x).tanh()
    >>> y = torchckpt.checkpoint(block, torch.randn(4, 8, requires_grad=True))
    >>> y.sum().backward()

    Regions are those of this library, and those of :func:`torch.utils.checkpoint.checkpoint` (``use_reentrant=False``).
    Outside of regions, in a function that is kept itself, and in a call that ``graph.rematerialize`` traces
    (``graph.mark`` is its word for it), this is the plain call. Under ``torch.compile`` it is outside of the graph,
    which ends before it and begins again after it.

    Args:
        function: any callable. Tensors among its arguments, or in its closure, and buffers of the region's modules may
            be changed by it in place: a replay finds them changed. Other objects that it changes are as the replay
            finds them.
        *args, **kwargs: its arguments, as it takes them.

    Returns:
        What ``function`` returns: tensors, anything else, and pytrees of both.

    Raises:
        ArgumentError: ``function`` is not callable, or returns tensors inside an object that is no pytree.
        TransformError: inside a region, under ``vmap``, ``jvp`` or ``torch.func.grad``.
        RecomputationError: at backward, when a replay calls it less or more often than the forward, or elsewhere.
        RuntimeError: at backward, when a result was changed in place behind it.
    """
    if torch.compiler.is_dynamo_compiling():  # a constant for Dynamo, which reads this line while it traces the caller
        from torchckpt.kernel.outside_graph import keep_outside_graph

        return keep_outside_graph(keep, function, *args, **kwargs)
    if not callable(function):
        works = "keep(router, x), not keep(router(x))"
        raise_faults("keep", [Fault("the function must be callable", type(function).__name__, works)])
    if hooks_in_force(True) is None:
        return function(*args, **kwargs)
    if functorch_is_active():  # hooks are disabled there
        return _inside_transform(function, args, kwargs)
    stack = hooks_entered()
    level = _level(stack)
    if level.replayed is None and not level.recording:
        return function(*args, **kwargs)
    with without_selective_modes():
        return _kept(function, args, kwargs, stack, level)


Region: TypeAlias = Frame | TorchRegion


class _Level(NamedTuple):
    """Where in regions a call is."""

    recording: list[Region]
    """The regions whose forward is under way, from the innermost on."""
    replayed: Region | None
    """The one that is replayed around them."""
    around: Sequence[Hooks]
    """The hooks around all of them."""


def _level(stack: Sequence[Hooks]) -> _Level:
    recording: list[Region] = []
    around = stack
    for place in reversed(range(len(stack))):
        found = _region_of(stack[place])
        if found is not None:
            region, is_replayed = found
            around = stack[:place]
            if is_replayed:
                return _Level(recording, region, around)
            recording.append(region)
    return _Level(recording, None, around)


def _region_of(hooks: Hooks) -> tuple[Region, bool] | None:
    """The region that has entered ``hooks``, and whether it is replayed."""
    pack, unpack = hooks
    owner = getattr(unpack, "__self__", None)
    return (owner, unpack == owner._same) if isinstance(owner, Frame) else torch_region(pack)


def _inside_transform(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(thread.flags[:2]):
        raise TransformError(
            "nothing can be kept under vmap, jvp or torch.func.grad: a result would not outlive them\n"
            "  received: torchckpt.keep inside such a transform, inside a region\n"
            "  works:    the transform inside what is kept, keep(torch.vmap(router), x)"
        )
    return function(*args, **kwargs)


def _kept(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], stack: Sequence[Hooks], level: _Level
) -> Any:
    name, near = name_of(function), near_to(function, args, kwargs)
    before = [(region, region.saved, buffers_of(region.seen)) for region in level.recording]
    if level.replayed is None:
        result = Result(near, [generator for region in level.recording for generator in region.generators])
        with only([hooks for hooks in stack if _region_of(hooks) is None]):
            outputs = function(*args, **kwargs)
        with only(level.around):
            result.note(function, outputs, near)
    else:
        result, outputs = _again(function, near, level.replayed)
    for region, place, buffers in before:
        region.kept = region.kept or Kept()
        region.kept.add(KeptCall(name, place, result, changed_buffers(region.seen, buffers)))
    return outputs


def _again(function: Function, near: Near, region: Region) -> tuple[Result, Any]:
    """What the forward of ``region`` kept, for its replay."""
    region.kept = region.kept or Kept()
    then = region.kept.next(region.function, name_of(function), region.checks)
    outputs = then.result.again(function, near, region.replays)
    for home, name, value in then.buffers:
        home[name] = value()
    return then.result, outputs
