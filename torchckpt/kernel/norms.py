"""Running statistics: torch's norm layers update theirs once per forward, and not again in a replay.

While a thread replays, a global forward pre-hook looks at the modules that are called. A norm layer that would update
its buffers gets copies of them to update, until the replay ends. What such a layer computes does not depend on its
buffers, so it is the same to the bit. Forwards, and replays without norm layers, pay next to nothing.
"""
from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from torchckpt.kernel.flags import flags
from torchckpt.kernel.private import global_forward_pre_hooks, norm_layer

__all__ = ["give_back", "unwatch", "watch"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"

_lock = threading.Lock()
_lent: dict[nn.Module, tuple[int, dict[str, Tensor]]] = {}
"""The layers that hold copies now: how many replays use each, and its own buffers."""


def watch(replay: object) -> None:
    """Until ``unwatch(replay)``: in threads that replay, lend copies to the norm layers that are called."""
    # torch warns of any global hook when a compiled module is called. Ours does not mind being called twice. Each new
    # filter makes Python forget which warnings it has shown, so it is added only where it is missing.
    if "torch._dynamo" in sys.modules and _WARNING not in (getattr(f[1], "pattern", None) for f in warnings.filters):
        warnings.filterwarnings("ignore", _WARNING)
    global_forward_pre_hooks[id(replay)] = _lend


def unwatch(replay: object) -> None:
    del global_forward_pre_hooks[id(replay)]


def give_back(layers: list[nn.Module]) -> None:
    """End the loan of a replay that met ``layers``."""
    for layer in layers:
        with _lock:
            users, own = _lent.pop(layer)
            if users > 1:
                _lent[layer] = users - 1, own
            else:
                layer._buffers.update(own)


def _lend(module: nn.Module, _: Any) -> None:
    borrowers = flags.norm_layers
    if borrowers is None:  # this thread does not replay; another one does
        return
    for layer in _updating_layers(module):
        if layer not in borrowers:
            with _lock:
                users, own = _lent.get(layer, (0, {}))
                if not users:
                    own = {name: buffer for name in _BUFFERS if (buffer := layer._buffers.get(name)) is not None}
                    layer._buffers.update({name: buffer.clone() for name, buffer in own.items()})
                _lent[layer] = users + 1, own
            borrowers.append(layer)


def _updating_layers(module: nn.Module) -> Iterator[nn.Module]:
    # A compiled module calls its norm layers out of the hook's sight: take all that it has.
    for layer in module.modules() if hasattr(module, "_orig_mod") else (module,):
        if isinstance(layer, norm_layer) and layer.training and layer.track_running_stats:
            yield layer
