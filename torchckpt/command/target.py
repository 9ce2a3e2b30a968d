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
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchckpt.command.shared import Unusable, kind_of

__all__ = ["CONTRACT", "Made", "built", "layers_at", "model_at", "stages_at"]

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
class Made:
    """What the function returned, checked."""

    modules: list[Any] | None
    """None where there is one module, which is no list of others."""
    model: Any
    """The one module, or the nn.Sequential; None of a list."""
    example: Any = None
    loss: Callable[[Any], Any] | None = None
    has_example: bool = False

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.example if isinstance(self.example, tuple) else (self.example,)


def built(place: str, command: str) -> Made:
    """What the function at ``place`` returns."""
    found = _called(place, _attribute_at(place), command)
    what, *others = found if isinstance(found, tuple) and 2 <= len(found) <= 3 else (found,)
    modules = _modules_of(what)
    if modules is None and not _is("nn.Module", what):
        raise _unfit(place, command, found)
    loss = others[1] if len(others) == 2 else None
    if loss is not None and (not callable(loss) or _is("Tensor", loss)):
        rule = "the loss, the third value of the target, is no function; several arguments of a call are a tuple"
        raise _unfit(place, command, found, rule)
    return Made(modules, what if _is("nn.Module", what) else None, others[0] if others else None, loss, bool(others))


def model_at(place: str) -> tuple[Any, Any]:
    """For ``fit``: a model and its example."""
    made = built(place, "fit")
    if not made.has_example:
        raise _unfit(place, "fit", made.model or made.modules, "the target returns no example of a call")
    if made.model is not None and not _is("nn.ModuleList", made.model):
        return made.model, made.example
    from torchckpt.command.chain import Chain

    return Chain(*(made.modules or ())), made.example


def layers_at(place: str) -> Made:
    """For ``balance``: the model is an nn.Sequential."""
    from torch import nn

    made = built(place, "balance")
    if not made.modules:
        raise _unfit(place, "balance", made.model, "the target returns no layers, in an nn.Sequential or a list")
    if isinstance(made.model, nn.Sequential):
        return made
    return Made(made.modules, nn.Sequential(*made.modules), made.example, made.loss, made.has_example)


def stages_at(place: str) -> Callable[[], Any]:
    """For ``plan``: makes the stages, the example and the loss. It is found at once, and made where it is called."""
    _attribute_at(place)

    def build() -> Any:
        made = built(place, "plan")
        if not made.has_example:
            raise _unfit(place, "plan", made.model or made.modules, "the target returns no example of a micro-batch")
        stages = [made.model] if made.modules is None else made.modules
        return (stages, made.example) if made.loss is None else (stages, made.example, made.loss)

    return build


def _attribute_at(place: str) -> Any:
    name, colon, attribute = place.partition(":")
    if not (name and colon and attribute) or name.startswith(".") or name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").replace("/", ".").strip(".") or "my_package.model"
        works = f"{module}:{attribute}" if attribute and name else "my_package.model:gpt"
        raise Unusable(f"the target is not written module:function; received: {place}; works: {works}")
    try:
        _with_folder()
        found: Any = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # of the user's code
        raise _unmade(place, error) from error
    for part in attribute.split("."):
        inside, found = found, getattr(found, part, None)
        if found is None:
            raise Unusable(f"cannot make {place}: {name} has no {attribute}; works: {name}:{_nearest(part, inside)}")
    return found


def _with_folder() -> None:
    """Modules are found in the current folder, as ``python -m`` finds them, and a script does not."""
    here = os.getcwd()
    if not getattr(sys.flags, "safe_path", False) and "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def _nearest(wanted: str, inside: Any) -> str:
    """The name nearest to ``wanted`` of the public functions and modules that there are."""
    names = [name for name, one in vars(inside).items() if not name.startswith("_") and callable(one)]
    close = difflib.get_close_matches(wanted, names, 1, 0.4)
    return close[0] if close else "function, one that is there"


def _called(place: str, found: Any, command: str) -> Any:
    if _is("nn.Module", found):
        return found
    if not callable(found):
        raise _unfit(place, command, found, "the target is not a function")
    try:
        return found()
    except (Exception, SystemExit) as error:  # of the user's code
        if command == "plan" and type(error).__module__.startswith("torch"):
            raise  # it says that a value was asked for
        raise _unmade(place, error) from error


def _modules_of(what: Any) -> list[Any] | None:
    listed = isinstance(what, (list, tuple)) or _is("nn.Sequential", what) or _is("nn.ModuleList", what)
    return list(what) if listed and len(what) and all(_is("nn.Module", one) for one in what) else None


def _is(name: str, found: Any) -> bool:
    """Whether ``found`` is of the class of torch with this name. Imports torch."""
    import torch

    return isinstance(found, attrgetter(name)(torch))


def _unfit(
    place: str, command: str, found: Any, rule: str = "the target returns no module, and no list of modules"
) -> Unusable:
    return Unusable(f"{rule}; received: {place}, {kind_of(found)}; works: {_WORKS[command]}")


def _unmade(place: str, error: BaseException) -> Unusable:
    ends = "it ends Python: " if isinstance(error, SystemExit) else ""
    return Unusable(f"cannot make {place}: {ends}{type(error).__name__}: {error}")
