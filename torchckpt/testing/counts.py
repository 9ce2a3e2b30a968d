"""Counts: replays, FLOPs and bytes at the peak; and a check that a region gives the results of the plain call."""
from __future__ import annotations

import functools
import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from torchckpt.errors import Fault, called, check, kind, raise_fault
from torchckpt.modules import is_module, module_of, name_of
from torchckpt.regions.core.checkpointing import checkpoint
from torchckpt.regions.core.frame import observers
from torchckpt.regions.devices import accelerators_among
from torchckpt.regions.live import LiveStorages
from torchckpt.regions.private import newest_node, number_of
from torchckpt.regions.state.ambient import Generator, generators_of, random_state, restore_states
from torchckpt.regions.state.boundary import generators_among
from torchckpt.regions.state.layout import Layout
from torchckpt.regions.state.reached import reached_by
from torchckpt.tensors import inner_tensors, nodes_behind, tensors_in
from torchckpt.typing import Function

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

__all__ = ["Flops", "Recomputes", "assert_transparent", "check_step", "count_recomputes", "flops", "peak_bytes"]


class Recomputes:
    """How often regions were replayed: ``total``, and ``by_region`` by the region's name in error messages."""

    def __init__(self) -> None:
        self.by_region: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Recomputes: {self.total}, {dict(self.by_region)}>"

    @property
    def total(self) -> int:
        return self.by_region.total()

    def _seen(self, region: str) -> None:
        with self._lock:
            self.by_region[region] += 1


@contextmanager
def count_recomputes() -> Iterator[Recomputes]:
    """Count the replays of all regions in this process, in every thread, until the end of the block."""
    recomputes = Recomputes()
    observers.append(recomputes._seen)
    try:
        yield recomputes
    finally:
        observers.remove(recomputes._seen)


class Flops:
    """Floating-point operations: ``total``, as :class:`torch.utils.flop_counter.FlopCounterMode` counts them."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter

    def __repr__(self) -> str:
        return f"<Flops: {self.total}>"

    @property
    def total(self) -> int:
        return self._counter.get_total_flops()


@contextmanager
def flops() -> Iterator[Flops]:
    """Count the FLOPs of forwards, backwards and replays until the end of the block.

    Counts what this thread runs, and the backwards that it starts. The work of other threads, such as those of a
    ``Pipe`` on several devices, is not counted."""
    from torch.utils.flop_counter import FlopCounterMode  # late: it is slow to import

    with FlopCounterMode(display=False) as counter:
        yield Flops(counter)


def peak_bytes(step: Callable[[], object], device: torch.device | str | None = None) -> int:
    """Run ``step()``, and return the most bytes that it takes at once above what was there before it.

    On an accelerator its allocator counts. On the CPU storages that operators make count while they are alive, in this
    thread and the backwards that it starts. There compiled code runs as eager code, workspaces are not seen, and what
    the step frees of older tensors is not taken off.

    >>> peak_bytes(lambda: model(x).sum().backward())

    Args:
        step: anything. The first step makes gradients and an optimizer's state, which later ones find.
        device: where to count. Default: the current accelerator if this process has memory there, otherwise the CPU. A
            warning says so where the step then takes nothing.

    Raises:
        ArgumentError: ``step`` is not callable, or the device is not there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    in_use = accelerator is not None and torch.get_device_module(accelerator).memory_allocated()
    check_step(step, "peak_bytes")
    where = _device(device or (accelerator if accelerator and in_use else "cpu"), accelerator)
    gc.collect()  # the step would free it
    live = LiveStorages(where, looks=where.type in ("cpu", "meta"))
    live.begin()
    with live.watching():
        step()
    highest = live.highest()
    if device is None and where.type != "cpu" and not highest:
        text = f"peak_bytes() has counted on {where}, where the step takes nothing; works: peak_bytes(step, 'cpu')"
        warnings.warn(text, stacklevel=2)
    return highest


