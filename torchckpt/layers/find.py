"""Find: the repeated blocks of a model, by what they are."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import nn

from torchckpt.errors import Fault, raise_fault

__all__ = ["repeated"]

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)
_Group: TypeAlias = "dict[str, nn.Module]"


def repeated(model: nn.Module) -> list[str]:
    """The names of the repeated blocks: what the longest lists of like modules hold.

    Modules are alike if they have one class, and parameters of the same shapes; where no two are, if they have one
    class. A list with two such modules counts with all of its modules of that class, and nothing inside of these is
    looked at. Of several lists, those count that hold the same class as the longest, or are at least half as long; and
    what is of their classes in any other list, unless the class is torch's.

    Raises:
        ArgumentError: there are none.
    """
    groups = list(_groups("", model, _shapes)) or list(_groups("", model, type))
    if not groups:
        inner = [name for name, child in model.named_modules() if name and _is_block(child)]
        received = f"a {type(model).__name__} with no list of like blocks"
        works = f'checkpoint_layers(model, "{inner[0]}", budget=...)' if inner else "torchckpt.checkpoint(function, x)"
        others = f"; it has {', '.join(inner[:6])}" if inner else ""
        raise_fault(Fault("no repeated blocks were found: say which layers", f"{received}{others}", works))
    longest = max(groups, key=len)
    first = {type(block) for block in longest.values()}
    taken = [group for group in groups if len(group) * 2 >= len(longest) or first & set(map(type, group.values()))]
    blocks = {path: block for group in taken for path, block in group.items()}
    classes = {type(block) for block in blocks.values() if not type(block).__module__.startswith("torch.nn.")}
    return list(_outermost("", model, blocks, classes))


def _outermost(name: str, module: nn.Module, blocks: _Group, classes: set[type[nn.Module]]) -> Iterator[str]:
    """The names of ``blocks``, and of what else is of ``classes`` in a list; none is inside of another."""
    for place, child in module.named_children():
        path = f"{name}.{place}".strip(".")
        is_like = isinstance(module, _CONTAINERS) and type(child) in classes and _is_block(child)
        if path in blocks or is_like:
            yield path
        else:
            yield from _outermost(path, child, blocks, classes)


def _groups(name: str, module: nn.Module, like: Callable[[nn.Module], Any]) -> Iterator[_Group]:
    """The lists of like modules, from outside; none is inside of another."""
    group = _alike(name, module, like) if isinstance(module, _CONTAINERS) else {}
    if group:
        yield group
    for place, child in module.named_children():
        path = f"{name}.{place}".strip(".")
        if path not in group:
            yield from _groups(path, child, like)


def _alike(name: str, container: nn.Module, like: Callable[[nn.Module], Any]) -> _Group:
    """The blocks in ``container`` of the class of which it has most alike; nothing if no two are."""
    blocks = {f"{name}.{place}".strip("."): child for place, child in container.named_children() if _is_block(child)}
    counts = Counter(like(block) for block in blocks.values())
    best = max(blocks.values(), key=lambda block: counts[like(block)], default=None)
    if best is None or counts[like(best)] < 2:
        return {}
    return {path: block for path, block in blocks.items() if type(block) is type(best)}


def _shapes(module: nn.Module) -> Any:
    return type(module), *((name, parameter.shape) for name, parameter in module.named_parameters())


def _is_block(module: nn.Module) -> bool:
    """Whether it is called, has modules inside, and has parameters."""
    has_inner = next(module.children(), None) is not None
    return has_inner and not isinstance(module, _LISTS) and next(module.parameters(), None) is not None
