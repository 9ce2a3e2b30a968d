"""``keep``: a part of a region that is not dropped, and that no replay runs again.

The forward of a region is known by the hooks that it has in force, and so is a replay. ``keep`` takes those hooks off,
at every level of nesting, so that autograd saves as it does outside of regions; hooks of others stay. What the function
returns is noted with each frame whose forward is under way. Whichever of them is replayed hands it out.
"""
from __future__ import annotations

from typing import Any

import torch

from torchckpt.errors import Fault, TransformError, raise_fault
from torchckpt.modules import name_of
from torchckpt.regions.core.hooks import Level, Region, level_of
from torchckpt.regions.core.kept import (
    Buffers,
    Inputs,
    KeptCall,
    KeptCalls,
    Result,
    buffers_of,
    changed_buffers,
    inputs_of,
)
from torchckpt.regions.flags import local
from torchckpt.regions.private import (
    forward_ad,
    functorch_is_active,
    hooks_entered,
    hooks_in_force,
    only_hooks,
    without_selective_modes,
)
from torchckpt.typing import Function

__all__ = ["keep"]


def keep(function: Function, /, *args: Any, **kwargs: Any) -> Any:
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
            be changed by it in place: a replay finds them changed. Other objects that it changes, and tensors that it
            changes by ``.data``, are as the replay finds them. What it raises, the replay raises, too.
        *args, **kwargs: its arguments, as it takes them.

    Returns:
        What ``function`` returns: tensors, anything else, and pytrees of both. A replay gets a copy of a set, a NumPy
        array, a dataclass and the like, and other objects as the region left them.

    Raises:
        ArgumentError: ``function`` is not callable; or it returns an iterator, or tensors inside an object that is no
            pytree.
        TransformError: inside a region, under ``vmap``, ``jvp`` or ``torch.func.grad``.
        RecomputationError: at backward, when a replay calls it less or more often than the forward, or elsewhere.
        RuntimeError: at backward, when a result was changed in place behind it.
    """
    if torch.compiler.is_dynamo_compiling():  # a constant for Dynamo, which reads this line while it traces the caller
        from torchckpt.regions.core.outside_graph import keep_outside_graph  # imports Dynamo

        return keep_outside_graph(keep, function, *args, **kwargs)
    if not callable(function):
        works = "keep(router, x), not keep(router(x))"
        raise_fault(Fault("the function is not callable", type(function).__name__, works), "keep")
    if hooks_in_force(True) is None:  # True: in a trace of AOTAutograd, too
        return function(*args, **kwargs)
    if functorch_is_active() or forward_ad._current_level >= 0:  # hooks are disabled there
        if any(local.thread.flags[:2]):
            rule = "nothing can be kept under vmap, jvp or torch.func.grad: a result would not outlive them"
            works = "the transform inside what is kept, keep(torch.vmap(router), x)"
            raise TransformError(str(Fault(rule, "torchckpt.keep inside such a transform, inside a region", works)))
        return function(*args, **kwargs)
    level = level_of(hooks_entered())
    if level.replayed is None and not level.recording:
        scope = local.thread.scope
        return function(*args, **kwargs) if scope is None else scope.keep_result(function, args, kwargs)
    with without_selective_modes():
        return _kept(function, args, kwargs, level)


def _kept(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], level: Level) -> Any:
    name, inputs = name_of(function), inputs_of(function, args, kwargs)
    before = [(region, region.saved, buffers_of(region.module_state)) for region in level.recording]
    if level.replayed is not None:
        with only_hooks(level.around):  # views of some layouts are saved, too
            result, outputs = _replay(function, inputs, level.replayed)
        _add(name, result, before)
        result.raise_error()
        return outputs
    result = Result(inputs, [generator for region in level.recording for generator in region.generators])
    try:
        with only_hooks(level.others):
            outputs = function(*args, **kwargs)
    except Exception as error:  # the region may catch it, and so does its replay
        with only_hooks(level.around):
            result.note(function, None, inputs, error)
        _add(name, result, before)
        raise
    with only_hooks(level.around):
        result.note(function, outputs, inputs)
    _add(name, result, before)
    return outputs


def _add(name: str, result: Result, before: list[tuple[Region, int | None, Buffers]]) -> None:
    for region, place, buffers in before:
        region.kept = region.kept or KeptCalls()
        region.kept.add(KeptCall(name, place, result, changed_buffers(region.module_state, buffers)))


def _replay(function: Function, inputs: Inputs, region: Region) -> tuple[Result, Any]:
    """The result and outputs that the forward of ``region`` kept, for its replay."""
    region.kept = region.kept or KeptCalls()
    then = region.kept.next(region.function, name_of(function), region.checks)
    outputs = then.result.replay(function, inputs, region.replays)
    then.result.wait_before_using([copy and copy.values for _, _, copy in then.buffers])
    for buffers, name, copy in then.buffers:
        buffers[name] = copy and copy.clone()
    return then.result, outputs
