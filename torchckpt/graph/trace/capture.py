"""Capture: a function of tensors, traced once with its derivatives, which then runs as the graphs of a schedule."""
from __future__ import annotations

import copy
import gc
import os
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Condition, get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchckpt.errors import CaptureError, CheckpointError, Fault, text_of, without_generators
from torchckpt.features import GRAPH
from torchckpt.graph.annotations import Tracing
from torchckpt.graph.private.dynamo import compile_lock
from torchckpt.graph.private.trace import differentiable, is_data_dependent, mutated_inputs, require
from torchckpt.graph.private.witness import Witness
from torchckpt.graph.step.halves import Halves
from torchckpt.graph.trace.guard import CONSTANTS, WITHOUT_CACHE, constant_of, is_cache, is_container
from torchckpt.modules import OF_EVERY_MODULE
from torchckpt.regions.flags import state_lock
from torchckpt.tensors import tensors_in

__all__ = ["TRACE_LOCK", "Capture", "TraceLock", "explained", "restoring_modules", "setting_nothing"]


class Capture:
    """A traced function of tensors; later calls take tensors of the same shapes, strides, dtypes and devices.

    Args:
        function: takes tensors; returns a nested structure of tensors and constants.
        tensors: tensors to trace with. Nothing runs: neither they nor a generator change.
        data: names of the tensors that the function must not change, by place; it may change the others, the buffers.
        halves: makes and runs the forward and the backwards.
        tell: called with each operator of the forward.

    Raises:
        CaptureError: the function depends on the values of its tensors, changes its data, or has no derivative.
    """

    def __init__(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], data: dict[int, str], halves: Halves,
        tell: Callable[[object], None] = lambda operator: None,
    ) -> None:
        require(GRAPH)
        self._function, self._data, self._halves = function, data, halves
        self.witness = Witness(tensors, tell)
        with TRACE_LOCK.tracing(), explained(), _collector_paused():
            self._run = differentiable(self._flat, self._partition, halves.backward, tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outputs = self._run(*tensors)
        self._halves.watch(outputs)
        leaves = iter(outputs)
        constants = [next(leaves) if constant is Tensor else constant for constant in self._leaves]
        return pytree.tree_unflatten(constants, self._structure)

    def _flat(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the function and return only its output tensors; its other outputs are constants of the trace."""
        before = [tensor._version for tensor in tensors]
        with self.witness.watching(tensors), Tracing() as tracing:
            leaves, self._structure = pytree.tree_flatten(self._function(*tensors))
            leaves = [tracing.unmarked(leaf) for leaf in leaves]
        self._refuse(place for place, tensor in enumerate(tensors) if tensor._version != before[place])
        opaque = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and constant_of(leaf) is None]
        if any(map(is_cache, opaque)):
            rule = "the step returns a cache of keys and values, which would hold them all"
            raise CaptureError(str(Fault(rule, f"an output of {type(opaque[0])}", WITHOUT_CACHE)))
        if opaque:
            raise CaptureError(str(Fault(
                "an output is no tensor, no constant, and no container that torch can look into",
                f"a {type(opaque[0])}",
                "torch.export.register_dataclass(Outputs); or its tensors, in a tuple or a dict",
            )))
        self._leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tuple(_apart(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    def _partition(
        self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        mutated = mutated_inputs(module.graph.output_node())
        self._refuse(place for place in mutated.values() if place is not None)
        return self._halves.partition(module, inputs, **options)

    def _refuse(self, mutated: Iterator[int]) -> None:
        name = next((self._data[place] for place in mutated if place in self._data), None)
        if name is not None:
            raise CaptureError(str(Fault(
                "the call changes an input in place, so it cannot be recomputed", f"{name} is changed in place",
                "x = x + 1 in place of x.add_(1); or x = x.clone() first",
            )))


def _apart(output: Tensor) -> Tensor:
    """``output``, or a copy of one whose elements share memory, as those of ``Tensor.unfold`` do. AOTAutograd lays the
    gradient of an output out as the output, where it would overwrite itself (torch 2.13)."""
    if not output.requires_grad or output.layout != torch.strided or not output.numel():
        return output
    end = 1
    for stride, size in sorted(zip(output.stride(), output.shape)):
        if 0 < stride < end and size > 1:  # one that is expanded has stride 0, and is summed right
            return output.contiguous()
        end += stride * (size - 1)
    return output


class TraceLock:
    """A lock between threads that call and threads that trace. Inside either, a thread may again call or trace.

    Who traces holds the locks of regions and of Dynamo, too: a forward may have regions, and compile. A region may
    compile, so its lock comes first. Who waits for calls has neither: calls may have regions, and compile, too.
    A backend, which Dynamo calls with its lock, may trace without waiting for any call.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._callers: Counter[int] = Counter()  # by thread, how many calls it is in
        self._waiting: set[int] = set()
        self._tracer, self._depth = 0, 0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Wait until no other thread traces. Inside this context, modules hold their own tensors, not traced ones."""
        me = get_ident()
        count = self._callers[me]
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._tracer in (0, me))
                self._callers[me] = count + 1
            yield
        finally:
            with self._changed:
                self._callers[me] = count  # also after an interrupt
                self._callers += Counter()  # drop threads that are in no call
                self._changed.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Wait until no other thread traces or calls a model. A caller that waits to trace does not count."""
        me, locks = get_ident(), (state_lock, compile_lock())
        depth = self._depth if self._tracer == me else 0
        with ExitStack() as held:
            try:
                with self._changed:
                    self._waiting.add(me)
                    self._changed.notify_all()
                while not self._begins(me, locks, held):
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_free(me))
                with self._changed:
                    self._waiting.discard(me)
                yield
            finally:  # also after an interrupt, wherever it came
                with self._changed:
                    self._waiting.discard(me)
                    if self._tracer == me:
                        self._depth, self._tracer = depth, me if depth else 0
                    self._changed.notify_all()

    def _is_free(self, me: int) -> bool:
        return self._tracer in (0, me) and set(self._callers) <= self._waiting | {me}

    def _begins(self, me: int, locks: Sequence[Any], held: ExitStack) -> bool:
        """Take all locks, or none if this is not the moment."""
        for lock in locks:
            held.enter_context(lock)
        with self._changed:
            if self._is_free(me):
                self._tracer, self._depth = me, self._depth + 1
                return True
        held.close()
        return False


TRACE_LOCK = TraceLock()
"""One lock for all models: torch's own tracing state (tracer, notes on nodes) is not per thread either."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a trace makes 100,000 lasting objects, and their scans take 10 % of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def explained() -> Iterator[None]:
    """Turn an error of a trace into a CaptureError with reason and line; the function's own errors pass through."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if is_data_dependent(error):
            _raise("the call depends on the values of its tensors, and a graph cannot", error,
                   "torch.where() in place of if; or rematerialize() around the parts before and after it")
        text = text_of(error)
        if "derivative" in text or "autograd formula" in text:
            _raise("an operation between an input and the loss has no derivative", error,
                   "torch.library.register_autograd(), or y.detach() where no gradient is wanted")
        if "view input mutations" in text:
            _raise("an input lies in a buffer that the call changes", error, "x = x.clone() before the call")
        if "requires grad is being used in an in-place operation" in text:
            _raise("the call changes an input in place, so it cannot be differentiated", error,
                   "x = x + 1 in place of x.add_(1); or x = x.clone() first")
        if "convert all Tensors to FakeTensors" in text:
            _raise("the call reads a tensor that is no input, parameter or buffer", error,
                   "self.register_buffer(\"mask\", mask, persistent=False) in place of self.mask = mask")
        if any(kind in text for kind in ("FakeTensor", "FunctionalTensor", "tensor subclasses")):
            _raise("the call asks for the data of a tensor, and tensors of a trace have none", error,
                   "operations of torch in place of .numpy(); or torch.library.custom_op() around what needs the data")
        if any("_higher_order_ops" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
            _raise("torch cannot trace and differentiate the call's control flow, which depends on tensors", error,
                   "torch.cond(), or a loop of Python whose number of rounds is known")
        raise


def _raise(rule: str, error: Exception, works: str) -> NoReturn:
    first = text_of(error).partition("\n")[0]
    received = f"{first} {_place_of(error)}".strip()
    raise CaptureError(str(Fault(rule, received, works))) from without_generators(error)


def _place_of(error: Exception) -> str:
    """The last line of the user's code in the traceback; without one, the line of the torch layer."""
    ours = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not frame.filename.startswith(ours)]
    layers = os.path.join(ours[0], "nn")
    frames = frames or [frame for frame in every if frame.filename.startswith(layers) and frame.name == "forward"]
    return f'at {frames[-1].filename}:{frames[-1].lineno}: "{frames[-1].line}"' if frames else ""


# what a forward leaves on its modules ---------------------------------------------------------------------------------


@contextmanager
def setting_nothing(model: nn.Module) -> Iterator[None]:
    """If an error refuses a call inside this context, remove what its trace has set: an error may say to call first."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    except CheckpointError:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        raise


@contextmanager
def restoring_modules(model: nn.Module) -> Iterator[None]:
    """Trace a forward of ``model`` inside this context; remove the tensors without data that it stores on modules.

    Two cases are no error. Recurrent layers have a list of their parameters, in which
    ``torch.func.functional_call`` leaves those of the trace. The old weight norm and spectral norm make the weight from
    parameters, again at each call.

    Raises:
        CaptureError: the forward stored any other tensor, or made a parameter, a buffer or a module.
    """
    tensors = _tensors_of(model)
    owned = [(module, {kind: dict(getattr(module, kind)) for kind in _OWN}) for module in model.modules()]
    try:
        yield
    except Exception as error:
        left = _put_back(model, tensors, owned)
        if left is None or isinstance(error, CaptureError):
            raise
        raise CaptureError(str(left)) from without_generators(error)
    left = _put_back(model, tensors, owned)
    if left is not None:
        raise CaptureError(str(left))


_OWN = ("_parameters", "_buffers", "_modules")
_Tensors = dict[tuple[str, str], tuple[Any, tuple[Tensor, ...]]]


def _put_back(model: nn.Module, tensors: _Tensors, owned: Sequence[tuple[nn.Module, dict[str, Any]]]) -> Fault | None:
    """Restore the modules. Return the fault of a forward that did what it must not do, or None."""
    left = None
    for module, kinds in owned:
        for kind, before in kinds.items():
            now = getattr(module, kind)
            new = [name for name, value in now.items() if before.get(name) is None and value is not None]
            if any(now.get(name) is not value for name, value in before.items()) or len(now) != len(before):
                now.clear()
                now.update(before)
            if new:
                rule = "the forward makes a parameter, buffer or module, which has to exist before the trace"
                works = "make it in __init__(); or model(*inputs), once, before rematerialize()"
                left = Fault(rule, f"the forward of {type(module).__name__} makes {new[0]}", works)
    return left or _taken_back(model, tensors)


def _taken_back(model: nn.Module, before: _Tensors) -> Fault | None:
    left = None
    for (place, name), (_, tensors) in _tensors_of(model).items():
        module, (value, known) = model.get_submodule(place), before.get((place, name), (None, ()))
        if {id(tensor) for tensor in tensors} <= {id(tensor) for tensor in known}:
            continue
        is_made_of_parameters = any(parameter.startswith(f"{name}_") for parameter in module._parameters)
        if not (is_made_of_parameters or (known and all(isinstance(tensor, nn.Parameter) for tensor in known))):
            rule = "the forward stores a tensor on a module, and does not return it"
            received = f"after the forward, {name} of {type(module).__name__} {place!r} holds one".replace(" ''", "")
            left = left or Fault(rule, received, f"return output, {name}")
        del module.__dict__[name]
        module.__dict__.update({name: value} if (place, name) in before else {})
    return left


def _tensors_of(model: nn.Module) -> _Tensors:
    """Each value, and the tensors in it, by module and attribute. Parameters and buffers are left out."""
    return {
        (place, name): (copy.copy(value) if _is_copied(value) else value, tuple(tensors_in(_parts(value))))
        for place, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in OF_EVERY_MODULE and not isinstance(value, (*CONSTANTS, nn.Module))
    }


def _is_copied(value: Any) -> bool:
    return isinstance(value, deque) or (isinstance(value, (list, dict, set)) and is_container(type(value)))


def _parts(value: Any) -> Any:
    """The part of ``value`` that is searched for tensors: a container itself, at any depth; of another object, its
    attributes."""
    if isinstance(value, (set, frozenset, deque)):
        return list(value)
    return value if isinstance(value, (Tensor, list, tuple, dict)) else list(getattr(value, "__dict__", {}).values())
