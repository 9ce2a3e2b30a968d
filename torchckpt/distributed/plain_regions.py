"""Regions that a stage must not have: those of ``torch.utils.checkpoint``, and none at all, as after a trace."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, RegionError
from torchckpt.modules import is_compiled
from torchckpt.regions.flags import is_checkpointing
from torchckpt.regions.private import hooks_in_force
from torchckpt.regions.wrap.mixin import COMPILED
from torchckpt.regions.wrap.module import is_checkpointed

__all__ = [
    "has_compiled_regions",
    "plain_regions_refused",
    "raise_without_regions",
    "traced_faults",
    "warn_of_compiled_regions",
]

_WORKS = "from torchckpt import checkpoint, for: from torch.utils.checkpoint import checkpoint"


@contextmanager
def plain_regions_refused(stage: int, module: nn.Module) -> Iterator[None]:
    """Raise ``RegionError`` at the end if ``torch.utils.checkpoint`` was used within: of that, nothing can be
    recomputed early."""
    found: list[str] = []
    names = {child: name for name, child in module.named_modules()}
    graded = torch.is_grad_enabled()

    def look(child: nn.Module, _: Any) -> None:
        hooks = hooks_in_force(False)
        inside = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        if inside and not found and not is_checkpointing():  # one inside of ours is ours to replay
            found.append(f"{type(child).__name__} {names[child]!r}")

    handles = [child.register_forward_pre_hook(look) for child in _uncompiled(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if found and graded:
        raise RegionError(
            f"a region of torch.utils.checkpoint cannot be recomputed early, only one of torchckpt\n"
            f"  received: stage {stage} runs {found[0]} inside one of torch.utils.checkpoint\n  works:    {_WORKS}"
        )


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a hook can be put on: a hook inside of compiled code would be compiled, too."""
    if not is_compiled(module):
        yield module
        for child in () if COMPILED in module.__dict__ else module.children():
            yield from _uncompiled(child)


def warn_of_compiled_regions(stage: int, module: nn.Module) -> None:
    """Regions inside of a graph that Dynamo traces are torch's operators: nothing can recompute them early."""
    inside = list(_in_graphs(module, ""))
    if inside:
        warnings.warn(
            "recompute_ahead: a region inside of compiled code is not recomputed early\n"
            f"  received: stage {stage}, with {inside[0]}{f', and {len(inside) - 1} more' if inside[1:] else ''}\n"
            f"  works:    {_COMPILE}",
            stacklevel=2,
        )


_COMPILE = "for block in stage_module.layers: torchckpt.checkpoint_module(block); block.compile()"


def _in_graphs(module: nn.Module, name: str) -> Iterator[str]:
    if is_checkpointed(module):
        return
    for path, child in module.named_modules(prefix=name) if is_compiled(module) else ():
        if is_checkpointed(child):
            yield f"{type(child).__name__} {path!r}"
    for path, child in () if is_compiled(module) else module.named_children():
        yield from _in_graphs(child, f"{name}.{path}".lstrip("."))


_TRACERS = ("torch.fx.", "torch.export.", "torch.nn.modules.")
"""The modules of the classes that ``torch.distributed.pipelining.pipeline()`` makes of a model."""

_KNOWN = ("torch", "_operator", "operator", "builtins", "math")
"""The packages of functions that enter no region."""


def traced_faults(stage: int, module: nn.Module) -> Iterator[Fault]:
    """The fault of a stage that was traced, with no region in it: those that were set before are not in a trace.

    A class of the user's own that was put into the stage, or a function that its graph calls (``torch.fx.wrap``), may
    enter regions by itself: the first step tells.
    """
    if not isinstance(module, GraphModule) or any(is_checkpointed(child) for child in module.modules()):
        return
    if all(type(child).__module__.startswith(_TRACERS) and not _calls_others(child) for child in module.modules()):
        yield Fault(
            "a traced stage has no region: the trace leaves out those that were set before it",
            f"stage {stage}, a GraphModule as pipeline() makes one, without a region",
            _traced_works(stage, module),
        )


def _calls_others(module: nn.Module) -> bool:
    """Whether the graph of ``module``, if it has one, calls functions that are not torch's or Python's."""
    graph = getattr(module, "graph", None)
    calls = (node.target for node in getattr(graph, "nodes", ()) if node.op == "call_function")
    modules = (getattr(function, "__module__", None) or "torch" for function in calls)
    return any(name.partition(".")[0] not in _KNOWN for name in modules)


def _traced_works(stage: int, module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules()]
    repeated = next((name.rpartition(".")[0] for name in names if name.rpartition(".")[2].isdigit()), None)
    pattern = next(iter(names[1:]), "layers.*") if repeated is None else f"{repeated}.*".lstrip(".")
    return (
        f'torchckpt.checkpoint_layers(pipe.get_stage_module({stage}), "{pattern}"), '
        f"and then pipe.build_stage({stage}, device)"
    )


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether regions of ``module`` are inside of compiled code."""
    return any(True for _ in _in_graphs(module, ""))


def raise_without_regions(stage: int, module: nn.Module, outputs: object) -> NoReturn:
    """Raise ``RegionError``: the forward of ``stage`` that made ``outputs`` entered no region."""
    if inside := list(_in_graphs(module, "")):
        received, works = f"stage {stage}, with {inside[0]} inside of compiled code", _COMPILE
    elif any(_is_reentrant(leaf) for leaf in pytree.tree_leaves(outputs)):
        received = f"stage {stage}, with regions of torch.utils.checkpoint(use_reentrant=True)"
        works = _WORKS
    elif traced := list(traced_faults(stage, module)):
        received, works = traced[0].received, traced[0].works
    else:
        received = f"stage {stage}, whose forward entered none"
        works = (
            "for block in stage_module.layers: torchckpt.checkpoint_module(block); or "
            f"recompute_ahead(schedule, exempt={{({stage}, micro_batch), ...}})"
        )
    raise RegionError(f"a stage that is to be recomputed has no region\n  received: {received}\n  works:    {works}")


def _is_reentrant(output: object) -> bool:
    """Whether the graph of ``output`` has a node of the reentrant checkpoint."""
    todo, seen = [getattr(output, "grad_fn", None)], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            return True
        todo += [before for before, _ in node.next_functions]
    return False
