"""What a forward's code reads elsewhere: a call is traced anew where that changes, and only there."""
from __future__ import annotations

import collections
import types
import warnings
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.graph.eager import compare
from tests.graph.traced import Function
from tests.slow import few, rarely
from torchckpt import graph
from torchckpt.graph.trace.free_variables import FreeVariables

SCALE, UNREAD, COUNT, ACTIVATION = 2.0, 1, 0, torch.sin
OPTIONS = {"scale": 2.0, "layer": object()}
SETTINGS = types.SimpleNamespace(scale=2.0, other=1)
NAMESPACE = types.ModuleType("settings_of_a_test")
NAMESPACE.scale, NAMESPACE.other = 2.0, 1


MAPPING = UserDict(scale=2.0, layer=object())


class Defaults:
    scale, other = 2.0, 1


@dataclass
class Inner:
    scale: float = 2.0
    other: int = 1


class Config:
    def __init__(self):
        self.scale, self.other, self.inner, self.listed = 2.0, 1, Inner(), [Inner()]


def scaled(x):
    return x * SCALE


class Reading(nn.Module):
    factor = 2.0

    def __init__(self, read):
        super().__init__()
        self.layer, self.config, self.configs, self.read = nn.Linear(3, 3), Config(), [Config()], read

    def forward(self, x):
        return self.read(self, self.layer(x))

    def elsewhere(self):
        return UNREAD


def closed_over():
    scale = 2.0

    def read(model, h):
        return h * scale

    def change():
        nonlocal scale
        scale = 3.0

    return read, change


def set_in(owner, name, value):
    return lambda patch, model: patch.setattr(owner, name, value)


def module_of_test():
    import sys

    return sys.modules[__name__]


def of_model(*path):
    def change(patch, model):
        owner = model
        for name in path[:-1]:
            owner = owner[name] if isinstance(name, int) else getattr(owner, name)
        patch.setattr(owner, path[-1], 3.0)

    return change


READ, CHANGE = closed_over()

CASES = {
    "global": (lambda model, h: h * SCALE, set_in(module_of_test(), "SCALE", 3.0)),
    "global of a function that is called": (lambda model, h: scaled(h), set_in(module_of_test(), "SCALE", 3.0)),
    "function by another name": (lambda model, h: ACTIVATION(h), set_in(module_of_test(), "ACTIVATION", torch.cos)),
    "global dict": (lambda model, h: h * OPTIONS["scale"], lambda patch, model: patch.setitem(OPTIONS, "scale", 3.0)),
    "global object": (lambda model, h: h * SETTINGS.scale, set_in(SETTINGS, "scale", 3.0)),
    "module": (lambda model, h: h * NAMESPACE.scale, set_in(NAMESPACE, "scale", 3.0)),
    "class as a namespace": (lambda model, h: h * Defaults.scale, set_in(Defaults, "scale", 3.0)),
    "closure": (READ, lambda patch, model: CHANGE()),
    "field of a config": (lambda model, h: h * model.config.scale, of_model("config", "scale")),
    "field two levels deep": (lambda model, h: h * model.config.inner.scale, of_model("config", "inner", "scale")),
    "field in a list of a config": (
        lambda model, h: h * model.config.listed[0].scale, of_model("config", "listed", 0, "scale"),
    ),
    "mapping that is no dict": (lambda model, h: h * MAPPING["scale"], lambda patch, model: MAPPING.update(scale=3.0)),
    "field in a list of the module": (lambda model, h: h * model.configs[0].scale, of_model("configs", 0, "scale")),
    "field by getattr": (lambda model, h: h * getattr(model.config, "scale"), of_model("config", "scale")),  # noqa: B009
    "attribute of the class": (lambda model, h: h * model.factor, set_in(Reading, "factor", 3.0)),
    "default of an argument": (lambda model, h, settings=SETTINGS: h * settings.scale, set_in(SETTINGS, "scale", 3.0)),
}


@few(1)
@pytest.mark.parametrize("case", rarely([*CASES][::3], CASES))
def test_call_is_traced_anew_where_it_changes(case, monkeypatch, traces):
    read, change = CASES[case]
    model, x = Reading(read), torch.randn(2, 3)
    step = graph.rematerialize(model)
    for _ in range(2):
        compare(model, step, x)
    change(monkeypatch, model)
    for _ in range(2):
        compare(model, step, x)
    assert len(traces) == 2


