"""Layers of a model that become regions, chosen by class, by name, or by a function."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from types import UnionType
from typing import Any, TypeAlias, TypeGuard, Union, get_origin

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from torchckpt.errors import Fault, called, check, kind
from torchckpt.regions.core.options import DEFAULT, Options, check_options, shown
from torchckpt.regions.moved.region import LEAST_BYTES, Moving, least_bytes_faults
from torchckpt.regions.wrap.module import RegionHandle, Setting, as_region, module_faults

__all__ = ["Layers", "LayersHandle", "Removable", "Selector", "offload_layers", "offload_module", "wrap_layers"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Selector: TypeAlias = "str | type[Any] | UnionType | Callable[[nn.Module], bool]"
"""A name or a pattern of names, a class, or a function that says of a module whether it is one."""
Layers: TypeAlias = "dict[str, nn.Module]"
"""Layers by name."""
Removable: TypeAlias = RegionHandle | RemovableHandle
"""What undoes one module, or takes one hook away."""


class LayersHandle:
    """Undoes one ``checkpoint_layers`` or ``offload_layers``. Also a context manager, which undoes it at its end.

    ``names`` are those of the modules, in the order of the model. ``repr`` lists them, and ``print`` their classes too.
    """

    def __init__(self, layers: Layers, handles: Sequence[Removable], caller: str) -> None:
        self._caller = caller
        self.names = tuple(layers)
        self._classes = [type(layer).__name__ for layer in layers.values()]
        self._handles: Sequence[Removable] | None = handles  # a copy of the model has copies of these

    def remove(self) -> None:
        """Make all the modules plain again. A second call does nothing."""
        handles, self._handles = self._handles, None
        for handle in handles or ():
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{self._caller}: {self._count()}: {', '.join(self.names)}>"

    def __str__(self) -> str:
        width = max(map(len, self.names))
        rows = (f"  {name:<{width}}  {of}" for name, of in zip(self.names, self._classes))
        return "\n".join([f"{self._caller}: {self._count()}", *rows])

    def _count(self) -> str:
        noun = "module" if len(self.names) == 1 else "modules"
        return f"{len(self.names)} {noun}{', removed' if self._handles is None else ''}"


def wrap_layers(
    model: nn.Module,
    layers: Selector | Sequence[Selector] | Set[Selector],
    every: int,
    setting: Setting,
    others: Iterable[Fault] = (),
) -> tuple[Layers, list[Removable]]:
    """Make each chosen layer a module of which every call is a region.

    Args:
        others: faults of the call, to be told with those found here.

    Returns:
        The layers by name, and the handle of each.

    Raises:
        ArgumentError: with all faults. Nothing is changed.
    """
    selectors, verb = _listed(layers), "checkpoint" if isinstance(setting, Options) else "offload"
    works = f'{verb}_layers(model, Block); or {verb}_layers(model, "layers.*")'
    each_once = dict.fromkeys([*_call_faults(model, layers, every, works), *others])
    check_options(wrap_layers, setting if isinstance(setting, Options) else DEFAULT, each_once)
    chosen = _chosen(model, selectors, verb)
    check(_layer_faults(chosen, verb))
    taken = dict(list(chosen.items())[::every])
    with ExitStack() as undo:
        handles: list[Removable] = [undo.enter_context(as_region(layer, setting)) for layer in taken.values()]
        undo.pop_all()
    return taken, handles


def _listed(layers: Any) -> list[Any]:
    is_one = isinstance(layers, (str, bytes, nn.Module)) or not isinstance(layers, (Sequence, Set))
    return [layers] if is_one else list(layers)


# what is chosen -------------------------------------------------------------------------------------------------------


def _chosen(model: nn.Module, selectors: Sequence[Selector], verb: str) -> Layers:
    """The layers by their first name, in the order of the model."""
    places = {name: layer for name, layer in model.named_modules(remove_duplicate=False) if layer is not model}
    by_selector = [_matches(selector, places) for selector in selectors]
    check((_nothing(s, model, places, verb) for s, found in zip(selectors, by_selector) if not found))
    found = {id(layer) for matches in by_selector for layer in matches}
    names: dict[int, str] = {}
    for name, layer in places.items():
        if id(layer) in found:
            names.setdefault(id(layer), name)
    return {name: places[name] for name in names.values()}


def _matches(selector: Any, places: Layers) -> list[nn.Module]:
    if isinstance(selector, str):
        if selector in places:  # whatever is in it
            return [places[selector]]
        pattern = selector.split(".")
        return [layer for name, layer in places.items() if _fits(name.split("."), pattern)]
    if _is_class(selector):
        return [layer for layer in places.values() if isinstance(layer, selector)]
    asked = {id(layer): layer for layer in places.values()}
    return [layer for layer in asked.values() if selector(layer)]


def _is_class(selector: object) -> TypeGuard[type[Any] | UnionType]:
    return isinstance(selector, (type, UnionType)) or get_origin(selector) is Union


def _fits(parts: list[str], pattern: list[str]) -> bool:
    """Whether a name, in parts, is one of a pattern."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


# what is wrong --------------------------------------------------------------------------------------------------------


