"""The plain call and the region side by side: run both from one seed, compare every bit."""
from __future__ import annotations

import gc
import io
import threading
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree as pytree

from torchckpt import Checkpointing, is_checkpointing, is_recomputing


class Block(nn.Module):
    """Two linear layers with a dropout between them."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, input):
        return self.second(nn.functional.dropout(self.first(input).tanh(), 0.5)).sigmoid()


class Mark(Function):
    """Passes a tensor through. Its backward writes the name, and whether the gradient was defined, into ``events``."""

    @staticmethod
    def forward(ctx, input, name, events):
        ctx.set_materialize_grads(False)
        ctx.name, ctx.events = name, events
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append(ctx.name if grad is not None else f"{ctx.name} (undefined)")
        return grad, None, None


class Probe(Function):
    """Passes a tensor through. Its backward calls ``look``."""

    @staticmethod
    def forward(ctx, input, look):
        ctx.look = look
        return input.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.look()
        return grad, None


def leaf(*shape, device="cpu", dtype=None):
    """A random tensor that requires grad."""
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


def plain(function, *args, **kwargs):
    """The call that every region must be equal to."""
    return function(*args, **kwargs)


def by_hand(function, *args, **kwargs):
    """A region whose replay has a place of its own in the graph."""
    region = Checkpointing(function, *args, **kwargs)
    return region.recompute(region.checkpoint())


def prefetched(function, *args, **kwargs):
    """A region that is replayed before there is a gradient."""
    region = Checkpointing(function, *args, **kwargs)
    outputs = region.checkpoint()
    region.prefetch()
    return outputs


def replays(call, number: int) -> int:
    """How often backwards replay where regions of ``checkpoint`` are replayed so often; nothing is for other calls."""
    return number if call.__name__ in ("checkpoint", "by_hand") else 0


def doing() -> str:
    """What this thread does, in words."""
    return _WORDS[is_checkpointing(), is_recomputing()]


_WORDS = {
    (False, False): "plain call",
    (True, False): "forward",
    (True, True): "forward in a replay",
    (False, True): "replay",
}


class Run(NamedTuple):
    """What a forward and its backward gave."""

    outputs: Any
    inputs: list[Tensor | None]  # gradients of the inputs
    parameters: list[Tensor | None]  # gradients of the parameters


def total(outputs):
    """A loss of every output that has a gradient, no two elements alike in it."""
    graded = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    real = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in graded]
    return sum((place + 1) * leaf.sin().sum() for place, leaf in enumerate(real))


def run(function, *args, modules=(), loss=total, **kwargs) -> Run:
    """``function(*args, **kwargs)`` and its backward, on fresh leaves, from the same seed each time."""
    torch.manual_seed(1)
    leaves: dict[int, Tensor] = {}

    def fresh(tensor):
        if id(tensor) not in leaves:
            leaves[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return leaves[id(tensor)]

    args, kwargs = pytree.tree_map_only(Tensor, fresh, (args, kwargs))
    parameters = parameters_of(modules)
    clear_gradients(*parameters)
    outputs = function(*args, **kwargs)
    loss(outputs).backward()
    return Run(outputs, gradients(*leaves.values()), gradients(*parameters))


def assert_transparent(call, function, *args, modules=(), loss=total, **kwargs) -> Run:
    """``call(function, *args, **kwargs)`` is the plain call, to the bit."""

    def program(call, *args, **kwargs):
        return call(function, *args, **kwargs)

    return assert_program_transparent(call, program, *args, modules=modules, loss=loss, **kwargs)


def assert_program_transparent(call, program, *args, modules=(), loss=total, **kwargs) -> Run:
    """``program(call, *args, **kwargs)``, which makes its regions by ``call``, is the program with plain calls."""
    expected = run(program, plain, *args, modules=modules, loss=loss, **kwargs)
    received = run(program, call, *args, modules=modules, loss=loss, **kwargs)
    assert_equal(received, expected)
    return received


def assert_equal(received, expected) -> None:
    """The same containers of the same values: tensors by ``torch.equal``, dtype, device and ``requires_grad``."""
    leaves, spec = pytree.tree_flatten_with_path(received)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for (path, leaf), expected_leaf in zip(leaves, expected_leaves):
        if isinstance(expected_leaf, Tensor):
            place = pytree.keystr(path)
            assert isinstance(leaf, Tensor), place
            assert (leaf.dtype, leaf.device) == (expected_leaf.dtype, expected_leaf.device), place
            assert leaf.requires_grad == expected_leaf.requires_grad, place
            assert torch.equal(leaf, expected_leaf), place
        else:
            assert leaf == expected_leaf


def parameters_of(modules):
    return [parameter for module in modules for parameter in module.parameters()]


def clear_gradients(*tensors) -> None:
    for tensor in tensors:
        tensor.grad = None


def gradients(*tensors):
    """Copies of the gradients."""
    return [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]


def in_thread(function, *args):
    """``function(*args)`` in a thread of its own; what it returns or raises."""
    return in_threads(lambda: function(*args))[0]


def in_threads(*functions):
    """Call all ``functions`` at once, each in a thread; what they return, in order. Raises what one of them raises."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def work(place, function):
        try:
            results[place] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]
    return results


def is_collected(reference, seconds=10):
    """Whether what a weak reference means is gone, or goes soon: after a backward that failed, the thread of autograd
    for the device may still hold the last node when the caller has the error.
    """
    latest = time.monotonic() + seconds
    gc.collect()
    while reference() is not None and time.monotonic() < latest:
        time.sleep(0.01)
        gc.collect()
    return reference() is None


def same_or_not(a, b):
    """Tells one tensor given twice from two that are equal."""
    return (a.square() if a is b else a * b * b).sin()


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class FullDevice:
    """Counts how often it was out of memory, as CUDA's allocator does."""

    ooms = 0

    def fail(self, *_: object) -> None:
        self.ooms += 1
        raise torch.OutOfMemoryError("none left")

    def recover(self, *_: object) -> None:
        """As cuDNN does, which goes on with another kernel."""
        self.ooms += 1