def test_what_is_not_read_may_change(monkeypatch, traces):
    model, x = Reading(lambda model, h: h * SCALE + model.config.scale), torch.randn(2, 3)
    step = graph.rematerialize(model, x)
    for owner, name in [(module_of_test(), "UNREAD"), (SETTINGS, "scale"), (Defaults, "scale"), (model.config, "other"),
                        (model.config.inner, "other")]:
        monkeypatch.setattr(owner, name, 7)
        compare(model, step, x)
    assert len(traces) == 1


def test_what_the_forward_itself_changes_is_not_asked_for_again(traces):
    def read(model, h):
        global COUNT
        COUNT += 1
        model.config.other += 1
        return h

    model, x = Reading(read), torch.randn(2, 3)
    step = graph.rematerialize(model)
    for _ in range(4):
        step(x).sum().backward()
    assert len(traces) <= 2


def test_back_to_what_it_was(monkeypatch, traces):
    model, x = Reading(lambda model, h: h * SCALE), torch.randn(2, 3)
    step = graph.rematerialize(model, x)
    for value in (3.0, 2.0, 3.0, 2.0):
        monkeypatch.setattr(module_of_test(), "SCALE", value)
        compare(model, step, x)
    assert len(traces) == 2


def test_warning_says_which_global_always_changes(monkeypatch):
    model, x = Reading(lambda model, h: h * SCALE), torch.randn(2, 3)
    step = graph.rematerialize(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in range(9):
            monkeypatch.setattr(module_of_test(), "SCALE", float(value))
            step(x).sum().backward()
    assert [str(warning.message) for warning in caught if "SCALE was" in str(warning.message)]


def test_code_of_libraries_is_not_looked_into():
    model = nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(4, 2), nn.LSTM(3, 3), nn.BatchNorm1d(3))
    assert FreeVariables(model).now() == ()


def test_hooks_are_code_of_the_forward(monkeypatch, traces):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    model.register_forward_hook(lambda module, inputs, output: output * SCALE)
    step = graph.rematerialize(model, x)
    monkeypatch.setattr(module_of_test(), "SCALE", 3.0)
    compare(model, step, x)
    assert len(traces) == 2


def test_function_of_a_module(monkeypatch):
    step = graph.rematerialize(Function(lambda x: x.sin() * SCALE))
    x = torch.ones(3, requires_grad=True)
    step(x).sum().backward()
    monkeypatch.setattr(module_of_test(), "SCALE", 3.0)
    assert torch.equal(step(x), x.sin() * 3)


class Lazy(collections.OrderedDict):
    """Loads what it is asked for, as transformers' registries do."""

    names = ("one", "two")

    def __getitem__(self, name):
        raise ImportError(name)

    def keys(self):
        return [self[name] for name in self.names]

    def values(self):
        return [self[name] for name in self.names]

    def items(self):
        return [(name, self[name]) for name in self.names]

    def __iter__(self):
        return iter(self.keys())


REGISTRY = Lazy(one=1, two=2)


def test_mapping_that_loads_what_it_is_asked_for_is_not_asked():
    """Neither as a global, nor in another one, nor as an attribute."""
    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.kinds, self.more = REGISTRY, [REGISTRY]

        def forward(self, x, name=None):
            kind = (REGISTRY, self.kinds, self.more[0])[0][name] if name else 1
            return super().forward(x) * kind

    x = torch.randn(2, 4)
    model = Net()
    compare(model, graph.rematerialize(model, x), x)
    with graph.rematerialize_(model, x):
        model(x).sum().backward()


@few(1)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.Counter, UserDict])
def test_mapping_of_python_is_looked_into(kind, traces):
    settings = kind(scale=2)
    net, x = Function(lambda x: x * settings["scale"]), torch.ones(2, requires_grad=True)
    step = graph.rematerialize(net, x)
    for settings["scale"] in (2, 3):
        assert torch.equal(step(x), net(x))
    assert len(traces) == 2
