"""``checkpoint_layers``: layers of a model that are regions; with a budget, as few calls of them as it takes.

Without a selection, the layers are the repeated blocks of the model, found by what they are.
"""
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import nn

from torchckpt.errors import CheckpointError, Fault, called, raise_fault
from torchckpt.layers.follow import Begin, Enter, Steps
from torchckpt.layers.known import CALLER, KnownSteps, Limit
from torchckpt.layers.plan import LayersPlan
from torchckpt.modules import faults_of_lazy, is_compiled
from torchckpt.notices import notice
from torchckpt.planning.budget import Budget, read, trouble
from torchckpt.planning.figures import Drawn
from torchckpt.regions.core.options import Options
from torchckpt.regions.wrap.layers import Layers, LayersHandle, Removable, Selector, wrap_layers
from torchckpt.regions.wrap.module import ENTER
from torchckpt.typing import ContextFunction, DeterminismCheck

__all__ = ["PlannedLayers", "checkpoint_layers"]

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


_WORKS = 'checkpoint_layers(model, "layers.*", budget="60GiB")'


class PlannedLayers(LayersHandle, Drawn):
    """Undoes one :func:`checkpoint_layers`, and shows the plan that is made for a budget."""

    def __init__(self, layers: Layers, handles: Sequence[Removable], steps: Steps | None = None) -> None:
        super().__init__(layers, handles, CALLER)
        self._steps = steps

    def remove(self) -> None:
        if self._steps is not None:
            self._steps.remove()
        super().remove()

    @property
    def plan(self) -> LayersPlan | None:
        """The plan that was followed last; None before the second step, and without a budget."""
        return None if self._steps is None else self._steps.plan

    def report(self) -> LayersPlan:
        """The plan that was followed last, beside the second step of it; ``print()`` shows a table.

        Raises:
            CheckpointError: there is no plan yet: it is made when the second step begins. Without a budget, and in a
                copy of the model, there never is one.
        """
        if self._steps is None:
            rule = f"{CALLER}: there is no plan: every call is recomputed without a budget, and in a copy of a model"
            raise CheckpointError(str(Fault(rule, "report() or draw() there", f"handle.remove(), and then {_WORKS}")))
        if self.plan is None:
            rule = f"{CALLER}: there is no plan: with a budget it is made when the second step begins"
            works = "print(handle.report()) after some steps"
            raise CheckpointError(str(Fault(rule, "report() or draw() before that", works)))
        return self.plan

    def _svg(self) -> str:
        """The step that keeps everything, and the planned one, each with its memory under the budget."""
        return self.report().draw()