def _device(device: object, accelerator: torch.device | None) -> torch.device:
    where: torch.device | None = None
    with suppress(RuntimeError, TypeError):
        where = torch.device(device)  # type: ignore[call-overload]  # it may be anything
    if where is None or where.type not in ("cpu", "meta", accelerator and accelerator.type):
        raise_fault(Fault("there is no such device here", repr(device), "peak_bytes(step, 'cpu')"), "peak_bytes()")
    return where


def check_step(step: object, function: str) -> None:
    """Raise an ArgumentError where ``step``, which was given to ``function``, is not callable."""
    if not callable(step):
        works = f"{function}(lambda: model(x).sum().backward())"
        raise_fault(Fault("the step is not callable", kind(step), works), f"{function}()")


@called("assert_transparent()")
def assert_transparent(function: Function, *args: Any, modules: Sequence[nn.Module] = (), **kwargs: Any) -> None:
    """Check that ``function(*args, **kwargs)`` gives the same results, to the bit, as a region and as a plain call.

    Both calls start from the same random state and the same buffers. The check compares the outputs, the gradients of
    every input and leaf that they depend on (parameters, tensors closed over), and the buffers and generators after the
    call. It does not touch any ``.grad``, nor the graph that an input comes from. Afterwards buffers and generators are
    as after one call.

    Args:
        function: any callable; its outputs are a pytree with at least one tensor. It changes no argument in place, or
            its second call has another one.
        modules: further modules whose buffers to compare, besides ``function`` itself or the module of the method.

    Raises:
        ArgumentError: ``function`` is not callable or returns no tensor, or ``modules`` holds something that is no
            module.
        AssertionError: the message lists everything that differs.
    """
    listed = [*modules] if isinstance(modules, Iterable) else None
    check(_call_faults(function, modules, listed))
    watched = _buffers_of(owner for owner in (module_of(function), *(listed or ())) if owner is not None)
    before = [(holder, name, buffer, buffer.clone()) for _, holder, name, buffer in watched]
    generators = generators_of(accelerators_among(args, kwargs), _generators_of(function, listed or (), (args, kwargs)))
    states = random_state(generators)
    inputs = [get_gradient_edge(tensor) for tensor in tensors_in((args, kwargs)) if tensor.grad_fn is not None]
    beyond = {*nodes_behind(parent for edge in inputs for parent, _ in edge.node.next_functions)}
    newest = newest_node()

    def observe(call: Function) -> dict[str, Any]:
        torch.clear_autocast_cache()  # a filled cache would make even two plain calls differ
        returned = call(*args, **kwargs)
        outputs = tensors_in(returned)
        if not outputs:
            works = "assert_transparent(block, x), whose block returns tensors"
            raise_fault(Fault("the function returns no tensor, so nothing is compared", kind(returned), works))
        seen: dict[str, Any] = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
        graded = [output for output in outputs if output.requires_grad]
        nodes = [*nodes_behind(graded, lambda node: all(node is not edge.node for edge in inputs))]
        sources: list[Any] = [*_leaves_of(graded, nodes), *inputs]
        if graded and sources:
            cotangents = [_ones_like(output) for output in graded]
            wanted = *nodes, *(edge.node for edge in inputs)
            runs_older = any(node in beyond for node in wanted) or any(number_of(node) <= newest for node in nodes)
            gradients = torch.autograd.grad(graded, sources, cotangents, retain_graph=runs_older, allow_unused=True)
            arrived = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
            seen.update({f"gradient {i}, of shape {tuple(gradient.shape)}": gradient for i, gradient in arrived})
        buffers = ((label, holder._buffers.get(name)) for label, holder, name, _ in watched)
        seen.update({label: None if buffer is None else buffer.detach().clone() for label, buffer in buffers})
        seen.update({f"generator {i}": generator.get_state() for i, generator in enumerate(generators)})
        return seen

    plain = observe(function)
    for holder, name, buffer, value in before:
        buffer.data.copy_(value)
        holder._buffers[name] = buffer
    restore_states(states)
    region = observe(functools.partial(checkpoint, function))
    different = ", ".join(name for name in {**plain, **region} if not _equal(plain.get(name), region.get(name)))
    if different:
        raise AssertionError(f"checkpoint({name_of(function)}) is not the plain call; different: {different}")


