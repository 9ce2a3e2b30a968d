"""Find: the repeated blocks of a model, by what they are."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import nn

from torchckpt.errors import Fault, raise_fault

__all__ = ["repeated"]

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)
_Group: TypeAlias = "dict[str, nn.Module]"


def repeated(model: nn.Module) -> list[str]:
    """The names of the repeated blocks: what the longest lists of like modules hold.

    Modules are alike if they have one class, and parameters of the same shapes. A list with two such modules counts
    with all of its modules of that class, and nothing inside of these is looked at. Of several lists, those count that
    hold the same class as the longest, or are at least half as long.

    Raises:
        ArgumentError: there are none.
    """
    groups = list(_groups("", model))
    if not groups:
        inner = [name for name, child in model.named_modules() if name and _is_block(child)]
        received = f"a {type(model).__name__} with no list of like blocks"
        works = f'checkpoint_layers(model, "{inner[0]}", budget=...)' if inner else "torchckpt.checkpoint(function, x)"
        others = f"; it has {', '.join(inner[:6])}" if inner else ""
        raise_fault(Fault("no repeated blocks were found: say which layers", f"{received}{others}", works))
    longest = max(groups, key=len)
    classes = {type(block) for block in longest.values()}
    taken = [group for group in groups if len(group) * 2 >= len(longest) or classes & set(map(type, group.values()))]
    return [name for group in taken for name in group]


def _groups(name: str, module: nn.Module) -> Iterator[_Group]:
    """The lists of like modules, from outside; none is inside of another."""
    group = _like(name, module) if isinstance(module, _CONTAINERS) else {}
    if group:
        yield group
    for place, child in module.named_children():
        path = f"{name}.{place}".strip(".")
        if path not in group:
            yield from _groups(path, child)


def _like(name: str, container: nn.Module) -> _Group:
    """The blocks in ``container`` of the class of which it has most alike; nothing if no two are."""
    blocks = {f"{name}.{place}".strip("."): child for place, child in container.named_children() if _is_block(child)}
    alike: dict[Any, int] = {}
    for block in blocks.values():
        shapes = (type(block), *((name, parameter.shape) for name, parameter in block.named_parameters()))
        alike[shapes] = alike.get(shapes, 0) + 1
    best = max(alike, key=alike.__getitem__, default=None)
    if best is None or alike[best] < 2:
        return {}
    return {path: block for path, block in blocks.items() if type(block) is best[0]}


def _is_block(module: nn.Module) -> bool:
    """Whether it is called, has modules inside, and has parameters."""
    has_inner = next(module.children(), None) is not None
    return has_inner and not isinstance(module, _LISTS) and next(module.parameters(), None) is not None
