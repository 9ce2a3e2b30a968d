"""Find: the repeated blocks of a model, by what they are."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, TypeAlias

from torch import nn

from torchckpt.errors import Fault, raise_fault

__all__ = ["repeated"]

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)
_Blocks: TypeAlias = "dict[str, nn.Module]"


def repeated(model: nn.Module) -> list[str]:
    """The names of the repeated blocks: what the longest lists of like modules hold.

    Modules are alike if they have one class, and parameters of the same shapes; where no two are, if they have one
    class. Those that have no modules inside, and a class that is none of torch's, count where there are no others. A
    list with two such modules counts with all of its modules of that class, and with the others where these are fewer,
    as in models with two kinds of layers, unless they hold longer lists, as a backbone beside its heads. Nothing inside
    of these is looked at. Of several lists, those count that hold the same class as the longest, or are at least a
    quarter as long; and what is of their classes in any other list, unless the class is torch's.

    Raises:
        ArgumentError: there are none.
    """
    alike: tuple[Callable[[nn.Module], Any], ...] = _shapes, type
    for is_block, like in product((_has_modules, _is_own), alike):
        lists = [*_lists(model, is_block)]
        groups = _groups(lists, like)
        if groups:
            break
    else:
        inner = [name for name, child in model.named_modules() if name and _has_modules(child)]
        inner = inner or [f"{name}.*".strip(".") for name, child in model.named_modules() if _is_list(child)]
        received = f"a {type(model).__name__} with no list of like blocks"
        works = f'checkpoint_layers(model, "{inner[0]}", budget=...)' if inner else "torchckpt.checkpoint(function, x)"
        others = f"; it has {', '.join(inner[:6])}" if inner else ""
        raise_fault(Fault("no repeated blocks were found: say which layers", f"{received}{others}", works))
    longest = max(groups, key=len)
    first = {type(block) for block in longest.values()}
    taken = [group for group in groups if len(group) * 4 >= len(longest) or first & set(map(type, group.values()))]
    blocks = {path: block for group in taken for path, block in group.items()}
    classes = {type(block) for block in blocks.values() if _is_own(block)}
    names: list[str] = []
    for listed in lists:
        same = [path for path, block in listed.items() if path in blocks or type(block) in classes]
        names += [path for path in same if not _is_inside(path, names)]
    return names


def _groups(lists: Sequence[_Blocks], like: Callable[[nn.Module], Any]) -> list[_Blocks]:
    """Of each list, the blocks of the class of which it has most alike, if two are, and the others where these are
    fewer and hold no longer lists; none is inside of another."""

    def longest_in(path: str) -> int:
        return max((len(each) for each in lists if _is_inside(next(iter(each)), [path])), default=0)

    groups: list[_Blocks] = []
    for listed in lists:
        counts = Counter(map(like, listed.values()))
        best = max(listed.values(), key=lambda block: counts[like(block)])
        if counts[like(best)] > 1 and not any(_is_inside(next(iter(listed)), group) for group in groups):
            of_class = {path: block for path, block in listed.items() if type(block) is type(best)}
            if len(of_class) * 2 > len(listed):
                most = max(len(of_class), *map(longest_in, of_class))
                of_class = {path: block for path, block in listed.items() if longest_in(path) <= most}
            groups.append(of_class)
    return groups


def _lists(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> Iterator[_Blocks]:
    """The blocks of each list that has some, from outside."""
    for name, module in model.named_modules():
        children = module.named_children() if isinstance(module, _CONTAINERS) else ()
        blocks = {f"{name}.{place}".strip("."): child for place, child in children if is_block(child)}
        if blocks:
            yield blocks


def _is_inside(path: str, names: Iterable[str]) -> bool:
    return any(path.startswith(f"{name}.") for name in names)


def _shapes(module: nn.Module) -> Any:
    return type(module), *((name, parameter.shape) for name, parameter in module.named_parameters())


def _is_block(module: nn.Module) -> bool:
    """Whether it is called, and has parameters."""
    return not isinstance(module, _LISTS) and next(module.parameters(), None) is not None


def _has_modules(module: nn.Module) -> bool:
    """Whether it is a block with modules inside."""
    return _is_block(module) and next(module.children(), None) is not None


def _is_own(module: nn.Module) -> bool:
    """Whether it is a block of a class that is none of torch's."""
    return _is_block(module) and not type(module).__module__.startswith("torch.nn.")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and sum(map(_is_block, module.children())) > 1
