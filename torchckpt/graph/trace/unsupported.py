"""Unsupported: refuse modules whose forward does more than compute, which a trace would silently leave out."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchckpt.errors import Fault, raise_faults
from torchckpt.graph.private.parallel import is_flattened, replicated_kinds, sharded_kinds
from torchckpt.modules import is_compiled

__all__ = ["check_bare", "refuse_copies"]

_DDP = "DistributedDataParallel(graph.rematerialize(model, ...)): the other order"
_REPLICATE = "replicate(graph.rematerialize(model, ...)): the other order"
_SHARDED = (
    "fully_shard(graph.rematerialize(layer, ...)), of a layer or a model with nothing in it that is sharded; "
    "or torchckpt.checkpoint_module(layer), and fully_shard() as ever"
)
_MADE_OF = "the original module"
_COMPILED = f'{_MADE_OF}, with engine="inductor"; or torch.compile(model, backend=graph.backend(...))'


def check_bare(caller: str, model: nn.Module) -> None:
    """Raise an ArgumentError where ``model``, or one of its modules, was wrapped or compiled."""
    faults = []
    for path, module in model.named_modules():
        for rule, works in _broken(module):
            faults.append(Fault(rule, f"a {type(module).__name__}{f', as {path}' if path else ''}", works))
    raise_faults(caller, faults[:1])  # the first is enough: usually all layers are wrapped


def refuse_copies() -> None:
    """Raise an ArgumentError, because DataParallel is about to copy a traced module."""
    rule = "a traced module has one set of parameters, and DataParallel makes a copy for each device"
    works = "DistributedDataParallel(graph.rematerialize(model, ...)), with a process for each device"
    raise_faults("rematerialize()", [Fault(rule, "DataParallel around it", works)])


def _broken(module: nn.Module) -> Iterator[tuple[str, str]]:
    """For each rule that ``module`` breaks: the rule, and the code that works."""
    kinds: list[tuple[Any, str, str]] = [
        (nn.parallel.DistributedDataParallel, "prepares the sum of gradients", _DDP),
        (replicated_kinds(), "prepares the sum of gradients", _REPLICATE),
        (sharded_kinds(), "gathers its parameters", _SHARDED),
        (nn.DataParallel, "runs copies on several devices", _DDP),
    ]
    for kind, does, works in kinds:
        if isinstance(module, kind):
            yield f"a forward's Python code runs only during a trace, but this module {does} in each forward", works
    if is_flattened(module):
        yield "a traced module has its own parameters, but FullyShardedDataParallel has merged them into one", _SHARDED
    if isinstance(module, torch.jit.ScriptModule):
        yield "a trace runs a module's Python code, and a scripted module has none", _MADE_OF
    elif is_compiled(module):
        yield "a trace runs a module's Python code, but a compiled module runs other code", _COMPILED