def _call_faults(function: object, modules: object, listed: list[nn.Module] | None) -> Iterator[Fault]:
    rule, works = "modules is not a list of modules", "assert_transparent(block, x, modules=[block])"
    if not callable(function):
        yield Fault("the function is not callable", kind(function), works)
    if listed is None:
        yield Fault(rule, kind(modules), works)
        return
    strangers = [kind(value) for value in listed if not isinstance(value, nn.Module)]
    if strangers:
        yield Fault(rule, f"a list that holds {', '.join(strangers)}", works)


def _buffers_of(modules: Iterable[nn.Module]) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Each buffer once, as (label, module that holds it, name in that module, buffer)."""
    buffers: dict[tuple[int, str], tuple[str, nn.Module, str, Tensor]] = {}
    for number, module in enumerate(modules):
        for path, holder in module.named_modules():
            for name, buffer in holder._buffers.items():
                if buffer is not None:
                    where = ".".join(filter(None, (type(module).__name__, path, name)))
                    label = f"buffer {where}{f' of module {number}' if number else ''}"
                    buffers.setdefault((id(holder), name), (label, holder, name, buffer))
    return list(buffers.values())


def _generators_of(function: Function, modules: Iterable[nn.Module], arguments: object) -> list[Generator]:
    """The generators among the arguments, those of a partial function too, and those of all modules and functions."""
    bound = (function.args, function.keywords) if isinstance(function, functools.partial) else ()
    given = tree_leaves((arguments, bound))
    reached, named = reached_by(function)
    owners = filter(is_module, (module_of(function), *modules, *given, *reached))
    return [*generators_among(given), *named, *Layout([*owners]).generators()]


def _ones_like(output: Tensor) -> Tensor:
    """Dense where ``output`` is of coordinates, which torch has no ones for."""
    return torch.ones_like(output, layout=torch.strided if output.layout is torch.sparse_coo else output.layout)


def _equal(plain: object, region: object) -> bool:
    """Whether the two are equal to the bit; NaN equals NaN. States of Python's generators are no tensors."""
    if not (isinstance(plain, Tensor) and isinstance(region, Tensor)):
        return type(plain) is type(region) and plain == region
    if (plain.dtype, plain.layout) != (region.dtype, region.layout):
        return False
    if plain.layout == torch.jagged:  # each has a symbol of its own in its shape
        parts = zip(inner_tensors(plain), inner_tensors(region))
        return all(_equal(*pair) for pair in parts)
    if plain.shape != region.shape:
        return False
    if plain.layout != torch.strided:  # sparse ones cannot be compared
        plain, region = plain.to_dense(), region.to_dense()
    if plain.is_complex():
        plain, region = torch.view_as_real(plain.resolve_conj()), torch.view_as_real(region.resolve_conj())
    if plain.is_floating_point():
        plain, region = (x.float() if x.element_size() == 1 else x for x in (plain, region))  # for the next line
        zeros = (plain.signbit() == region.signbit()) | (plain != 0)
        return bool((((plain == region) & zeros) | (plain.isnan() & region.isnan())).all())
    return torch.equal(plain, region)


def _leaves_of(outputs: Sequence[Tensor], nodes: Sequence[Node]) -> list[Tensor]:
    """The leaves that ``outputs`` depend on, in the order in which a walk of their graph meets its ``nodes``."""
    leaves = dict.fromkeys(output for output in outputs if output.grad_fn is None)
    leaves.update((node.variable, None) for node in nodes if hasattr(node, "variable"))
    return list(leaves)
