"""Eager: one step of the model as it is, what a graph must be equal to."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.graph.allocations import live_bytes, measured_peak
from tests.helpers import assert_equal

__all__ = ["Result", "assert_same", "compare", "live_bytes", "measured_peak", "step"]


class Result(NamedTuple):
    """What a step gave; all tensors are copies. A gradient is None where there is none."""

    outputs: Any
    gradients: dict[str, Tensor | None]  # of parameters by their names, of inputs as "inputs[0]"
    buffers: dict[str, Tensor]
    rng_states: list[Tensor]  # of the CPU, then of each CUDA device


def step(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor],
    seed: int = 0,
    call: Callable[..., Any] | None = None,
) -> Result:
    """A forward, the loss, a backward. The model's buffers, and the generators, are afterwards as they were.

    Args:
        call: what runs in place of the model, on its parameters and buffers. Default: the model.
    """
    leaves = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)
    named = {**dict(model.named_parameters()), **{f"inputs[{place}]": leaf for place, leaf in enumerate(leaves)}}
    with torch.random.fork_rng(), _buffers_restored(model):
        torch.manual_seed(seed)
        model.zero_grad()
        outputs = (model if call is None else call)(*leaves)
        loss(outputs).backward()
        result = Result(
            pytree.tree_map_only(Tensor, _copy, outputs),
            {name: leaf.grad for name, leaf in named.items()},
            {name: buffer.clone() for name, buffer in model.named_buffers()},
            [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])],
        )
    model.zero_grad()
    return result


def assert_same(received: Result, expected: Result) -> None:
    """Raise AssertionError unless all is equal by ``torch.equal``: sparse is like sparse, coalesced; None like None."""
    assert_equal(*(pytree.tree_map_only(Tensor, _parts, result._asdict()) for result in (received, expected)))


def compare(
    model: nn.Module,
    step: Callable[..., Any],
    *args: Any,
    loss: Callable[[Any], Tensor] = lambda outputs: outputs.sin().sum(),
    **kwargs: Any,
) -> None:
    """One call and its backward in both, from one seed: outputs, gradients of parameters, buffers, random numbers."""
    results = []
    buffers = [buffer.clone() for buffer in model.buffers()]
    for call in (model, step):
        torch.manual_seed(3)
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)
        model.zero_grad()
        outputs = call(*args, **kwargs)
        loss(outputs).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        results.append((outputs, grads, [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()))
    model.zero_grad()
    assert_equal(results[1], results[0])


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _parts(tensor: Tensor) -> Tensor | Mapping[str, Any]:
    """A sparse tensor as its size, indices and values; any other as it is."""
    if not tensor.is_sparse:
        return tensor
    tensor = tensor.coalesce()
    return {"size": tuple(tensor.shape), "indices": tensor.indices(), "values": tensor.values()}
