"""``offload_module`` and ``offload_layers``: every call of a module is a region whose saved tensors go to the host."""
from __future__ import annotations

from collections.abc import Sequence, Set

from torch import nn

from torchckpt.errors import called, check
from torchckpt.regions.moved.region import LEAST_BYTES, Moving, least_bytes_faults
from torchckpt.regions.wrap.layers import LayersHandle, Selector, wrap_layers
from torchckpt.regions.wrap.module import RegionHandle, as_region, module_faults

__all__ = ["offload_layers", "offload_module"]


@called("offload_module")
def offload_module(module: nn.Module, *, min_bytes: int = LEAST_BYTES) -> RegionHandle:
    """From now on, run every call of ``module`` as :func:`offload` does.

    In place: ``state_dict`` keys, ``isinstance``, ``repr``, hooks, pickling and copying stay as they are, and a copy
    moves its tensors, too. Hooks of ``module`` run outside the region, those of its children inside.

    >>> handles = [torchckpt.offload_module(layer) for layer in model.layers]
    >>> handles[0].remove()           # this one keeps its activations on the device again

    Args:
        module: any ``nn.Module`` whose ``forward`` is a method of its class.
        min_bytes: as in :func:`offload`. Default: 1 MiB.

    Returns:
        A handle whose ``remove()`` makes the module plain again. A ``with`` block on the handle removes at its end.

    Raises:
        ArgumentError: ``module`` is no module, is a region already, or has its ``forward`` set on the instance; or
            ``min_bytes`` is no number of bytes.
    """
    check([*module_faults(module, "offload"), *least_bytes_faults(min_bytes)])
    return as_region(module, Moving(min_bytes))


@called("offload_layers")
def offload_layers(
    model: nn.Module,
    layers: Selector | Sequence[Selector] | Set[Selector],
    *,
    every: int = 1,
    min_bytes: int = LEAST_BYTES,
) -> LayersHandle:
    """From now on, run every call of the chosen layers of ``model`` as :func:`offload` does.

    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))
    >>> handle = torchckpt.offload_layers(model, torch.nn.Sequential, every=2)
    >>> handle
    <offload_layers: 2 modules: 0, 2>
    >>> handle.remove()

    Args:
        model: the module whose submodules are chosen. It is never chosen itself.
        layers: a class, a name or a pattern of names, a function of a module, or several of these: as in
            :func:`checkpoint_layers`.
        every: of those that are chosen, in the order of ``model.named_modules()``, the first and then every n-th one.
            A link that takes two forwards of a layer to copy one has the time for every second layer.
        min_bytes: as in :func:`offload`. Default: 1 MiB.

    Returns:
        A handle with ``names`` and ``remove()``; as a context manager it removes at its end.

    Raises:
        ArgumentError: all faults of the call in one message. Nothing is changed.
    """
    faults = least_bytes_faults(min_bytes)
    return LayersHandle(*wrap_layers(model, layers, every, Moving(min_bytes), faults), "offload_layers")
