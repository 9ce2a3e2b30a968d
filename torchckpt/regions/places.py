"""Places: where in the user's code autograd saves a tensor, and which operation it is saved for."""
from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, MethodType
from typing import NamedTuple

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import Node

from torchckpt.regions.private import newest_node, number_of, packed_by
from torchckpt.tensors import node_name, nodes_behind

__all__ = ["REGION", "Place", "holders_behind", "operation_of", "place_of", "shown_line"]

_TORCH, _PACKAGE = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_LIBRARIES = _TORCH, _PACKAGE, "<eval_with_key>"
"""What is no code of the user. The last is what torch.fx generates, such as a graph of Dynamo."""
_REGIONS = f"{_PACKAGE}regions{os.sep}", torch.utils.checkpoint.__file__
"""The code that saves the inputs of regions, which have no node yet."""
_CALL = nn.Module.__call__.__code__
_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)
"""Through it, regions of torch 2.11 save their inputs (torch/utils/checkpoint.py). No Python code in torch 2.15."""
_FUNCTIONAL: str = nn.functional.__file__

REGION = "checkpoint"
"""What saves the inputs of a region, in place of an operation."""


class Place(NamedTuple):
    """Where a tensor is saved."""

    module: str
    """The path of the innermost module that runs, from the outermost on."""
    file: str
    line: int
    """The line outside of torch and of this library."""
    function: str
    """The function of ``torch.nn.functional`` that the line has called, such as ``dropout``; or nothing."""
    node: int
    """The number of the autograd node that saves it; -1 where no node does, for an input of a region."""

    @property
    def operation(self) -> str:
        """What is known before there is a node: ``checkpoint``, or nothing."""
        return REGION if self.node < 0 else ""


def place_of(caller: FrameType | None, region: object = None) -> Place:
    """The place of a tensor that is saved by the code of ``caller``, in the replay of ``region``, a function.

    If that is a method of a module, the call of the module is outside of the replay.
    """
    holder = region.__self__ if isinstance(region, MethodType) else None
    own = getattr(region, "__code__", None) if isinstance(holder, nn.Module) else None
    if caller is not None and caller.f_code is _APPLY:
        caller = caller.f_back
    is_input = caller is not None and caller.f_code.co_filename.startswith(_REGIONS)
    modules, lines, functions, frame = [], [], [], caller
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            modules.append(frame.f_locals["self"])
        elif code is own:
            modules.append(holder)
        if not code.co_filename.startswith(_LIBRARIES):
            lines.append((code.co_filename, frame.f_lineno or 0))
        elif code.co_filename == _FUNCTIONAL and not lines:
            functions.append(code.co_name)
        frame = frame.f_back
    named = ((*named, root) for root in reversed(modules) for named in root.named_modules())
    paths = (path or type(root).__name__ for path, module, root in named if module is modules[0])
    file, line = lines[0] if lines else ("", 0)
    return Place(next(paths, ""), file, line, "".join(functions[:1]), -1 if is_input else newest_node())


def shown_line(file: str, line: int) -> str:
    """``model.py:23``, from the current folder on; or with the file's own folder."""
    path = Path(file)
    return f"{os.path.relpath(path) if path.is_relative_to(os.getcwd()) else Path(*path.parts[-2:])}:{line}"


def operation_of(name: str) -> str:
    """``Addmm`` for ``AddmmBackward0``, the name of an autograd node."""
    return re.sub(r"Backward\d*$", "", name)


def holders_behind(roots: Iterable[Tensor | Node | None], number: int = 0) -> Iterator[tuple[object, str]]:
    """What is packed for the nodes behind ``roots``, from the node ``number`` on, each with the operation of its node.
    """
    for node in nodes_behind(roots, lambda node: number_of(node) >= number):
        yield from ((packed, operation_of(node_name(node))) for packed in packed_by(node))
