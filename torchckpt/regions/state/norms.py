"""Running statistics: norm layers update their buffers once per forward, and not a second time in the replay.

A forward notes which norm layers it ran. In its replay they update copies of their buffers. The output of a layer in
training does not depend on these buffers, so it is the same to the bit. A layer ran if the versions of its buffers
changed. A layer that ``reached.py`` does not find is found in the call stack, when autograd saves its running mean.

Each layer has its copies by hooks. Around compiled code it has them for the whole replay: hooks would change the graph.

A caller that updates the buffers later by itself (``DeferredBatchNorm``) gets copies by ``on_copies``.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from torchckpt.regions.flags import Replay, local
from torchckpt.regions.private import (
    batch_norm_layer,
    keep_from_dynamo,
    norm_layer,
    set_version,
    storage_key,
    without_selective_modes,
)
from torchckpt.tensors import version_of

__all__ = [
    "COUNTER", "STATISTICS", "calls_end", "is_in_call", "is_statistic", "lend", "look", "moved", "note_caller",
    "on_copies", "own_buffers", "ran", "running_means", "take_back", "updates",
]

COUNTER = "num_batches_tracked"
STATISTICS = ("running_mean", "running_var", COUNTER)

_lock = threading.Lock()
_copied: dict[nn.Module, tuple[int, dict[str, Tensor]]] = {}
"""The layers that hold copies now: how many users the copies have, and the layer's own buffers."""

_watched: dict[nn.Module, int] = {}
"""The layers that have hooks now: for how many replays."""

_Values: TypeAlias = Mapping[str, Tensor]
_NOTHING: _Values = {}

Looked: TypeAlias = "Sequence[tuple[nn.Module, tuple[int, int] | None, _Values]]"
"""Layers as a forward finds them, each with the versions of its buffers, which tell later whether it ran, or None if it
surely updates them; and with copies of its buffers, or nothing."""


def look(layers: Iterable[nn.Module], values: bool) -> Looked:
    """Look at ``layers`` before a forward. With ``values``, copy their buffers: an InstanceNorm makes from them what
    autograd saves."""
    looked = []
    for layer in layers:
        copies = {name: buffer.detach().clone() for name, buffer in _own(layer).items()} if values else _NOTHING
        looked.append((layer, None if updates(layer) else _versions(layer), copies))
    return looked


def running_means(looked: Looked) -> dict[int, Tensor | None]:
    """By ``id``: those of layers that surely run. When autograd saves one of these, its layer need not be noted."""
    return {id(mean := layer._buffers.get("running_mean")): mean for layer, versions, _ in looked if versions is None}


def ran(looked: Looked, noted: Iterable[nn.Module]) -> dict[nn.Module, _Values]:
    """The layers that would update their buffers, or have done so since, and those that were ``noted``."""
    layers: dict[nn.Module, _Values] = dict.fromkeys(noted, _NOTHING)
    for layer, versions, values in looked:
        if versions is None or layer in layers or updates(layer) or _versions(layer) != versions:
            layers[layer] = values
    return layers


def lend(replay: Replay, is_compiled: bool) -> None:
    """Let the layers of ``replay`` update copies of their buffers in this thread, until ``take_back``.

    Each layer has the copies during its calls alone, by hooks of its own, since other threads may call it meanwhile.
    If there is compiled code, or its forward alone is called, which no hook sees, it has them until the end.
    """
    whole = is_compiled or any(layer in _bare for layer in replay.ran)
    for layer, values in replay.ran.items():
        if whole:
            _use_copies(layer, values)
            replay.append(layer)
        else:
            _watch(layer)
            replay.watched.append(layer)


def take_back(replay: Replay) -> None:
    """End ``lend``, and take the copies back from layers whose call raised."""
    while replay.watched:
        _unwatch(replay.watched.pop())
    while replay:
        _restore_buffers(replay.pop())


@contextmanager
def calls_end() -> Iterator[None]:
    """At the end of the block, which is inside of a replay, layers whose call raised have their buffers again: what is
    around the block may put others there."""
    try:
        yield
    finally:
        replay = local.thread.flags[2]
        while replay and replay.watched:
            _restore_buffers(replay.pop())


def note_caller(frame: FrameType) -> bool:
    """Note the norm layer in whose call autograd saves a tensor. Return whether it does so in a function of theirs.

    The tensor is saved in ``frame``. Between it and the frame of the layer there are at most frames of modes.
    """
    if frame.f_code not in _OF_NORMS or local.thread.norms is None:
        return False
    outer = frame.f_back
    for _ in range(_DEEPEST):
        if outer is None:
            break
        layer: Any = outer.f_locals.get("self")
        if issubclass(type(layer), norm_layer):
            local.thread.norms.append(layer)
            if not updates(layer):
                local.thread.norms.read = [*local.thread.norms.read, (layer, _versions(layer))]
            if not _is_of_call(outer, layer):
                _bare.add(layer)
            break
        outer = outer.f_back
    return True


def moved(read: Iterable[tuple[nn.Module, tuple[int, int]]]) -> list[nn.Module]:
    """The layers in ``read``, which have read their statistics, whose buffers have other versions now."""
    return [layer for layer, versions in read if _versions(layer) != versions]


