"""Layers that a region reaches in many ways: what they change, and what comes of it, is as in plain training."""
from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import lru_cache, partial, partialmethod
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, leaf, plain
from tests.slow import few, slow
from torchckpt import checkpoint

HELD: dict[str, Any] = {}
LAYERS: list[Any] = []
LAYER: Any = None


class Registry:
    parts: Any = None

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    @staticmethod
    def static(x: Any) -> Any:
        return Registry.parts(x)

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return cls.parts(x)

    @property
    def layer(self) -> Any:
        return self.inside[0]

    def method(self, x: Any) -> Any:
        return self.inside[0](x)

    def with_layer(self, layer: Any, x: Any) -> Any:
        return layer(x)

    def __call__(self, x: Any) -> Any:
        return self.method(x)


class Heir(Registry):
    pass


class Delegate:
    def __init__(self, to: Any) -> None:
        self.to = to

    def __getattr__(self, name: str) -> Any:
        return getattr(self.to, name)


class Slotted:
    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer


@dataclass
class Data:
    layer: Any


Named = namedtuple("Named", "layer")
OBJECT = Registry(registry={})


def returned() -> Any:
    return HELD["layer"]


def returned_by_another() -> Any:
    return returned()


@lru_cache
def cached() -> Any:
    return HELD["layer"]


