"""Layout: where the modules of a region's function keep their parameters, buffers and generators."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain, count, takewhile
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchckpt.modules import OF_EVERY_MODULE, is_compiled, is_module, is_of_torch, module_of, uncompiled
from torchckpt.regions.private import norm_layer, set_version
from torchckpt.regions.state.ambient import Generator
from torchckpt.regions.state.host_random import as_generator, generators_in
from torchckpt.regions.state.norms import COUNTER, STATISTICS, updates
from torchckpt.regions.state.settings import Key, Settings
from torchckpt.regions.state.walk import reach_of
from torchckpt.tensors import of_class, version_of
from torchckpt.typing import Function

__all__ = ["Copy", "Known", "Layout", "Modules", "NamesModules", "known_of", "layout_of", "lengths_of", "values_of"]


class Copy:
    """A copy of a buffer at one version. ``values`` is None if the copy was too large to make, or to keep.

    BatchNorm moves its statistics without their version counters: its counter of batches tells. So ``table`` is where
    the buffer is if it is a statistic, and else None.
    """

    __slots__ = ("_buffer", "_class", "_count", "_counter", "values", "version")

    def __init__(
        self, buffer: Tensor, table: Mapping[str, Tensor | None] | None = None, has_values: bool = True
    ) -> None:
        counter = None if table is None else table.get(COUNTER)
        self._class = buffer.__class__
        self._buffer, self._counter = weakref.ref(buffer), None if counter is None else weakref.ref(counter)
        self.version, self._count = version_of(buffer), None if counter is None else version_of(counter)
        self.values: Tensor | None = buffer.detach().clone() if has_values else None

    def clone(self) -> Tensor:
        """A new tensor with the buffer's old values and version, which a replay may change."""
        assert self.values is not None
        return set_version(of_class(self._class, self.values.clone()), self.version)

    def is_of(self, buffer: Tensor, table: Mapping[str, Tensor | None] | None = None) -> bool:
        """Whether ``buffer`` has not changed since."""
        counter = None if table is None else table.get(COUNTER)
        if self._buffer() is not buffer or self.version != version_of(buffer):
            return False
        if self._counter is None or counter is None:
            return self._counter is None and counter is None
        return self._counter() is counter and self._count == version_of(counter)


class Modules(tuple[nn.Module, ...]):
    """The modules that a function uses which is no module."""

    layout: Layout | None = None
    """The layout that an earlier call made."""


class NamesModules:
    """A function that names the modules that it uses. Its class is asked: a mock or a proxy answers any attribute."""

    region_modules: Modules


class _End:
    """A sentinel after the values of one kind. An added value shifts it, so a comparison sees it."""

    _version = 0


