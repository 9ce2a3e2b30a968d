"""Mixin: what is put in front of the class of one module, so that its calls go another way, and nothing else changes.

A class, as FSDP2 and parametrize make one, and not an attribute of the instance: a copy of the module, deep, shallow or
unpickled, then finds its own weights. What the instance has is the *setting*, which copies take along. Without it the
mixin does nothing, so that it can also be taken away from under a class that was put in front of it since.
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from torchckpt.modules import is_compiled_class

__all__ = ["COMPILED", "Mixin", "plain_forward", "put", "take"]

COMPILED = "_torchckpt_compiled"
"""The attribute of the instance that holds what ``module.compile()`` made of the plain forward."""


class Mixin:
    """The base of the mixins, each of which says what becomes of a call."""

    _torchckpt_setting: ClassVar[str]
    """The attribute of the instance that holds the setting."""
    _torchckpt_call: ClassVar[Callable[..., Any]]
    """Called with the forward, bound, with args and kwargs for it, and with the setting, in place of the forward."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Do not tell the base class: it knows nothing of this subclass, and may want arguments."""

    def __getstate__(self) -> Any:
        # As torch's own compiled call, what was compiled is bound to this very module: a copy goes without.
        state: Any = super().__getstate__()  # type: ignore[misc]  # that of object, where it has one
        if isinstance(state, dict) and COMPILED in state:
            state = {name: value for name, value in state.items() if name != COMPILED}
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class cannot be imported: name its base, and make it again.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        own = base = type(self)
        mixins: _Mixins = []
        while (mixin := _front(base)) is not None:
            mixins.append((mixin, self.__dict__.get(mixin._torchckpt_setting)))
            base = base.__bases__[-1]
        plain = tuple(base if argument is own else argument for argument in arguments)
        return (_remade, (base if make is own else make, plain, mixins), *state)


_Mixins: TypeAlias = list[tuple[type[Mixin], Any]]
"""Mixins, the one in front first, each with its setting."""


def put(module: Any, mixin: type[Mixin], setting: Any) -> Any:
    """``module`` again, with ``mixin`` in front of its class; with a setting of None it does nothing yet."""
    if not isinstance(module, mixin):
        module.__class__ = _class_for(type(module), mixin)
    if setting is not None:
        module.__dict__[mixin._torchckpt_setting] = setting
    return module


def take(module: Any, mixin: type[Mixin]) -> None:
    """Take ``mixin`` away, and with it those that were left behind it without a setting."""
    module.__dict__.pop(mixin._torchckpt_setting, None)
    while (front := _front(type(module))) is not None and front._torchckpt_setting not in module.__dict__:
        module.__class__ = type(module).__bases__[-1]


def plain_forward(module: Any, mixin: type[Mixin]) -> Callable[..., Any]:
    """The forward of ``module`` that ``mixin`` stands in front of."""
    mixed: Any = next(cls for cls in type(module).__mro__ if cls.__bases__[:1] == (mixin,))
    forward: Callable[..., Any] = super(mixed, module).forward
    return forward


def _front(cls: type[Any]) -> type[Mixin] | None:
    """The mixin of ``cls``, if that was made here."""
    first = cls.__bases__[0] if cls.__bases__ else object
    return first if Mixin in first.__bases__ else None


def _class_for(base: type[Any], mixin: type[Mixin]) -> type[Any]:
    """The subclass of ``base``, under its name, with ``mixin`` in front. It dies with its last user."""
    for made in base.__subclasses__():
        if made.__bases__ == (mixin, base):
            return made

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(mixed, self).forward
        setting = self.__dict__.get(mixin._torchckpt_setting)
        return plain(*args, **kwargs) if setting is None else mixin._torchckpt_call(plain, args, kwargs, setting)

    @functools.wraps(base.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(mixed, self).__call__
        setting = self.__dict__.get(mixin._torchckpt_setting)
        return plain(*args, **kwargs) if setting is None else mixin._torchckpt_call(plain, args, kwargs, setting)

    namespace = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # The forward of what torch.compile(module) makes is set on the instance.
    namespace.update({"__call__": call} if is_compiled_class(base) else {"forward": forward})
    if hasattr(base, "__deepcopy__"):
        namespace["__deepcopy__"] = functools.partialmethod(_deepcopy, mixin)
    metaclass: Any = type(base)
    mixed: type[Any] = metaclass(base.__name__, (mixin, base), namespace)
    return mixed


def _deepcopy(self: Any, mixin: type[Mixin], memo: dict[int, Any]) -> Any:
    """For a base that copies itself its own way, which it does in its own class."""
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