class Wrapped(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def of_a_python_module(layer: Any) -> Any:
    module = ModuleType("models_of_a_test")
    module.layer = layer  # type: ignore[attr-defined]
    HELD["module"] = module
    return lambda x: module.layer(x)


def of_an_imported_module(layer: Any) -> Any:
    module = sys.modules["models_of_a_test"] = ModuleType("models_of_a_test")
    module.layer = layer  # type: ignore[attr-defined]

    def function(x: Any) -> Any:
        return module.layer(x)

    return function


def by_a_global_dictionary(layer: Any) -> Any:
    HELD["layer"] = layer
    return lambda x: HELD["layer"](x)


def by_a_global_list(layer: Any) -> Any:
    LAYERS[:] = [layer]
    return lambda x: LAYERS[0](x)


def by_a_global(layer: Any) -> Any:
    global LAYER
    LAYER = layer
    return lambda x: LAYER(x)


def by_a_registry(layer: Any) -> Any:
    OBJECT.registry["a"] = layer
    return lambda x: OBJECT.registry["a"](x)


def by_a_class(layer: Any) -> Any:
    Registry.parts = layer
    return lambda x: Registry.parts(x)


def by_a_class_of_the_object(layer: Any) -> Any:
    Registry.parts = layer
    own = Heir()
    return lambda x: own.parts(x)


def by_a_static_method(layer: Any) -> Any:
    Registry.parts = layer
    return Registry.static


def by_a_class_method(layer: Any) -> Any:
    Registry.parts = layer
    return Heir.of_class


def by_a_function(layer: Any) -> Any:
    HELD["layer"] = layer
    return lambda x: returned()(x)


def by_functions(layer: Any) -> Any:
    HELD["layer"] = layer
    return lambda x: returned_by_another()(x)


def by_a_cached_function(layer: Any) -> Any:
    HELD["layer"] = layer
    cached.cache_clear()
    return lambda x: cached()(x)


def by_a_generator(layer: Any) -> Any:
    layers = [layer]
    return lambda x: sum(one(x) for one in layers)


def by_a_nested_function(layer: Any) -> Any:
    def outer(x: Any) -> Any:
        def inner(x: Any) -> Any:
            return layer(x)

        return inner(x)

    return outer


def by_an_attribute_of_a_function(layer: Any) -> Any:
    def function(x: Any) -> Any:
        return function.layer(x)  # type: ignore[attr-defined]

    function.layer = layer  # type: ignore[attr-defined]
    return function


def by_a_partial_method(layer: Any) -> Any:
    class Own(Registry):
        run = partialmethod(Registry.with_layer, layer)

    own = Own()
    return lambda x: own.run(x)


def by_a_weak_reference(layer: Any) -> Any:
    reference = weakref.ref(layer)
    return lambda x: reference()(x)


def by_a_weak_dictionary(layer: Any) -> Any:
    known = weakref.WeakValueDictionary({"a": layer})
    return lambda x: known["a"](x)


def closing_over(make: Any) -> Any:
    def way(layer: Any) -> Any:
        held, take = make(layer)
        return lambda x: take(held)(x)

    return way


WAYS = {
    "itself": lambda layer: layer,
    "method of it": lambda layer: layer.__call__,
    "closure": lambda layer: lambda x: layer(x),
    "default": lambda layer: lambda x, layer=layer: layer(x),
    "keyword default": lambda layer: lambda x, *, layer=layer: layer(x),
    "module around": lambda layer: Wrapped(Wrapped(layer)),
    "partial": lambda layer: partial(lambda layer, x: layer(x), layer),
    "partial of a method": lambda layer: partial(Registry().with_layer, layer),
    "partial by keyword": lambda layer: partial(lambda x, layer: layer(x), layer=[layer][0]),
    "method of an object": lambda layer: Registry(inside=[layer]).method,
    "object that is called": lambda layer: Registry(inside=[layer]),
    "partial of an object": lambda layer: partial(Registry(inside=[layer])),
    "a method made by hand": lambda layer: MethodType(lambda own, x: own[0](x), [layer]),
    "list": closing_over(lambda layer: ([layer], lambda held: held[0])),
    "dict of lists": closing_over(lambda layer: ({"a": [layer]}, lambda held: held["a"][0])),
    "key of a dict": closing_over(lambda layer: ({layer: 1}, lambda held: next(iter(held)))),
    "set": closing_over(lambda layer: ({layer}, lambda held: next(iter(held)))),
    "deque": closing_over(lambda layer: (deque([layer]), lambda held: held[0])),
    "OrderedDict": closing_over(lambda layer: (OrderedDict(a=layer), lambda held: held["a"])),
    "defaultdict": closing_over(lambda layer: (defaultdict(list, a=[layer]), lambda held: held["a"][0])),
    "UserDict": closing_over(lambda layer: (UserDict(a=layer), lambda held: held["a"])),
    "namedtuple": closing_over(lambda layer: (Named(layer), lambda held: held.layer)),
    "dataclass": closing_over(lambda layer: (Data(layer), lambda held: held.layer)),
    "dataclass in a list": closing_over(lambda layer: ([Data(layer)], lambda held: held[0].layer)),
    "slots": closing_over(lambda layer: (Slotted(layer), lambda held: held.layer)),
    "namespace": closing_over(lambda layer: (SimpleNamespace(a=layer), lambda held: held.a)),
    "object": closing_over(lambda layer: (Registry(inside=[layer]), lambda held: held.inside[0])),
    "property": closing_over(lambda layer: (Registry(inside=[layer]), lambda held: held.layer)),
    "objects in objects": closing_over(lambda layer: (Data([Data(layer)]), lambda held: held.layer[0].layer)),
    "module of an object": closing_over(lambda layer: (Data(Wrapped(layer)), lambda held: held.layer)),
    "delegate": closing_over(lambda layer: (Delegate(Data(layer)), lambda held: held.layer)),
    "module in a ModuleList": closing_over(lambda layer: (nn.ModuleList([layer]), lambda held: held[0])),
    "generator": by_a_generator,
    "nested function": by_a_nested_function,
    "attribute of a function": by_an_attribute_of_a_function,
    "global": by_a_global,
    "global list": by_a_global_list,
    "global dict": by_a_global_dictionary,
    "registry of a global object": by_a_registry,
    "class": by_a_class,
    "class of an object": by_a_class_of_the_object,
    "static method": by_a_static_method,
    "class method": by_a_class_method,
    "returned by a function": by_a_function,
    "returned by functions": by_functions,
    "returned by a cached function": by_a_cached_function,
    "partial method": by_a_partial_method,
    "weak reference": by_a_weak_reference,
    "weak dictionary": by_a_weak_dictionary,
    "Python module": of_a_python_module,
    "imported module": of_an_imported_module,
}

class Average(nn.Module):
    """Scales by a running average, which its forward changes, and by random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(), alpha=0.1)
        return (x * self.average + torch.rand(x.shape, generator=self.generator)).sin()


KINDS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "InstanceNorm": lambda: nn.InstanceNorm2d(4, track_running_stats=True, affine=True),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)),
    "average": Average,
}


def program(call: Any, function: Any, x: torch.Tensor, mode: str) -> torch.Tensor:
    def region(x: torch.Tensor) -> Any:
        if mode in ("training", "frozen"):
            return function(x.exp()).sin()
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            scale = function(x.exp())
        return x * scale.clone().cos() + x.sin()

    return call(region, x).cos()  # type: ignore[no-any-return]


@few(3)
@pytest.mark.parametrize("mode", ["training", "no_grad", *slow(["frozen", "inference_mode"])])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_statistics_are_those_of_plain_training(way: Any, mode: str) -> None:
    for name, make in KINDS.items():
        layer, twin = make().requires_grad_(mode != "frozen"), make().requires_grad_(mode != "frozen")
        twin.load_state_dict(layer.state_dict())
        x = leaf(3, 4, *(() if name == "BatchNorm1d" else (2, 2)))

        for _ in range(2):
            program(checkpoint, way(layer), x, mode).sum().backward()
            received = x.grad.clone()  # type: ignore[union-attr]
            x.grad = None
            program(plain, way(twin), x, mode).sum().backward()
            assert_equal(x.grad, received)
            x.grad = None
        assert_equal(dict(layer.named_buffers()), dict(twin.named_buffers()))
