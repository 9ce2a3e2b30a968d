"""Running statistics: norm layers update their buffers once per forward, and not a second time in the replay.

While a thread replays, global forward hooks look at the modules that are called. A norm layer that would update its
buffers gets copies to update until its call ends. The output of a layer in training does not depend on these buffers,
so it is the same to the bit. Forwards, and replays without norm layers, cost almost nothing more. A caller that updates
the buffers later by itself (``DeferredBatchNorm``) gets copies by ``on_copies``.
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

from torchckpt.kernel.flags import Replay, thread
from torchckpt.kernel.private import global_forward_hooks, global_forward_pre_hooks, keep_from_dynamo, norm_layer

__all__ = ["is_statistic", "on_copies", "own_buffers", "unwatch", "updates", "watch"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"
_FILTER = ("ignore", re.compile(_WARNING, re.IGNORECASE), Warning, None, 0)  # the form of an entry of warnings.filters

_COMPILED = "_orig_mod"  # the name under which torch.compile(module) holds the module

_replays: list[None] = []
"""One entry for each replay that is running, in all threads."""

_lock = threading.Lock()
_copied: dict[nn.Module, tuple[int, dict[str, Tensor]]] = {}
"""The layers that hold copies now: how many threads use the copies, and the layer's own buffers."""


def watch(function: Any) -> None:
    """Until ``unwatch``: the norm layers that this replay of ``function`` calls get copies."""
    with _lock:
        _replays.append(None)
        if len(_replays) == 1:
            global_forward_pre_hooks[_KEY], global_forward_hooks[_KEY] = _before_call, _after_call
    # torch warns of any global hook when a compiled module is called: the hook may run twice. Ours may run twice.
    # Each new filter makes Python forget which warnings it has shown, so the filter is added only if it is missing.
    if "torch._dynamo" in sys.modules and _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", _WARNING)
    if type(function) is MethodType and isinstance(function.__self__, norm_layer):  # a bound forward: no hooks run
        _before_call(function.__self__, None)


def unwatch(replay: Replay) -> None:
    """End ``watch``, and take the copies back from layers whose call raised."""
    with _lock:
        _replays.pop()
        if not _replays:
            global_forward_pre_hooks.pop(_KEY, None)
            global_forward_hooks.pop(_KEY, None)
    if replay:
        _restore_buffers(replay)


def is_statistic(tensor: Tensor) -> bool:
    """Whether ``tensor`` may be a copy of a buffer: a norm layer is running on copies in this thread's replay."""
    return bool(thread.flags[2]) and not tensor.requires_grad


def updates(layer: nn.Module | None) -> bool:
    """Whether a call of ``layer`` would update its buffers."""
    return isinstance(layer, norm_layer) and layer.training and layer.track_running_stats


@contextmanager
def on_copies(layer: nn.Module) -> Iterator[None]:
    """Inside, ``layer`` updates copies of its buffers."""
    _use_copies(layer)
    try:
        yield
    finally:
        _restore_buffers([layer])


def own_buffers(layer: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of ``layer`` itself, even while it holds copies."""
    with _lock:
        return {**layer._buffers, **_copied.get(layer, (0, {}))[1]}


def _use_copies(layer: nn.Module) -> None:
    """Give ``layer`` copies of its buffers. All threads that use copies at the same time share them."""
    with _lock:
        users, own = _copied.get(layer, (0, {}))
        if not users:
            own = {name: buffer for name in _BUFFERS if (buffer := layer._buffers.get(name)) is not None}
            layer._buffers.update({name: buffer.clone() for name, buffer in own.items()})
        _copied[layer] = users + 1, own


def _restore_buffers(layers: list[nn.Module]) -> None:
    """Put back the own buffers of ``layers``, once no other thread uses the copies."""
    for layer in layers:
        with _lock:
            users, own = _copied.pop(layer)
            if users > 1:
                _copied[layer] = users - 1, own
            else:
                layer._buffers.update(own)


def _before_call(module: nn.Module, _: Any) -> None:
    replay = thread.flags[2]
    if replay is None:  # another thread is replaying, not this one
        return
    if not isinstance(module, norm_layer) and _COMPILED not in module._modules:  # most modules: return fast
        return
    for layer in _updating_layers(module):
        if layer not in replay:
            _use_copies(layer)
            replay.append(layer)


def _after_call(module: nn.Module, _: Any, __: Any) -> None:
    replay = thread.flags[2]
    if replay:
        ended = [layer for layer in _updating_layers(module) if layer in replay]
        replay[:] = [layer for layer in replay if layer not in ended]
        _restore_buffers(ended)


def _updating_layers(module: nn.Module) -> Iterator[nn.Module]:
    # Hooks do not see the norm layers that a compiled module calls: take all layers in it.
    for layer in module.modules() if _COMPILED in module._modules else (module,):
        if updates(layer):
            yield layer


_KEY = id(_before_call)
"""The key of the hooks, the same in every replay: Dynamo recompiles a module when the keys of its hooks change."""

keep_from_dynamo(_before_call, _after_call)