class Layout:
    """The layout of ``owners`` and their submodules, as they are now. It holds the owners by weak references only.

    Left out are buffers that torch's norm layers are updating, where their calls alone read them (``norms.py``);
    scripted modules, which have no Python dictionaries; and weights that FSDP1 sets, as views of its flat parameter.
    """

    def __init__(self, owners: Sequence[nn.Module], on_owner_freed: Callable[[Any], object] | None = None) -> None:
        each_once = dict.fromkeys(chain.from_iterable(owner.modules() for owner in owners))
        modules = [module for module in each_once if not isinstance(module, torch.jit.ScriptModule)]
        each = [*enumerate(modules, start=len(modules))]
        flattened = {place for place, module in each if _is_flattened(module)}
        self.owners = [weakref.ref(owner, on_owner_freed) for owner in owners]
        self.dicts = [vars(module) for module in modules]
        self.lengths = lengths_of(self.dicts)
        """An attribute that is added later changes these, and makes a new layout necessary."""
        self.parameters: list[dict[str, Any]] = [{} if at in flattened else m._parameters for at, m in each]
        self.copies: dict[Key, Copy] = {}
        self.changing: set[Key] = set()
        """Buffers that a forward has changed in place or replaced, and ``changing_parameters``."""
        limited = (place for place, module in enumerate(modules) if vars(module).get("max_norm") is not None)
        self.changing_parameters: set[Key] = {(at, "weight") for at in limited if "weight" in self.parameters[at]}
        """The parameters that a forward has changed in place. An embedding with ``max_norm`` will."""
        self.changing |= self.changing_parameters
        self.rearranged = False
        """Whether a forward has left other modes, children, parameters or buffers than it found, or flags of these."""
        self._buffers: list[dict[str, Any]] = [module._buffers for module in modules]
        counted = [(place, buffers) for place, buffers in enumerate(self._buffers) if COUNTER in buffers]
        self.statistics = {(place, name): buffers for place, buffers in counted for name in STATISTICS}
        """By the key of a statistic, the table of buffers that has it. All are copied: they are small."""
        uncounted = (key for key, buffers in self.statistics.items() if buffers[COUNTER] is None)
        self.unversioned: set[Key] = {key for key in uncounted if self.statistics[key].get(key[1]) is not None}
        """The buffers that change without their version counter, as by ``.data``."""
        inside: list[dict[str, Any]] = [module._modules for module in modules]
        end: dict[str, Any] = {"": _End()}
        self.children = values_of([*inside, end])
        self._inside = [(table, table.copy()) for table in inside]
        norms = [(place, m) for place, m in enumerate(modules) if isinstance(m, norm_layer) and is_of_torch(m)]
        reach = {cls: reach_of(cls) for cls in {*map(type, modules)}}
        # Code of others names their statistics, as where a convolution and a BatchNorm are trained as one.
        readers = {cls for cls in reach if not (issubclass(cls, norm_layer) or reach[cls].names.isdisjoint(STATISTICS))}
        replicas = {cls for cls in reach if issubclass(cls, DistributedDataParallel)}  # which send buffers
        readers |= replicas
        setters = {cls for cls in reach if not reach[cls].names.isdisjoint(("eval", "train"))}

        def are_inside(classes: Set[type]) -> set[int]:
            return {id(inner) for module in modules if norms and type(module) in classes for inner in module.modules()}

        read, evaluated = are_inside(readers), are_inside(setters)
        self.norms = {place: weakref.ref(norm) for place, norm in norms if id(norm) not in read}
        self._evaluated = {place for place, norm in norms if id(norm) in evaluated}
        """Where a forward may set modes: it reads statistics in one call, and updates them in another."""
        others = [buffers for place, buffers in enumerate(self._buffers) if place not in self.norms]
        self._unwatched = [of for place, of in enumerate(self.dicts) if place not in self.norms]
        self._of_torch = [vars(module) for module in modules if is_of_torch(module)]
        self.tables: list[dict[str, Any]] = [*inside, end, *self.parameters, end, *others]
        """The tables that each call compares: children, parameters, and the buffers of modules but norm layers."""
        self.without_buffers = len(values_of(self.tables[: -len(others)] if others else self.tables))
        named = ((at, _names_of(torch.is_tensor, module)) for at, module in each if at not in flattened)
        self._attributes = [(place, name) for place, names in named for name in names]
        self.is_simple = not (self.norms or self._attributes or replicas)
        """Whether ``tables`` has all: there are no norm layers, no tensors that are plain attributes, and no DDP."""
        self.is_lazy = any(is_lazy(value) for value in values_of([*self.parameters, *self._buffers]))
        """Whether a parameter or buffer has no shape yet: the first call gives it one."""
        self._asking = {place for place, m in enumerate(modules) if "is_recomputing" in reach[type(m)].names}
        self.settings = Settings(modules, self._asking, flattened)
        own = (reach[type(module)] for module in modules if not is_of_torch(module))
        self.may_set = any(of_class.may_set(self.settings.has_tables) for of_class in own)
        """Whether the code of a forward may set what its modules hold."""
        self._sources = [source for of_class in reach.values() for source in of_class.sources]
        self._generators = [(vars(module), name) for module in modules for name in _names_of(as_generator, module)]

    def norm_layers(self) -> list[nn.Module]:
        """Those of torch's whose buffers their calls alone read."""
        return [layer for norm in self.norms.values() if (layer := norm()) is not None]

    def buffers(self) -> Iterator[tuple[Key, Tensor | None]]:
        """The buffers, and the tensors that are plain attributes of modules (old hooks put weights there)."""
        for place, buffers in enumerate(self._buffers):
            if buffers and (place in self._evaluated or not (place in self.norms and updates(self.norms[place]()))):
                for name, tensor in buffers.items():
                    yield (place, name), tensor
        for key in self._attributes:
            value = self.dict_of(key).get(key[1])
            if value is None or isinstance(value, Tensor):
                yield key, value

    def added_attributes(self, own: Set[Key] = frozenset()) -> Iterator[Key]:
        """The attributes added since this layout was made that a replay must not find (``Settings.added``)."""
        if self.lengths != lengths_of(self.dicts):
            yield from self.settings.added(self._attributes, own)

    def asks(self, key: Key) -> bool:
        """Whether code of the module that has the buffer of ``key`` asks ``is_recomputing()``."""
        return key[0] % len(self.dicts) in self._asking

    @property
    def has_asking(self) -> bool:
        """Whether code of a module asks ``is_recomputing()``."""
        return bool(self._asking)

    def dict_of(self, key: Key) -> dict[str, Any]:
        """The dictionary that holds the buffer or attribute of ``key``."""
        place = key[0]
        return self._buffers[place] if place < len(self._buffers) else self.dicts[place - len(self._buffers)]

    def generators(self) -> list[Generator]:
        """The generators that modules hold as attributes, or that their code names."""
        held = [attributes.get(name) for attributes, name in self._generators]
        return generators_in([*held, *(source() for source in self._sources)])

    def flags(self) -> list[Any]:
        """What the settings are now, and at the end whether each parameter requires grad."""
        flags, tensors = self.settings.now()
        if tensors:
            self.is_simple = False
            self._attributes += [key for key in tensors if key not in self._attributes]
        return flags + self.graded()

    def graded(self) -> list[bool]:
        """Whether each parameter requires grad."""
        return [p is not None and p.requires_grad for table in self.parameters for p in table.values()]

    def held(self, own: Set[Key]) -> list[Any]:
        """What the modules hold now, but for settings and the buffers of norm layers; of dictionaries and hooks, how
        many there are. ``own``: attributes that were added."""
        hooks = chain.from_iterable((of["_forward_hooks"], of["_forward_pre_hooks"]) for of in self._unwatched)
        attributes = (self.dict_of(key).get(key[1]) for key in (*self._attributes, *own))
        return [*values_of([*self._of_torch, *self.tables]), *attributes, *map(len, chain(self.dicts, hooks))]

    def has_other_children(self) -> bool:
        """Whether modules have other children now, by their names: a forward may have put one back at the end."""
        return any(now != then for now, then in self._inside)

    def names(self) -> list[str]:
        """The names of the parameters, in their order now: one that a forward takes away and puts back is the last."""
        return [*chain.from_iterable(self.parameters)]

    def parameters_of(self, values: list[Any], names: list[str]) -> dict[Key, nn.Parameter | None] | None:
        """The parameters among ``values`` of the tables, which had ``names``; None if there are other names now."""
        first, end = len(self.children), self.children[-1]
        parameters = takewhile(lambda value: value is not end, values[first:])
        now = [(place, name) for place, table in enumerate(self.parameters) for name in table]
        keys = [(place, name) for (place, _), name in zip(now, names)]
        return dict(zip(keys, parameters)) if {*keys} == {*now} and len(names) == len(now) else None

    @property
    def is_compiled(self) -> bool:
        """Whether a module is compiled, in place or by ``torch.compile(module)``."""
        return any(is_compiled(module) for owner in self.live_owners() for module in owner.modules())

    def live_owners(self) -> list[nn.Module]:
        """The owners that have not been freed."""
        return [owner for reference in self.owners if (owner := reference()) is not None]

    def path_of(self, tensor: Tensor) -> str:
        """The name of a parameter or buffer, with the class of the module."""
        for owner in self.live_owners():
            for name, candidate in chain(owner.named_parameters(), owner.named_buffers()):
                if candidate is tensor:
                    return f"{type(owner).__name__}.{name}"
        return "a tensor of its modules"


