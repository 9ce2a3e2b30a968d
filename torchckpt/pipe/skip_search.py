"""Skip search: finds the layer that stashes a skip by reading source code, for an error that names both layers."""
from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torchckpt.pipe.partition import Layer
    from torchckpt.pipe.skip import Name

__all__ = ["stasher_behind"]


def stasher_behind(layers: Sequence[Layer], name: Name, popper: str) -> str | None:
    """The first layer, from ``popper`` on, whose source code stashes ``name``; None if there is none."""
    words = [str(layer) for layer in layers]
    first = words.index(popper) if popper in words else 0
    for layer in layers[first:]:
        if any(name[1] in _stashed_by(module) for module in layer.module.modules()):
            return str(layer)
    return None


def _stashed_by(module: nn.Module) -> Iterator[str]:
    """The names that the forward of ``module`` stashes, if they are literals or attributes of ``module``."""
    forward: Any = type(module).forward
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "stash" and node.args:
            name = _read(node.args[0], module)
            if name is not None:
                yield name


def _read(node: ast.expr, module: nn.Module) -> str | None:
    """The value of ``"a"``, of ``self.name``, or of an f-string of these; None for other expressions."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return str(module.__dict__[node.attr]) if node.attr in module.__dict__ else None
    if isinstance(node, ast.JoinedStr):
        parts = [_read(part.value if isinstance(part, ast.FormattedValue) else part, module) for part in node.values]
        return None if None in parts else "".join(map(str, parts))
    return None
