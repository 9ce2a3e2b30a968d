"""Target: what ``package.module:function`` names, of one kind for ``fit``, ``balance`` and ``plan``.

The function takes no arguments and returns what to train, an example of a call, and maybe a loss::

    return model, example             a module; a tensor, or a tuple of the arguments of a call
    return [first, second], example   modules, each called with what the one before returns
    return ..., example, loss         a function of what the last module returns

===========  ==========================  =======================================  =====================================
of it        ``fit``                     ``balance``                              ``plan``
===========  ==========================  =======================================  =====================================
a module     is the model                an nn.Sequential, of layers              one stage; of an nn.Sequential, each
                                                                                  member is one
a list       runs one after the other    each is a layer                          each is a stage
the example  is traced, and not run      is run; --input in its place             of a micro-batch; has no memory
the loss     is not counted              is not counted                           is part of the last stage
===========  ==========================  =======================================  =====================================
"""
from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torchckpt.command.shared import Unusable
from torchckpt.errors import named

__all__ = ["CONTRACT", "Target", "built", "layers_at", "model_at", "running", "stages_at"]

CONTRACT = """\
MODULE:FUNCTION is a function without arguments that returns what to train, and an example of a call: a tensor, or a
tuple of arguments. The same function works for fit, balance and plan:

  def gpt():
      return GPT(layers=12), torch.randint(50257, (8, 1024))      # or [first, second], tokens
      return GPT(layers=12), tokens, loss                         # plan counts the loss, too
"""
_WORKS = {
    "fit": "def gpt(): return model, tokens; or: return model, (tokens, mask)",
    "balance": "def gpt(): return nn.Sequential(embedding, *blocks, head), tokens",
    "plan": "def gpt(): return [first, second], tokens; or: return [first, second], tokens, loss",
}


@dataclass(frozen=True)
class Target:
    """What the function returned, checked.

    Args:
        modules: the listed modules; None where there is one module, which is no list of others.
        model: the one module, or the nn.Sequential; None where the function returned a list.
    """

    modules: list[Any] | None
    model: Any
    example: Any = None
    loss: Callable[[Any], Any] | None = None
    has_example: bool = False

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.example if isinstance(self.example, tuple) else (self.example,)


def built(place: str, command: str, *arguments: Any) -> Target:
    """What the function at ``place`` returns for ``arguments``."""
    result = _called(place, _attribute_at(place), command, arguments)
    what, *others = result if isinstance(result, tuple) and 2 <= len(result) <= 3 else (result,)
    listed = isinstance(what, (list, tuple)) or _is("nn.Sequential", what) or _is("nn.ModuleList", what)
    modules = list(what) if listed and len(what) and all(_is("nn.Module", module) for module in what) else None
    if modules is None and not _is("nn.Module", what):
        raise _unfit(place, command, result)
    loss = others[1] if len(others) == 2 else None
    if loss is not None and (not callable(loss) or _is("Tensor", loss)):
        rule = "the loss, the third value of the target, is no function; several arguments of a call are a tuple"
        raise _unfit(place, command, result, rule)
    return Target(modules, what if _is("nn.Module", what) else None, others[0] if others else None, loss, bool(others))


def model_at(place: str) -> tuple[Any, tuple[Any, ...], bool]:
    """What ``fit`` reads at ``place``: a model, arguments of a call, and whether the example was a tuple of them."""
    target = built(place, "fit")
    if not target.has_example:
        raise _unfit(place, "fit", target.model or target.modules, "the target returns no example of a call")
    chained = target.model is None or _is("nn.ModuleList", target.model)
    return _chain(target.modules or ()) if chained else target.model, target.inputs, isinstance(target.example, tuple)


