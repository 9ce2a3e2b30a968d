"""Functions that are no plain functions: mocks and proxies, which answer every attribute."""
from __future__ import annotations

from types import MethodType
from typing import Any
from unittest.mock import MagicMock, Mock, create_autospec

import pytest
import torch
from torch import nn

import torchckpt
from tests.helpers import leaf
from torchckpt import Checkpointing, checkpoint, keep
from torchckpt.errors import ArgumentError, RecomputationError, brief
from torchckpt.modules import name_of
from torchckpt.testing import assert_transparent


def drops(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x.sin()).exp()


class Anything:
    """A proxy whose every attribute is the proxy, and which cannot be iterated, called with a name, or compared."""

    def __init__(self, function: Any) -> None:
        object.__setattr__(self, "inside", function)

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "inside")(*args, **kwargs)


class Refuses(Anything):
    """A proxy that raises something else than AttributeError, as one outside of its context does."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} outside of the context")


class Slots:
    __slots__ = ("inside",)

    def __init__(self, function: Any) -> None:
        self.inside = function

    def __call__(self, *args: Any) -> Any:
        return self.inside(*args)


FUNCTIONS = {
    "Mock": lambda: Mock(side_effect=drops),
    "MagicMock": lambda: MagicMock(side_effect=drops),
    "Mock of a module": lambda: Mock(spec=nn.Linear, side_effect=drops),
    "Mock of a module's object": lambda: Mock(spec=nn.Linear(2, 2), side_effect=drops),
    "Mock that wraps a module": lambda: Mock(wraps=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout())),
    "autospec": lambda: create_autospec(drops, side_effect=drops),
    "Anything": lambda: Anything(drops),
    "Refuses": lambda: Refuses(drops),
    "without a dictionary": lambda: Slots(drops),
    "method of a mock": lambda: MethodType(lambda self, x: drops(x), Mock(spec=nn.Linear)),
    "method of a proxy": lambda: MethodType(lambda self, x: drops(x), Anything(drops)),
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_region_of_a_proxy_is_that_of_its_function(make: Any) -> None:
    assert_transparent(make(), leaf(3, 4))


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_by_hand_and_in_keep(make: Any) -> None:
    function = make()
    region = Checkpointing(lambda x: keep(function, x).cos(), leaf(3, 4))
    region.recompute(region.checkpoint()).sum().backward()
    region = Checkpointing(function, leaf(3, 4) * 2)
    region.recompute(region.checkpoint()).sum().backward()


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_proxy_has_a_name_in_errors(make: Any) -> None:
    assert name_of(make()).count("'") == 2


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_as_an_argument(make: Any) -> None:
    assert_transparent(lambda function, x: function(x).sin(), make(), leaf(3, 4))


def test_a_replay_that_differs_names_the_mock() -> None:
    saved = iter([torch.sin, lambda x: x * 2])
    y = checkpoint(Mock(side_effect=lambda x: next(saved)(x)), leaf(3))
    with pytest.raises(RecomputationError, match="the replay of region 'Mock' did not save"):
        y.sum().backward()


@pytest.mark.parametrize("value", [Mock(), MagicMock(), Anything(drops)])
def test_a_mock_in_an_error(value: Any) -> None:
    assert "tensor" not in brief(value)
    with pytest.raises(ArgumentError, match="determinism_check is not one of"):
        checkpoint(drops, leaf(3), determinism_check=value)


def test_a_module_behind_a_proxy_that_says_it_is_one_is_a_module() -> None:
    class Proxy(Anything):
        __class__ = property(lambda self: nn.BatchNorm1d)  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            if name == "__class__":
                return nn.BatchNorm1d
            return getattr(object.__getattribute__(self, "inside"), name)

    layer = nn.BatchNorm1d(4)
    assert_transparent(Proxy(layer), leaf(3, 4), modules=[layer])
    checkpoint(Proxy(layer), leaf(3, 4)).sum().backward()
    assert layer.num_batches_tracked == 2


class Unbound:
    """A proxy outside of its context, which cannot tell its class: such as flask's ``g`` outside of a request."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of the context")


unbound = Unbound()


def names_it(x: torch.Tensor) -> Any:
    return unbound if x is None else drops(x)


def closes_over(proxy: Any) -> Any:
    return lambda x: proxy if x is None else drops(x)


@pytest.mark.parametrize("function", [names_it, closes_over(unbound)], ids=["global", "closure"])
def test_a_proxy_that_a_function_names_is_not_asked_for_anything(function: Any) -> None:
    assert_transparent(function, leaf(3, 4))


def test_checkpoint_module_refuses_a_mock_of_a_module() -> None:
    with pytest.raises(ArgumentError):
        torchckpt.checkpoint_module(Mock(spec=nn.Linear))
