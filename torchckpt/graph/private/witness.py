"""Witness: records the tensors that a traced forward makes, and the random numbers that it would freeze."""
from __future__ import annotations

import gc
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.runtime import is_random, operating, storage_number
from torchckpt.graph.private.surroundings import casting_once
from torchckpt.tensors import tensors_in

__all__ = ["Witness"]

_NO_HOLDERS = (types.FrameType, types.GeneratorType, Tensor)
_FIRST_SEED = 0x7C1B_0000_0000_0001


class Witness:
    """Runs a forward as its trace needs it, and records, by weak reference, each tensor that it makes.

    Args:
        tensors: the tensors that the forward is traced for. Autocast casts each leaf among them once, as in eager.
        tell: called with each operator of the forward.
    """

    def __init__(self, tensors: Sequence[Tensor], tell: Callable[[Any], None]) -> None:
        self._are_leaves = [tensor.is_leaf for tensor in tensors]
        self._casts_are_kept = torch.is_autocast_cache_enabled()
        self._seen: list[tuple[weakref.ref[Tensor], str]] = []
        self._tell = tell
        self._runs: list[list[Any]] = []  # the operators of each run of the forward, with their numbers

    @contextmanager
    def watching(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Run a forward on ``tensors``, those of its trace, inside this context. They are recorded, too.

        Raises:
            CaptureError: the forward drew random numbers that a trace would freeze, or did what it does not record.
        """
        generators, operators = _Generators(), list[Any]()

        def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._tell(operator)
            numbers = [repr(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (int, float, complex))]
            operators.append((operator, numbers))
            generators.drawn(operator, args)
            results = operator(*args, **kwargs)
            self._saw(results, f"a result of {operator}")
            return results

        self._saw(list(tensors), "an input, a parameter or a buffer")
        casting = casting_once(tensors, self._are_leaves, self._casts_are_kept)
        with casting, generators.watching(), operating(run), _Refusing(tensors):
            yield
        _refuse_backward(tensors)
        self._runs.append(operators)

    def refuse_changed(self) -> None:
        """Raise a CaptureError if the forward did something else in the last run of the trace than in the one before.
        AOTAutograd runs it twice."""
        *_, last = runs = self._runs[-2:]
        self._runs.clear()  # the call keeps its witness
        if any(run != last for run in runs):
            rule = "the call sets what it reads, so that it does something else each time"
            received = "another operation, or another number, in the second run of a trace than in the first"
            works = "model(*inputs), once, before, if that is at the first call alone; or a tensor in a buffer: "
            raise CaptureError(str(Fault(rule, received, f"{works}self.calls.add_(1)")))

    def refuse_left(self) -> None:
        """Raise a CaptureError if an object still holds a recorded tensor. Such a tensor has no data to use."""
        if any(True for _ in self._left()):
            gc.collect()  # a reference cycle may hold it
        for tensor, origin in self._left():
            holders = [type(holder).__name__ for holder in _holders(tensor)]
            if holders:
                rule = "the call leaves a tensor somewhere, and does not return it"
                received = f"{origin}, of shape {tuple(tensor.shape)}, in a {holders[0]} that outlives the call"
                works = "return output, tensor; or copy_() it into a buffer of the module"
                raise CaptureError(str(Fault(rule, received, works)))
        self._seen.clear()

    def _saw(self, values: Any, origin: str) -> None:
        self._seen.extend((weakref.ref(tensor), origin) for tensor in tensors_in(values))

    def _left(self) -> Iterator[tuple[Tensor, str]]:
        for seen, origin in self._seen:
            tensor = seen()
            if tensor is not None:
                yield tensor, origin


def _holders(tensor: Tensor) -> list[Any]:
    """The objects that hold ``tensor``. A tuple that nothing holds is left out: it belongs to a call inside torch."""
    holders = [holder for holder in gc.get_referrers(tensor) if not isinstance(holder, _NO_HOLDERS)]
    return [holder for holder in holders if type(holder) is not tuple or _has_holder(holder, holders)]


def _has_holder(value: Any, beside: list[Any]) -> bool:
    holders = gc.get_referrers(value)
    return any(holder is not beside and not isinstance(holder, _NO_HOLDERS) for holder in holders)


def _refuse_backward(tensors: Sequence[Tensor]) -> None:
    """Raise a CaptureError if a forward ran a backward: a trace does not record what that adds to ``tensors``."""
    if any(tensor.is_leaf and tensor.grad is not None for tensor in tensors):
        rule = "the call runs a backward, whose gradients would be added in the trace alone"
        works = "torch.autograd.grad(loss, tensors); or the backward outside of the call"
        raise CaptureError(str(Fault(rule, "loss.backward() in a forward", works)))


class _Refusing(TorchFunctionMode):
    """Refuses what a forward does beside the operators that its trace records, and asks of what its trace has not."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._traced = set(map(id, tensors))

    def __torch_function__(
        self, function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == _ATTRIBUTES.data.__set__ and storage_number(args[0]) != storage_number(args[1]):
            rule = "the call gives a tensor other data, which its trace would not read"
            works = "self.weight.data.copy_(value), of a parameter or a buffer; y = value, of another tensor"
            raise CaptureError(str(Fault(rule, "y.data = value", works)))
        if function == Tensor.is_set_to:
            rule = "the call asks whether two tensors are one, and its trace has others"
            raise CaptureError(str(Fault(rule, "a.is_set_to(b)", "a is b; or an answer from before the call")))
        if function in _OF_GRADIENTS and id(args[0]) in self._traced and not _is_moved(sys._getframe(1)):
            rule = "the call reads or sets the gradient of an input or a weight, which its trace has not"
            works = "the gradient, or what is made of it, as an input; or as a buffer that is set outside of the call"
            raise CaptureError(str(Fault(rule, "weight.grad in a forward", works)))
        return function(*args, **(kwargs or {}))


def _is_moved(caller: types.FrameType) -> bool:
    """Whether a module asks for its gradients to move them, as ``layer.to(x.device)`` in a forward does."""
    return caller.f_code is nn.Module._apply.__code__


_ATTRIBUTES: Any = Tensor  # as a class has them, not a tensor
_OF_GRADIENTS = _ATTRIBUTES.grad.__get__, _ATTRIBUTES.grad.__set__, _ATTRIBUTES.grad.__delete__


class _Generators:
    """Refuses a forward whose random numbers a trace would freeze, or draw in another order.

    A trace draws nothing. So the CPU's generator is free to count: its seed is the number of random operations so far.
    A forward that seeds it, or puts an earlier state back, is noticed at the next random operation, or at the end.
    """

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a forward inside this context. The generator of torch is afterwards as it was before.

        Raises:
            CaptureError: the forward drew a number of Python or NumPy, or set a generator of torch.
        """
        cpu, before = torch.default_generator, torch.default_generator.get_state()
        others, self._seed = _states(), _FIRST_SEED
        cpu.manual_seed(self._seed)
        try:
            yield
            self._check()
        finally:
            cpu.set_state(before)
        for name, state in _states().items():
            if others.get(name, state) != state:
                rule = "the call draws random numbers that are not torch's, and would be the same in all calls"
                works = "torch.rand(()) in place of random.random(); or a number that is drawn before the call"
                raise CaptureError(str(Fault(rule, f"a forward that draws numbers of {name}", works)))

    def drawn(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Count an operator of the trace if it draws."""
        if is_random(operator):
            self._check()
            _refuse_scattered(operator, args)
            self._seed += 1
            torch.default_generator.manual_seed(self._seed)

    def _check(self) -> None:
        if torch.default_generator.initial_seed() != self._seed:
            rule = "the call sets the state of a generator, by Python code that runs in the trace alone"
            works = "torch.manual_seed(0) before the call; or numbers that are drawn before the call, as an input"
            raise CaptureError(str(Fault(rule, "a forward that seeds torch's generator, or sets its state", works)))


def _refuse_scattered(operator: Any, args: tuple[Any, ...]) -> None:
    """Raise a CaptureError for numbers that are drawn into a tensor in the order of its memory. A trace has nothing in
    place: its tensor lies in another order, or without gaps."""
    name = operator.overloadpacket.__name__
    if name not in ("bernoulli_", "normal_"):
        return
    tensor = args[0]
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    if tensor.numel() and (spanned != tensor.numel() or (name == "bernoulli_" and not tensor.is_contiguous())):
        rule = "the call draws random numbers into a tensor that is not contiguous, where a trace would draw others"
        received = f"{operator} of strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}"
        works = "nn.Dropout(p) without inplace=True; or x = x.contiguous() before"
        raise CaptureError(str(Fault(rule, received, works)))


def _states() -> dict[str, Any]:
    """The state of the generator of each library, by its name. NumPy's counts if NumPy is imported."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, key, *rest = numpy.get_state()
        states["numpy.random"] = name, key.tobytes(), rest
    return states