def _chain(modules: Sequence[Any]) -> Any:
    """A module that calls ``modules`` one after the other, each on what the one before returns.

    A tuple or a list that one returns is the arguments of the next, as in a pipeline.
    """
    from torch import nn

    class Chain(nn.Sequential):
        def forward(self, *inputs: Any) -> Any:
            outputs: Any = inputs
            for module in self:
                outputs = module(*outputs) if isinstance(outputs, (tuple, list)) else module(outputs)
            return outputs

    return Chain(*modules)


def layers_at(place: str) -> Target:
    """What ``balance`` reads at ``place``: a target whose model is an nn.Sequential."""
    from torch import nn

    target = built(place, "balance")
    if not target.modules:
        raise _unfit(place, "balance", target.model, "the target returns no layers, in an nn.Sequential or a list")
    model = target.model if isinstance(target.model, nn.Sequential) else nn.Sequential(*target.modules)
    return replace(target, model=model)


def stages_at(place: str, *arguments: Any) -> Callable[[], Any]:
    """What ``plan`` reads at ``place``: a function, looked up at once, that makes stages, the example and the loss."""
    _attribute_at(place)

    def build() -> Any:
        target = built(place, "plan", *arguments)
        if not target.has_example:
            what = target.model or target.modules
            raise _unfit(place, "plan", what, "the target returns no example of a micro-batch")
        stages = [target.model] if target.modules is None else target.modules
        return (stages, target.example) if target.loss is None else (stages, target.example, target.loss)

    return build


@contextmanager
def running(place: str) -> Iterator[None]:
    """A context in which what ``place`` names runs: a call that ends Python is Unusable. Torch logs the traceback of an
    operator that fails on tensors without memory, and raises it, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except SystemExit as error:
        raise Unusable(f"cannot run {place}: it ends Python: {named(error)}") from error
    finally:
        log.disabled = was_disabled


def _attribute_at(place: str) -> Any:
    name, colon, attribute = place.partition(":")
    if not (name and colon and attribute) or name.startswith(".") or name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").replace("/", ".").strip(".") or "my_package.model"
        works = f"{module}:{attribute}" if attribute and name else "my_package.model:gpt"
        raise Unusable(f"the target is not written module:function; received: {place}; works: {works}")
    try:
        folder = os.getcwd()  # modules in it are found, as by python -m; a script does not find them
        if not getattr(sys.flags, "safe_path", False) and "" not in sys.path and folder not in sys.path:
            sys.path.insert(0, folder)
        value: Any = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # of the user's code
        raise _unmade(place, error) from error
    for part in attribute.split("."):
        inside, value = value, getattr(value, part, None)
        if value is None:
            names = [key for key, member in vars(inside).items() if not key.startswith("_") and callable(member)]
            nearest = difflib.get_close_matches(part, names, 1, 0.4) or ["function, one that is there"]
            raise Unusable(f"cannot make {place}: {name} has no {attribute}; works: {name}:{nearest[0]}")
    return value


def _called(place: str, function: Any, command: str, arguments: tuple[Any, ...]) -> Any:
    if _is("nn.Module", function):
        return function
    if not callable(function):
        raise _unfit(place, command, function, "the target is not a function")
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:  # of the user's code
        if command == "plan" and type(error).__module__.startswith("torch"):
            raise  # it says that a value was asked for
        raise _unmade(place, error) from error


def _is(name: str, value: Any) -> bool:
    """Whether ``value`` is of the class of torch with this name. Imports torch."""
    import torch

    return isinstance(value, attrgetter(name)(torch))


def _unfit(
    place: str, command: str, value: Any, rule: str = "the target returns no module, and no list of modules"
) -> Unusable:
    is_tuple = isinstance(value, tuple)
    kind = f"({', '.join(type(part).__name__ for part in value)})" if is_tuple else type(value).__name__
    return Unusable(f"{rule}; received: {place}, {kind}; works: {_WORKS[command]}")


def _unmade(place: str, error: BaseException) -> Unusable:
    ends = "it ends Python: " if isinstance(error, SystemExit) else ""
    return Unusable(f"cannot make {place}: {ends}{named(error)}")
