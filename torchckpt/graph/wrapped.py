"""Wrapped: modules whose forward does more than compute: a trace would leave that out, and say nothing."""
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
_MADE_OF = "the module that it was made of"
_COMPILED = f'{_MADE_OF}, with engine="inductor"; or torch.compile(model, backend=graph.backend(...))'


def check_bare(caller: str, model: nn.Module) -> None:
    """Raise an ArgumentError where ``model``, or one of its modules, was wrapped or compiled."""
    faults = []
    for path, module in model.named_modules():
        for rule, works in _broken(module):
            faults.append(Fault(rule, f"a {type(module).__name__}{f', as {path}' if path else ''}", works))
    raise_faults(caller, faults[:1])  # where one layer is wrapped, all are


def refuse_copies() -> None:
    """Raise an ArgumentError: DataParallel is about to copy a module that is traced."""
    rule = "a traced module has one set of parameters, and DataParallel makes a copy for each device"
    works = "DistributedDataParallel(graph.rematerialize(model, ...)), with a process for each device"
    raise_faults("rematerialize()", [Fault(rule, "DataParallel around it", works)])


def _broken(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Of each rule that ``module`` breaks: the rule, what works."""
    kinds: list[tuple[Any, str, str]] = [
        (nn.parallel.DistributedDataParallel, "prepares the sum of gradients", _DDP),
        (replicated_kinds(), "prepares the sum of gradients", _REPLICATE),
        (sharded_kinds(), "gathers its parameters", _SHARDED),
        (nn.DataParallel, "runs copies on several devices", _DDP),
    ]
    for kind, does, works in kinds:
        if isinstance(module, kind):
            yield f"the Python of a forward runs for a trace alone, and this module {does} in each forward", works
    if is_flattened(module):
        yield "a traced module has its own parameters, and FullyShardedDataParallel has made one of them", _SHARDED
    if isinstance(module, torch.jit.ScriptModule):
        yield "a trace is of a module's Python, and what was scripted has none", _MADE_OF
    elif is_compiled(module):
        yield "a trace is of a module's Python, and what was compiled runs other code", _COMPILED
