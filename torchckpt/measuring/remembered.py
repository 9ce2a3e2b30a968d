"""Remembered: the steps that were counted, what tells one from another, and what becomes of a plan that takes too much.

The bytes of a step depend on its tensors and flags, what is trained, modes, autocast. Steps of a plan over ranks must
have that alike; else there is an error.
"""
from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, ScheduleError
from torchckpt.modules import imported

__all__ = [
    "LESS", "NEAR", "SHOWN", "Discarded", "Followed", "ModelSettings", "Remembered", "Settings", "Shapes",
    "Signature", "digest", "shapes_of",
]

Shapes: TypeAlias = tuple[Any, ...]
_trains, _requires_grad, _bytes = attrgetter("training"), attrgetter("requires_grad"), attrgetter("nbytes")
_children, _own, _values = attrgetter("_modules"), attrgetter("_parameters"), methodcaller("values")


def shapes_of(*args: Any, **kwargs: Any) -> Shapes:
    """Of each tensor among arguments its size, dtype, device, and whether it requires a gradient; and flags, as text.
    If one is not where the number of those before says, as with a keyword, their places follow, as text."""
    if not kwargs and all(isinstance(value, Tensor) for value in args):
        return tuple(map(_shape_of, args))
    leaves = [(path, leaf) for path, leaf in _paths_in((args, kwargs)) if isinstance(leaf, (Tensor, bool))]
    shapes = tuple(_shape_of(leaf) if isinstance(leaf, Tensor) else f"{leaf}" for _, leaf in leaves)
    paths = [path for path, _ in leaves]
    is_in_order = paths == [f"[0][{place}]" for place in range(len(leaves))]
    return shapes if is_in_order else (*shapes, f"at {', '.join(path[3:] for path in paths)}")