def _call_faults(model: object, layers: object, every: object, works: str) -> Iterator[Fault]:
    """Some of them several times: 32 layers in a list are one fault."""
    if not isinstance(model, nn.Module):
        yield Fault("the model is not an nn.Module", kind(model), works)
    for selector in _listed(layers):
        is_module = isinstance(selector, nn.Module)
        if is_module or not (isinstance(selector, str) or _is_class(selector) or callable(selector)):
            received = f"a module, {type(selector).__name__}" if is_module else shown(selector)
            yield Fault("layers has something that is no class, no name, and no function of a module", received, works)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        rule = "every is not a whole number of at least 1"
        yield Fault(rule, f"every={every!r}", "every=2, for the 1st, the 3rd, the 5th")
    if not _listed(layers):
        yield Fault("layers chooses nothing", f"layers={layers!r}", works)


def _nothing(selector: Any, model: nn.Module, places: Layers, verb: str) -> Fault:
    """The fault of a selector that chooses nothing."""
    if isinstance(selector, str):
        rule, received = "a name is that of no layer", f"{selector!r}, which no layer has"
    elif _is_class(selector):
        rule = "a class is that of no layer"
        received = f"{getattr(selector, '__name__', selector)}, of which no layer is one"
    else:
        rule = "a function chooses no layer"
        received = f"{shown(selector)}, which is false for every layer"
    if not places or (_is_class(selector) and isinstance(model, selector)):
        received = f"{received}; the model itself is a {type(model).__name__}"
        return Fault(rule, received, f"{verb}_module(model)")
    if any(type(layer).__name__ == selector for layer in places.values()):
        return Fault(rule, f"{received}: it is the name of a class", f"{verb}_layers(model, {selector})")
    return Fault(rule, received, f'{verb}_layers(model, "{_another(selector, model, places)}")')


def _another(selector: Any, model: nn.Module, places: Layers) -> str:
    """A name or a pattern that does choose something, near to ``selector`` if that is one."""
    known = dict.fromkeys([*map(_pattern_of, places), *places])
    close = _closest(selector, known) if isinstance(selector, str) else []
    inside = [f"{name}.*" for name, one in places.items() if isinstance(one, _CONTAINERS)]
    return str([*close, *(["*"] if isinstance(model, _CONTAINERS) else inside), *places][0])


def _closest(name: str, known: Iterable[str]) -> list[str]:
    """The first one of those that are closest: a pattern stands before the names that it has."""
    ratios = {one: SequenceMatcher(None, one, name).ratio() for one in known}
    best = max(ratios, key=ratios.__getitem__)
    return [best] if ratios[best] >= 0.5 else []


def _pattern_of(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _layer_faults(chosen: Layers, verb: str) -> Iterator[Fault]:
    names = {id(layer): name for name, layer in chosen.items()}
    for name, layer in chosen.items():
        for fault in module_faults(layer, verb):
            works = f'{verb}_layers(model, "{name}.*")' if fault.wrong.endswith("is called") else fault.works
            yield Fault(fault.wrong, f"{name}, a {fault.received}", works)
        inner = [names[id(child)] for child in layer.modules() if child is not layer and id(child) in names]
        if inner:
            more = f", and {len(inner) - 1} more" if inner[1:] else ""
            works = f"those around alone: {verb}_layers(model, {_pattern_of(name)!r}); or those inside alone"
            yield Fault("a chosen layer is inside of another", f"{inner[0]!r} is inside of {name!r}{more}", works)


# those whose calls move -----------------------------------------------------------------------------------------------


@called("offload_module")
def offload_module(module: nn.Module, *, min_bytes: int = LEAST_BYTES) -> RegionHandle:
    """From now on, run every call of ``module`` as :func:`offload` does.

    In place: ``state_dict`` keys, ``isinstance``, ``repr``, hooks, pickling and copying stay as they are, and a copy
    moves its tensors, too. Hooks of ``module`` run outside the region, those of its children inside.

    >>> handles = [torchckpt.offload_module(layer) for layer in model.layers]
    >>> handles[0].remove()           # this one keeps its activations on the device again

    Args:
        module: any ``nn.Module`` whose ``forward`` is a method of its class.
        min_bytes: as in :func:`offload`. Default: 1 MiB.

    Returns:
        A handle whose ``remove()`` makes the module plain again. A ``with`` block on the handle removes at its end.

    Raises:
        ArgumentError: ``module`` is no module, is a region already, or has its ``forward`` set on the instance; or
            ``min_bytes`` is no number of bytes.
    """
    check([*module_faults(module, "offload"), *least_bytes_faults(min_bytes)])
    return as_region(module, Moving(min_bytes))


@called("offload_layers")
def offload_layers(
    model: nn.Module,
    layers: Selector | Sequence[Selector] | Set[Selector],
    *,
    every: int = 1,
    min_bytes: int = LEAST_BYTES,
) -> LayersHandle:
    """From now on, run every call of the chosen layers of ``model`` as :func:`offload` does.

    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))
    >>> handle = torchckpt.offload_layers(model, torch.nn.Sequential, every=2)
    >>> handle
    <offload_layers: 2 modules: 0, 2>
    >>> handle.remove()

    Args:
        model: the module whose submodules are chosen. It is never chosen itself.
        layers: a class, a name or a pattern of names, a function of a module, or several of these: as in
            :func:`checkpoint_layers`.
        every: of those that are chosen, in the order of ``model.named_modules()``, the first and then every n-th one.
            A link that takes two forwards of a layer to copy one has the time for every second layer.
        min_bytes: as in :func:`offload`. Default: 1 MiB.

    Returns:
        A handle with ``names`` and ``remove()``; as a context manager it removes at its end.

    Raises:
        ArgumentError: all faults of the call in one message. Nothing is changed.
    """
    faults = least_bytes_faults(min_bytes)
    return LayersHandle(*wrap_layers(model, layers, every, Moving(min_bytes), faults), "offload_layers")