def is_in_call(frame: FrameType) -> bool:
    """Whether ``frame``, of a function for normalisation, is surely inside of a call of the layer's module."""
    layer = frame.f_back
    return layer is not None and (call := layer.f_back) is not None and call.f_code.co_filename == _CALLS


def _is_of_call(frame: FrameType, layer: nn.Module) -> bool:
    """Whether ``frame``, in which ``layer`` works, comes of a call of the module, and not of its bare forward."""
    outer = frame.f_back
    while outer is not None and outer.f_code.co_filename != _CALLS and outer.f_locals.get("self") is layer:
        outer = outer.f_back  # a forward may call that of its base
    return outer is not None and outer.f_code.co_filename == _CALLS


_CALLS = nn.Module.__call__.__code__.co_filename

_bare: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The layers whose forward was called without a call of the module: no hook of theirs is run."""

_OF_NORMS = frozenset({F.batch_norm.__code__, F.instance_norm.__code__})

_DEEPEST = 8
"""Frames of modes between a function and its layer, at most."""


def is_statistic(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a copy of a buffer that a norm layer holds in this thread's replay."""
    replay = local.thread.flags[2]
    if not replay or tensor.requires_grad:
        return False
    key = storage_key(tensor)
    if any(key == storage_key(copy) for layer in replay for copy in _own(layer).values()):
        return True
    # An InstanceNorm saves repetitions of its copies. With hooks, a layer has copies during its call alone.
    if not replay.watched or tensor.dim() != 1:
        return False
    return not all(isinstance(layer, batch_norm_layer) for layer in replay)


def updates(layer: nn.Module | None) -> bool:
    """Whether a call of ``layer`` would update its buffers."""
    return isinstance(layer, norm_layer) and layer.training and layer.track_running_stats


@contextmanager
def on_copies(layer: nn.Module) -> Iterator[None]:
    """Inside the block, ``layer`` updates copies of its buffers, as it will in the replays of regions around."""
    if local.thread.norms is not None:
        local.thread.norms.append(layer)
    _use_copies(layer, _NOTHING)
    try:
        yield
    finally:
        _restore_buffers(layer)


def own_buffers(layer: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of ``layer`` itself, even while it holds copies."""
    with _lock:
        return {**layer._buffers, **_copied.get(layer, (0, {}))[1]}


def _use_copies(layer: nn.Module, values: _Values, is_lent: bool = False) -> None:
    """Give ``layer`` copies of its buffers, or of ``values``. All that use copies at the same time share them.
    ``is_lent``: its buffers are substitutes."""
    with _lock:
        users, own = _copied.get(layer, (0, {}))
        if not users:
            own = _own(layer)
            with without_selective_modes():  # which know the operators of the forward alone
                for name, buffer in own.items():  # a call in evaluation saves a lent one, and its version is compared
                    copy = values.get(name, buffer).clone()
                    layer._buffers[name] = set_version(copy, version_of(buffer)) if is_lent else copy
        _copied[layer] = users + 1, own


def _restore_buffers(layer: nn.Module, keeps: bool = False) -> None:
    """Put back the own buffers of ``layer``, once nobody else uses the copies. Or keep these, if the own are lent."""
    with _lock:
        users, own = _copied.pop(layer)
        if users > 1:
            _copied[layer] = users - 1, own
        elif not keeps:
            layer._buffers.update(own)


def _watch(layer: nn.Module) -> None:
    with _lock:
        _watched[layer] = users = _watched.get(layer, 0) + 1
        if users == 1:
            layer._forward_pre_hooks[_KEY], layer._forward_hooks[_KEY] = _before_call, _after_call
            if len(layer._forward_hooks) > 1:  # hooks of others come later
                layer._forward_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined]


def _unwatch(layer: nn.Module) -> None:
    with _lock:
        _watched[layer] -= 1
        if not _watched[layer]:
            del _watched[layer], layer._forward_pre_hooks[_KEY], layer._forward_hooks[_KEY]


def _before_call(layer: nn.Module, _: Any) -> None:
    replay = local.thread.flags[2]
    if replay is not None and layer in replay.ran and layer not in replay and updates(layer):
        _use_copies(layer, replay.ran[layer], layer in replay.lent)
        replay.append(layer)
        if local.thread.norms is not None:  # a forward in the replay: the versions of the own buffers tell nothing
            local.thread.norms.append(layer)


def _after_call(layer: nn.Module, _: Any, __: Any) -> None:
    replay = local.thread.flags[2]
    if replay is not None and layer in replay:
        replay.remove(layer)
        _restore_buffers(layer, layer in replay.lent)


_KEY = id(_before_call)


def _own(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name in STATISTICS if (buffer := layer._buffers.get(name)) is not None}


def _versions(layer: nn.Module) -> tuple[int, int]:
    """The versions of the buffers that torch's layers change by a counted operation: BatchNorm changes so the number of
    batches, and InstanceNorm the mean."""
    mean, count = layer._buffers.get("running_mean"), layer._buffers.get(COUNTER)
    try:
        return 0 if mean is None else mean._version, 0 if count is None else count._version
    except RuntimeError:  # inference tensors have no versions
        return 0, 0


keep_from_dynamo(_before_call, _after_call)