def _shape_of(tensor: Tensor) -> Shapes:
    return *tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _paths_in(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf and its place; where a container does not tell places, only its number."""
    try:
        leaves, _ = pytree.tree_flatten_with_path(tree)
    except ValueError:
        return [(f"[0][{number}]", leaf) for number, leaf in enumerate(pytree.tree_leaves(tree))]
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


class ModelSettings:
    """What else the bytes of a model's steps depend on. It does not hold the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules: list[Callable[[], nn.Module | None]] = [lambda: None]  # they are looked for at first
        self._places = self._sizes = 0

    def now(self, *kinds: str) -> Shapes:
        """The modes of all modules, their types, the sizes of parameters and which are trained, and the dtype of
        autocast on devices of ``kinds``."""
        flags = self._flags()
        if flags is None:
            self._look()
            flags = self._flags()
        return f"settings={flags}", *(f"autocast={_autocast(kind)}" for kind in kinds)

    def words(self, *kinds: str) -> dict[str, str]:
        """The same in words, by the names of what has them: for errors, as it takes longer."""
        model = self._model() or nn.Module()
        modes = {f"module {name!r}": "in training" if child.training else "in evaluation"
                 for name, child in model.named_modules()}
        trained = {f"parameter {name!r}": "trained" if parameter.requires_grad else "not trained"
                   for name, parameter in model.named_parameters()}
        sizes = {f"the size of {name!r}": f"{(*parameter.shape,)} of {parameter.dtype}"
                 for name, parameter in model.named_parameters()}
        types = {f"the type of {name!r}": type(child).__name__ for name, child in model.named_modules()}
        autocast = {f"autocast of {kind}": f"{_autocast(kind)}" for kind in kinds}
        return {**trained, **modes, **sizes, **types, **autocast}

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has one already: the step need not make it."""
        modules = [module for module in (each() for each in self._modules) if module is not None]
        own = (parameter for parameter in _parameters_of(modules) if parameter is not None and parameter.is_leaf)
        return any(parameter.grad is not None for parameter in own)  # torch warns of that of others (functional_call)

    @property
    def gathered(self) -> list[nn.Parameter]:
        """What FSDP2 has gathered of the model itself: it does that before any other hook of the model."""
        model, sharded = self._model(), imported("torch.distributed.fsdp", "FSDPModule")
        parameters = model.parameters() if isinstance(model, sharded) else ()
        return [parameter for parameter in parameters if not hasattr(parameter, "device_mesh")]

    def _look(self) -> None:
        model = self._model()
        modules = [] if model is None else [*model.modules()]
        parameters = [] if model is None else [*model.parameters()]
        self._modules = [weakref.ref(module) for module in modules]  # not the parameters: torch swaps none that has one
        # Numbers alone, whose hash is the same in all processes.
        sizes = ((len(each.shape), *each.shape, each.element_size()) for each in parameters)
        self._sizes = hash((*chain(*sizes), *(crc32(type(module).__qualname__.encode()) for module in modules)))
        self._places = _places(modules)

    def _flags(self) -> int | None:
        """The hash of the settings; None where a module or a parameter was added, taken away, or exchanged."""
        modules = [module() for module in self._modules]
        if id(None) in map(id, modules) or _places(modules) != self._places:
            return None
        parameters = [parameter for parameter in _parameters_of(modules) if parameter is not None]
        trained = map(_requires_grad, parameters)
        return hash((*map(_trains, modules), *trained, *map(_bytes, parameters), self._sizes))


def _places(modules: Collection[Any]) -> int:
    """What is where in these modules: their children and their parameters."""
    held = map(_values, chain(map(_children, modules), map(_own, modules)))
    return hash((*map(id, chain.from_iterable(held)),))


def _parameters_of(modules: Iterable[Any]) -> Iterator[nn.Parameter | None]:
    return chain.from_iterable(map(_values, map(_own, modules)))


def _autocast(kind: str) -> torch.dtype | None:
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


# plans over ranks -----------------------------------------------------------------------------------------------------


_WORKS = (
    "the same {} in every step; for others, new stages of the same modules, and with a schedule of these "
    "stages: recompute_ahead(schedule, budget=...)"
)
_OF_PLAN = "those that the plan is for", "planned", _WORKS.format("shapes and flags")
_BEFORE = (
    "one before, and a plan is for one of each stage", "before",
    "a number of rows that n_microbatches divides, and the same shapes and flags in every step",
)  # fmt: skip
"""What a micro-batch differs from, its name, and what works."""


class Signature(NamedTuple):
    """The forward of a stage."""

    regions: int
    inputs: Shapes
    outputs: Shapes

    def check(self, expected: Signature, where: str, is_planned: bool = True) -> None:
        """Raise ``ScheduleError`` unless this is the ``expected`` one: that of a plan if ``is_planned``, else that of a
        micro-batch before. ``where`` names the forward."""
        if self != expected:
            is_long = self._shown() == expected._shown()
            than, name, works = _OF_PLAN if is_planned else _BEFORE
            received = f"{where}: {self._shown(is_long)}; {name}: {expected._shown(is_long)}"
            rule = f"a micro-batch has other shapes or regions than {than}"
            raise ScheduleError(str(Fault(rule, received, works)))

    def _shown(self, is_long: bool = False) -> str:
        inputs = ", ".join(_shown(each, False, is_long) for each in self.inputs) or "unknown"
        outputs = ", ".join(_shown(each, True, is_long) for each in self.outputs) or "unknown"
        return f"{self.regions} regions, input {inputs}, output {outputs}"


def _shown(shape: tuple[object, ...] | str, has_dtype: bool, is_long: bool) -> str:
    if isinstance(shape, str):
        return shape
    *size, dtype, device, requires_grad = shape
    text = f"{f'{dtype} '.removeprefix('torch.') if has_dtype or is_long else ''}{size}"
    return f"{text} on {device} with{'' if requires_grad else 'out'} a gradient" if is_long else text


class Settings:
    """Those of the modules of stages: what is trained, the modes, autocast. A plan is for those of the counted step."""

    def __init__(self) -> None:
        self._models: dict[int, ModelSettings] = {}
        self._of_step: tuple[dict[int, Shapes], dict[str, str]] = {}, {}
        self._planned: tuple[dict[int, Shapes], dict[str, str]] | None = None

    def check(self, modules: Mapping[int, nn.Module], device: str) -> None:
        """Before a step on stages of these ``modules``, raise ``ScheduleError`` unless they have the planned settings.
        """
        self._models = self._models or {stage: ModelSettings(module) for stage, module in modules.items()}
        now = {stage: model.now(device) for stage, model in self._models.items()}
        if self._planned is None:
            self._of_step = now, self._words(device)
        elif now != self._planned[0]:
            words, planned = self._words(device), self._planned[1]
            names = (name for name in {**planned, **words} if words.get(name) != planned.get(name))
            first, *more = [*names] or ["a module"]
            rule = "a step has other settings than the one that was counted for the plan"
            seen = f"{first} is {words.get(first, 'absent')}{f', and {len(more)} more' if more else ''}"
            received = f"{seen}; planned: {planned.get(first, 'absent')}"
            works = _WORKS.format("modes, and the same parameters trained,")
            raise ScheduleError(str(Fault(rule, received, works)))

    def counted(self) -> None:
        """The step had its bytes counted. The first such step is the one that the plan is for."""
        self._planned = self._planned or self._of_step

    def _words(self, device: str) -> dict[str, str]:
        each = ((f"stage {stage}, ", model.words(device)) for stage, model in self._models.items())
        return {stage + name: word for stage, words in each for name, word in words.items()}


LESS = 0.9
"""After the device was out of memory, the share of its budget that a plan may use."""
NEAR = 1.01
"""A plan may exceed its budget by this factor before it is made again."""
SHOWN = 2
"""The step of a plan whose bytes are counted."""
_MOST = 64
"""At most so many steps are remembered."""

Key = TypeVar("Key")
Plan = TypeVar("Plan")
Value = TypeVar("Value")


class Remembered(OrderedDict[Key, Value]):
    """The last values that were set or used."""

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        while len(self) > _MOST:
            self.popitem(last=False)


class Discarded(Remembered[Any, float]):
    """By step, the bytes from before it that it had freed, as the graph of an old loss, when a count of it was thrown
    away: where others like it free none, they take more."""

    def discards(self, key: Any, peak_bytes: Sequence[float], lost_bytes: Sequence[float]) -> bool:
        """Whether to throw away a count, with these bytes of each rank; not if its step frees as much each time."""
        is_much = any(lost > 0.01 * abs(peak) for peak, lost in zip(peak_bytes, lost_bytes))
        if not is_much or sum(lost_bytes) >= self.get(key, float("inf")) / 2:
            return False
        self[key] = sum(lost_bytes)
        return True


@dataclass
class Followed(Generic[Plan]):
    """A plan of steps that have one key, and how much of the budget the next one may use."""

    plan: Plan | None = None
    share: float = 1.0
    """The share of the budget that a plan may use."""
    steps: int = 0
    """How many steps have followed the plan."""

    def follow(self, plan: Plan) -> None:
        """From now on follow ``plan``."""
        self.plan, self.steps = plan, 0

    def plan_less(self, share: float) -> None:
        """Have the next plan take less than this one."""
        self.share, self.plan = self.share * share, None

    def took_bytes(self, peak_bytes: Sequence[float], budget_bytes: Sequence[float]) -> None:
        """Note what a step of the plan took on each rank: a plan that exceeds its budget will be made again."""
        excess = max(peak / limit for peak, limit in zip(peak_bytes, budget_bytes))
        if excess > NEAR:
            self.plan_less(1 / excess)


def digest(value: object) -> str:
    """A short text that is equal for equal values, in all processes, and that others do not have."""
    return sha256(repr(value).encode()).hexdigest()[:16]