@called(CALLER)
def checkpoint_layers(
    model: nn.Module,
    layers: Selector | Sequence[Selector] | Set[Selector] | None = None,
    *,
    every: int = 1,
    budget: Budget | None = None,
    device_memory: Budget | None = None,
    host: Budget | None = None,
    preserve_rng_state: bool = True,
    generators: Sequence[torch.Generator] = (),
    determinism_check: DeterminismCheck = "default",
    context_fn: ContextFunction | None = None,
    debug: bool = False,
    early_stop: bool = True,
) -> PlannedLayers:
    """From now on, run every call of the chosen layers of ``model`` as a region: :func:`checkpoint_module` for each.
    With a budget, keep as many of the calls as fit it, those that save the most time.

    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))
    >>> handle = torchckpt.checkpoint_layers(model, torch.nn.Sequential, every=2)
    >>> handle
    <checkpoint_layers: 2 modules: 0, 2>
    >>> handle.remove()
    >>> with torchckpt.checkpoint_layers(model, ["0", "[12]"]) as handle:
    ...     print(handle)
    checkpoint_layers: 3 modules
      0  Sequential
      1  Sequential
      2  Sequential

    Args:
        model: the module whose submodules are chosen. It is never chosen itself.
        layers: a class; a name as in ``model.named_modules()``, in which ``*``, ``?`` and ``[...]`` stand for parts
            of what is between two dots, and ``**`` for any number of such parts, none included; a function that is
            called with each submodule and says whether it is one; or several of these, in a list, a tuple or a set.
            Each of them must choose something. A module that stands in several places, or is chosen twice, is one.
            With a budget it may be left out: the repeated blocks, which are the modules of the longest lists of modules
            of one class and one shape; the handle says which, and so does one line on stderr where that is a terminal,
            else in the log.
        every: of those, in the order of ``model.named_modules()``, the first and then every n-th. Not with a budget.
        budget: bytes that a step may take above what is there before it: a number, a size such as ``"60GiB"``, or a
            share such as ``"50%"`` of what the largest known step takes if everything is kept. The first step
            recomputes every call and is counted. When the second begins, the plan is made, which is followed from then
            on; so for each shape of the inputs. If everything fits, no call is a region.
        device_memory: in place of ``budget``, the bytes of the whole device, such as ``"80GB"``. What is allocated
            before a step is taken off. For devices that count what is allocated.
        host: with a budget: bytes in the memory of the host that calls may be sent to and come back from, if that takes
            less time than recomputing them. When the second step begins, it is measured how fast. Default: none.
        preserve_rng_state, generators, determinism_check, context_fn, debug, early_stop: as in :func:`checkpoint`.

    Returns:
        A handle with ``names`` and ``remove()``; as a context manager it removes at its end. With a budget also
        ``plan``, ``report()`` and ``draw()``.

    Raises:
        ArgumentError: all faults of the call in one message: what chooses nothing, one layer inside of another, a
            ``ModuleList``, which is never called, and all that :func:`checkpoint_module` refuses. Nothing is changed.
        BudgetInfeasible: when the second step begins: the budget is below what a step takes that recomputes every
            call. It says how much is enough. Of steps that begin alike and of which one fits: at a later call.
    """
    options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop, debug)
    if isinstance(model, nn.Module):
        _take_idle(model)
    if budget is None and device_memory is None and host is None and layers is not None:
        return PlannedLayers(*wrap_layers(model, layers, every, options))
    faults = list(_budget_faults(model, every, budget, device_memory, host))
    if layers is None and isinstance(model, nn.Module) and not faults:
        layers = repeated(model)
        notice(f"{CALLER} takes {len(layers)} repeated blocks: {layers[0]} to {layers[-1]}")
    chosen, handles = wrap_layers(model, [nn.Module] if layers is None else layers, every, options, faults)
    steps = Steps(model, KnownSteps(tuple(chosen), Limit(budget, device_memory, host)))
    for number, layer in enumerate(chosen.values()):
        layer.__dict__[ENTER] = Enter(steps, number)
    handles.append(model.register_forward_pre_hook(Begin(steps), with_kwargs=True))
    return PlannedLayers(chosen, handles, steps)


def _take_idle(model: nn.Module) -> None:
    """Take off the hooks that a copy has of the model it is a copy of: no handle has them, and they do nothing."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Begin) and hook.steps is None:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _budget_faults(
    model: object, every: object, budget: object, device_memory: object, host: object
) -> Iterator[Fault]:
    if budget is None and device_memory is None:
        if host is None:
            yield Fault("neither layers nor a budget is given", "checkpoint_layers(model)", _WORKS)
        else:
            rule = "a host is given without a budget, and with no limit on the device nothing has to leave it"
            yield Fault(rule, f"host={host!r}", 'budget="60GiB", host="200GiB"')
    if budget is not None and device_memory is not None:
        received = f"budget={budget!r}, device_memory={device_memory!r}"
        yield Fault("both a budget and the memory of the device are given", received, "the one or the other")
    if every != 1:
        received = f"every={every!r} and a budget"
        yield Fault("every is given with a budget, which decides what is recomputed", received, _WORKS)
    for name, given in (("budget", budget), ("device_memory", device_memory), ("host", host)):
        amount = read(given)
        most = sys.float_info.max if amount is None or not amount.is_share else 1 if name == "budget" else 0
        if given is not None and (amount is None or amount.number > most):
            shares = ", or a share of at most 100% of what a step takes that keeps everything" * (name == "budget")
            rule = f"{name} is not bytes above 0, or a size with a unit such as kB, MiB or GB{shares}"
            yield Fault(rule, f"{name}={trouble(given)}", f'{name}="60GiB"')
    if isinstance(model, nn.Module):
        if is_compiled(model):
            works = "for layer in model.layers: layer.compile(); or graph.backend(budget=...)"
            yield Fault("the model is compiled as a whole, so no call of a layer is seen", type(model).__name__, works)
        yield from faults_of_lazy(model.named_parameters(), f"model(*inputs), once, before {CALLER}(..., budget=...)")
        if any(module.__dict__.get(ENTER) is not None for module in model.modules()):
            rule = "layers of the model have a budget already"
            yield Fault(rule, f"a second {CALLER}(..., budget=...)", "handle.remove() first")
