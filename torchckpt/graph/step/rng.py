"""Rng: repeat random operations from the saved state of their generator, without a lasting change to it."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.runtime import argument_of, is_random
from torchckpt.tensors import tensors_in

__all__ = ["draws", "generator_state", "record_states", "refuse_generators", "replayed", "state_of"]


def generator_state(device: str) -> Tensor:
    """The state of the default generator of ``device``."""
    if device == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def replayed(state: Tensor, device: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run ``target`` with the generator in ``state``, then restore the generator's present state."""
    before = generator_state(device)
    _set(device, state)
    try:
        return target(*args, **kwargs)
    finally:
        _set(device, before)


def draws(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers; an attention whose dropout is 0 draws none."""
    return is_random(node.target) and argument_of(node, "dropout_p") != 0.0


def refuse_generators(graph: fx.Graph) -> None:
    """Raise a CaptureError if an operation has its own ``generator=``: a graph cannot hold the state of one."""
    for node in graph.nodes:
        if node.op == "call_function" and node.kwargs.get("generator") is not None:
            rule = "the call draws from a generator that is not the default one of its device"
            works = "torch.manual_seed() before the step; or draw outside of the call, and pass the tensor"
            raise CaptureError(str(Fault(rule, f"{node.name} with generator=", works)))


def record_states(graph: fx.Graph) -> None:
    """Insert before each random operation of ``graph`` a node that reads its generator's state."""
    for node in [node for node in graph.nodes if node.op == "call_function" and draws(node)]:
        like = tensors_in(node.meta["val"])[0]
        with graph.inserting_before(node):
            state = graph.call_function(generator_state, (str(like.device),))
        size = generator_state(str(like.device)).numel()
        with like.fake_mode:  # type: ignore[attr-defined]
            state.meta["val"] = torch.empty(size, dtype=torch.uint8)


def state_of(node: fx.Node) -> fx.Node | None:
    """The node that reads the generator's state for ``node``; None if there is none."""
    before = node.prev
    return before if before.op == "call_function" and before.target is generator_state else None


def _set(device: str, state: Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