class Known:
    """What is known of a module: by its keys each layout of which it is the newest owner, and its tree
    (``reached.py``).

    The module itself holds this, at a place that is no attribute of its own. A table here would keep each module for
    ever that is held from inside, as by a hook of a child that is a method of its parent: the layout holds children.
    So would an older owner keep modules that are made in each step. Copies and pickles of the module hold None instead.
    """

    __slots__ = ("layouts", "number", "tree")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.layouts: dict[int | tuple[int, ...], Layout] = {}
        self.tree: Any = None

    def __reduce__(self) -> Any:
        return type(None), ()


_KNOWN = "_torchckpt_known"
_numbers = count()


def known_of(module: nn.Module) -> Known:
    """What is known of ``module``; new and empty if nothing is."""
    attributes: dict[str, Any] = getattr(vars(module).get("_forward_hooks"), "__dict__", {})  # of an OrderedDict
    known = attributes.get(_KNOWN)
    if known is None:
        known = attributes[_KNOWN] = Known()
    return known


def layout_of(function: Function, args: Sequence[Any] = ()) -> tuple[Layout, list[Any]] | None:
    """The layout of the modules of ``function`` and the values of its tables; None if there are no such modules.

    The modules are: ``function`` itself if it is one, the module that it is a method of, those that it names
    (``NamesModules``), and those among ``args``; also through partials. The layout is made at the first call, and again
    when the modules inside have changed.
    """
    owner = function.__self__ if type(function) is MethodType else function
    layout, modules = known_of(owner).layouts.get(id(owner)) if is_module(owner) else None, None
    if layout is None and isinstance(owner, NamesModules):
        modules = owner.region_modules
        layout = modules.layout
    if layout is None or args or (modules is None and layout.owners[0]() is not owner):
        owners = _owners(function, args)
        if not owners:
            return None
        layout = _known_of_newest(owners).layouts.get(_key(owners))
        if layout is None or not all(reference() is owner for reference, owner in zip(layout.owners, owners)):
            layout = _new_layout(owners)
    values = values_of(layout.tables)
    # Modules compare by identity, so != is enough.
    if values[: len(layout.children)] != layout.children or lengths_of(layout.dicts) != layout.lengths:
        layout = _new_layout(layout.live_owners())
        values = values_of(layout.tables)
    if modules is not None and not (args or layout.is_lazy):
        modules.layout = layout
    return layout, values


