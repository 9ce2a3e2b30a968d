"""Regions that a stage must not have: those of ``torch.utils.checkpoint``, and none at all."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchckpt.distributed.private import is_compiled
from torchckpt.errors import RegionError
from torchckpt.kernel.flags import is_checkpointing
from torchckpt.kernel.private import hooks_in_force

__all__ = ["plain_regions_refused", "raise_without_regions"]

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
            f"the regions of a stage are torchckpt's; those of torch.utils.checkpoint cannot be recomputed early\n"
            f"  received: stage {stage} runs {found[0]} inside one of torch.utils.checkpoint\n  works:    {_WORKS}"
        )


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """Those that a hook can be put on: one inside of compiled code would be compiled, too."""
    if not is_compiled(module):
        yield module
        for child in module.children():
            yield from _uncompiled(child)


def raise_without_regions(stage: int, outputs: object) -> NoReturn:
    """Raise ``RegionError``: the forward of ``stage`` that made ``outputs`` entered no region."""
    if any(_is_reentrant(leaf) for leaf in pytree.tree_leaves(outputs)):
        received = f"stage {stage}, with regions of torch.utils.checkpoint(use_reentrant=True)"
        works = _WORKS
    else:
        received = f"stage {stage}, whose forward entered none"
        works = (
            "for block in stage_module.layers: torchckpt.checkpoint_module(block); or "
            f"recompute_ahead(schedule, exempt={{({stage}, micro_batch), ...}})"
        )
    raise RegionError(f"a stage that is to be recomputed has a region\n  received: {received}\n  works:    {works}")


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
