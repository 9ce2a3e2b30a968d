"""Mixin: a class put in front of the class of one module, which redirects the calls of the module and nothing else.

The mixin is a subclass, as FSDP2 and parametrize make one. An attribute of the instance, such as a replaced forward,
would bind a copy of the module (deep, shallow or unpickled) to the weights of the original. The instance itself holds
only the *setting*, which is copied with it. Without a setting the mixin does nothing. So it can be removed even if
another class was put in front of it later.
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias

from torchckpt.modules import is_compiled, is_compiled_class
from torchckpt.regions.private import keys_are_put_back

__all__ = ["COMPILED", "Mixin", "are_compiled", "plain_forward", "put", "take"]

COMPILED = "_torchckpt_compiled"
"""The attribute of the instance that holds the plain forward as ``module.compile()`` compiled it."""


class Mixin:
    """The base of the mixins. Each subclass defines what a call of the module does instead."""

    _torchckpt_setting: ClassVar[str]
    """The attribute of the instance that holds the setting."""
    _torchckpt_call: ClassVar[Callable[..., Any]]
    """Called instead of the forward, as ``call(bound_forward, args, kwargs, setting)``."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Skip the base class's hook: it does not know this subclass, and may require arguments."""

    def __getstate__(self) -> Any:
        # The compiled forward is bound to this module, so a copy must not have it. torch drops its own likewise.
        state: Any = super().__getstate__()  # type: ignore[misc]  # of object, if it has one
        if isinstance(state, dict) and COMPILED in state:
            state = {name: value for name, value in state.items() if name != COMPILED}
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle cannot import the class that was made here: pickle its base, and make the class again when loading.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        cls = base = type(self)
        mixins: _Mixins = []
        while (mixin := _front(base)) is not None:
            mixins.append((mixin, self.__dict__.get(mixin._torchckpt_setting)))
            base = base.__bases__[-1]
        plain = tuple(base if argument is cls else argument for argument in arguments)
        return (_remade, (base if make is cls else make, plain, mixins), *state)


_Mixins: TypeAlias = list[tuple[type[Mixin], Any]]
"""Mixins with their settings, outermost first."""


def put(module: Any, mixin: type[Mixin], setting: Any) -> Any:
    """Put ``mixin`` in front of the class of ``module``; return ``module``. With setting None it does nothing yet."""
    if not isinstance(module, mixin):
        module.__class__ = _class_for(type(module), mixin)
    if setting is not None:
        module.__dict__[mixin._torchckpt_setting] = setting
    return module


def take(module: Any, mixin: type[Mixin]) -> None:
    """Remove ``mixin`` from ``module``, and also the mixins behind it that no longer have a setting."""
    module.__dict__.pop(mixin._torchckpt_setting, None)
    while (front := _front(type(module))) is not None and front._torchckpt_setting not in module.__dict__:
        module.__class__ = type(module).__bases__[-1]


def plain_forward(module: Any, mixin: type[Mixin]) -> Callable[..., Any]:
    """The bound forward of ``module`` without ``mixin``."""
    mixed: Any = next(cls for cls in type(module).__mro__ if cls.__bases__[:1] == (mixin,))
    forward: Callable[..., Any] = super(mixed, module).forward
    return forward


def are_compiled(modules: Iterable[Any]) -> bool:
    """Whether any of ``modules`` is compiled, by itself or inside of its region, or compiled code has called this."""
    return keys_are_put_back() or any(is_compiled(module) or COMPILED in module.__dict__ for module in modules)


def _front(cls: type[Any]) -> type[Mixin] | None:
    """The mixin in front of ``cls``; None if ``cls`` was not made by this file."""
    first = cls.__bases__[0] if cls.__bases__ else object
    return first if Mixin in first.__bases__ else None


def _class_for(base: type[Any], mixin: type[Mixin]) -> type[Any]:
    """The subclass of ``base`` with ``mixin`` in front and the name of ``base``. Freed with its last instance."""
    for subclass in base.__subclasses__():
        if subclass.__bases__ == (mixin, base):
            return subclass

    # torch.compile(module) sets the forward on the instance, where a forward of the class has no effect.
    redirected = "__call__" if is_compiled_class(base) else "forward"

    @functools.wraps(getattr(base, redirected))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(super(mixed, self), redirected)
        setting = self.__dict__.get(mixin._torchckpt_setting)
        return plain(*args, **kwargs) if setting is None else mixin._torchckpt_call(plain, args, kwargs, setting)

    namespace = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace[redirected] = call
    if hasattr(base, "__deepcopy__"):
        namespace["__deepcopy__"] = functools.partialmethod(_deepcopy, mixin)
    metaclass: Any = type(base)
    mixed: type[Any] = metaclass(base.__name__, (mixin, base), namespace)
    return mixed


def _deepcopy(self: Any, mixin: type[Mixin], memo: dict[int, Any]) -> Any:
    """Deep copy for a base with its own ``__deepcopy__``, which must see the module as an instance of that base."""
    cls = type(self)
    self.__class__ = cls.__bases__[-1]
    try:
        copied = copy.deepcopy(self, memo)
    finally:
        self.__class__ = cls
    return put(copied, mixin, self.__dict__.get(mixin._torchckpt_setting))


def _remade(make: Callable[..., Any], arguments: tuple[Any, ...], mixins: _Mixins) -> Any:
    module = make(*arguments)
    for mixin, setting in reversed(mixins):
        put(module, mixin, setting)
    return module