def _key(owners: Sequence[nn.Module]) -> int | tuple[int, ...]:
    return id(owners[0]) if len(owners) == 1 else tuple(map(id, owners))


def _known_of_newest(owners: Sequence[nn.Module]) -> Known:
    return max(map(known_of, owners), key=attrgetter("number"))


def _new_layout(owners: Sequence[nn.Module]) -> Layout:
    key, layouts = _key(owners), _known_of_newest(owners).layouts
    forget = layouts.pop
    layout = Layout(owners, lambda _: forget(key, None))  # with the module, and not with the next garbage collection
    if not layout.is_lazy:
        layouts[key] = layout
    return layout


def _owners(function: Function, args: Sequence[Any]) -> list[nn.Module]:
    owners = [arg for arg in args if is_module(arg)]
    if isinstance(function, NamesModules):
        return [*function.region_modules, *owners]
    if isinstance(function, partial):
        return _owners(function.func, [*function.args, *function.keywords.values(), *owners])
    owner = module_of(uncompiled(function))
    return owners if owner is None else [owner, *owners]


def values_of(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """All values of ``tables``, in order."""
    return list(chain.from_iterable(map(_VALUES, tables)))


_VALUES: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


def lengths_of(tables: Iterable[dict[str, Any]]) -> list[int]:
    return list(map(len, tables))


def _names_of(is_one: Callable[[object], object], module: nn.Module) -> list[str]:
    """The names of attributes whose value ``is_one``; in layers that are not torch's, also those that hold None."""
    may_come = not is_of_torch(module)
    return [
        name
        for name, value in vars(module).items()
        if (value is None and may_come and name not in OF_EVERY_MODULE) or is_one(value)
    ]


def _is_flattened(module: nn.Module) -> bool:
    """Whether FSDP1 manages the parameters of ``module``. FSDP2 leaves the first mark, too."""
    if not vars(module).get("_is_fsdp_managed_module"):
        return False
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    is_whole = all(isinstance(p, nn.Parameter) and not hasattr(p, "_fsdp_flattened") for p in parameters)
    return not (is_whole and vars(module).get("_fsdp_use_orig_params"))
