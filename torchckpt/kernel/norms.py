"""Running statistics: torch's norm layers update theirs once per forward, and not again in a replay.

While a thread replays, global forward hooks look at the modules that are called. A norm layer that would update its
buffers gets copies of them to update, for as long as that call takes. What such a layer computes does not depend on its
buffers, so it is the same to the bit. Forwards, and replays without norm layers, pay next to nothing. A forward whose
updates come later, all at once, gets copies by ``on_copies``.
"""
from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

from torchckpt.kernel.flags import thread
from torchckpt.kernel.private import global_forward_hooks, global_forward_pre_hooks, keep_from_dynamo, norm_layer

__all__ = ["is_statistic", "on_copies", "own_buffers", "unwatch", "updates", "watch"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"
_FILTER = ("ignore", re.compile(_WARNING, re.IGNORECASE), Warning, None, 0)  # as it stands in warnings.filters

_COMPILED = "_orig_mod"  # the name of what torch.compile(module) holds

_replays: list[None] = []
"""As many as are under way, in all threads."""

_lock = threading.Lock()
_lent: dict[nn.Module, tuple[int, dict[str, Tensor]]] = {}
"""The layers that hold copies now: in how many threads at once, and their own buffers."""


def watch(borrowers: list[nn.Module], function: Any) -> None:
    """Until ``unwatch``: lend copies to the norm layers that this replay of ``function`` calls."""
    with _lock:
        _replays.append(None)
        if len(_replays) == 1:
            global_forward_pre_hooks[_KEY], global_forward_hooks[_KEY] = _lend, _end_of_call
    # torch warns of any global hook when a compiled module is called. Ours does not mind being called twice. Each new
    # filter makes Python forget which warnings it has shown, so it is added only where it is missing.
    if "torch._dynamo" in sys.modules and _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", _WARNING)
    if type(function) is MethodType and isinstance(function.__self__, norm_layer):  # that is called, and not the module
        _lend(function.__self__, None)


def unwatch(borrowers: list[nn.Module]) -> None:
    """End that, and the loans of layers whose call did not end."""
    with _lock:
        _replays.pop()
        if not _replays:
            global_forward_pre_hooks.pop(_KEY, None)
            global_forward_hooks.pop(_KEY, None)
    if borrowers:
        _give_back(borrowers)


def is_statistic(tensor: Tensor) -> bool:
    """Whether ``tensor`` may come from copies that were lent, to a norm layer whose call is under way."""
    return bool(thread.flags[2]) and not tensor.requires_grad


def updates(layer: nn.Module) -> bool:
    """Whether a call of ``layer`` would update its buffers."""
    return isinstance(layer, norm_layer) and layer.training and layer.track_running_stats


@contextmanager
def on_copies(layer: nn.Module) -> Iterator[None]:
    """Inside, ``layer`` updates copies of its buffers."""
    _borrow(layer)
    try:
        yield
    finally:
        _give_back([layer])


def own_buffers(layer: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of ``layer``, and not the copies, even if it holds those now."""
    with _lock:
        return {**layer._buffers, **_lent.get(layer, (0, {}))[1]}


def _borrow(layer: nn.Module) -> None:
    """Have ``layer`` hold copies of its buffers, the same in all threads."""
    with _lock:
        users, own = _lent.get(layer, (0, {}))
        if not users:
            own = {name: buffer for name in _BUFFERS if (buffer := layer._buffers.get(name)) is not None}
            layer._buffers.update({name: buffer.clone() for name, buffer in own.items()})
        _lent[layer] = users + 1, own


def _give_back(layers: list[nn.Module]) -> None:
    """Put back the buffers of ``layers``, unless another thread uses the copies too."""
    for layer in layers:
        with _lock:
            users, own = _lent.pop(layer)
            if users > 1:
                _lent[layer] = users - 1, own
            else:
                layer._buffers.update(own)


def _lend(module: nn.Module, _: Any) -> None:
    borrowers = thread.flags[2]
    if borrowers is None:  # this thread does not replay; another one does
        return
    if not isinstance(module, norm_layer) and _COMPILED not in module._modules:  # most, called often: no more than this
        return
    for layer in _updating_layers(module):
        if layer not in borrowers:
            _borrow(layer)
            borrowers.append(layer)


def _end_of_call(module: nn.Module, _: Any, __: Any) -> None:
    borrowers = thread.flags[2]
    if borrowers:
        ended = [layer for layer in _updating_layers(module) if layer in borrowers]
        borrowers[:] = [layer for layer in borrowers if layer not in ended]
        _give_back(ended)


def _updating_layers(module: nn.Module) -> Iterator[nn.Module]:
    # A compiled module calls its norm layers out of the hooks' sight: take all that it has.
    for layer in module.modules() if _COMPILED in module._modules else (module,):
        if updates(layer):
            yield layer


_KEY = id(_lend)
"""Of the hooks, the same in every replay: Dynamo compiles a module anew where the keys of hooks are others."""

keep_from_dynamo(_lend, _end_of_call)
