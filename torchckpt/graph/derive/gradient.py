"""gradient() and gradients(): a graph module that returns outputs and gradients; the gradients of one call."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, fx

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.graph.derive.adjoint import planned, planner_of
from torchckpt.graph.derive.derivative import Marks, Primal, derivative_of, gradients_of, is_real
from torchckpt.graph.keep import Keep
from torchckpt.graph.trace.capture import TRACE_LOCK

__all__ = ["gradient", "gradients"]

Checkpoints: TypeAlias = "Keep | Sequence[str | Tensor]"


@called("gradient()")
@TRACE_LOCK.tracing()
def gradient(
    fn: Callable[..., Any],
    *example: Tensor,
    require_grads: Sequence[int | str] | None = None,
    target_index: int = 0,
    checkpoints: Keep = None,
) -> fx.GraphModule:
    """A graph module that returns ``(fn(*inputs), gradients)``: code that one can read, change and run.

    >>> adjoint = graph.gradient(loss_of, x, w, require_grads=["w"])
    >>> print(adjoint.code)
    >>> loss, (dw,) = adjoint(x, w)

    Values inside a :func:`~torchckpt.graph.annotations.region` are not kept for the derivatives, but computed again
    when a derivative needs them. The rules are those of the ``Gradient`` pass of TVM Relax and of
    ``annotation.checkpoint`` of TVM Relay. All values are equal to eager autograd's, bit for bit. The module records
    nothing for autograd.

    Args:
        fn: a function of positional tensors, a module, or a :class:`torch.fx.GraphModule`. It is traced, not run or
            changed. The result shares a module's parameters and buffers, and the tensors that a function closes over,
            as attributes.
        example: input tensors, for their shapes and dtypes. The result takes such tensors as positional arguments.
        require_grads: what to differentiate with respect to: inputs, by position or by name of ``fn``'s arguments;
            intermediate values, by name of their marks (``graph.mark(h, "h")``), inside regions too; values of a graph
            module, by name of their nodes; parameters of a module, by name. The gradients are in this order. A gradient
            is zeros if the target does not depend on the value. Default: all inputs with a floating dtype.
        target_index: index of the output to differentiate, among the leaves of ``fn``'s return value. It is a scalar
            tensor (no dimensions) with a floating dtype. Default: 0, the first.
        checkpoints: the values to keep for the derivatives, like ``keep`` of :func:`rematerialize`: ``"collection"``,
            ``"speed"``, ``"memory"``, names, or a function. Default: all values outside of regions.

    Returns:
        A module with positional inputs. ``gradients`` is a tuple.

    Raises:
        ArgumentError: an entry of ``require_grads`` is unknown, repeated, or not floating; the target is no floating
            scalar; a policy or a name in ``checkpoints`` is unknown. The message lists every fault.
        CaptureError: ``fn`` depends on the values of its tensors, changes its inputs, or has no derivative.
    """
    planner = planner_of(checkpoints)
    primal = Primal(fn, example)
    wanted = _wanted(require_grads, primal)
    marks = Marks({name for name in wanted if isinstance(name, str)} - set(primal.inputs))

    def ask(leaves: list[Any], tensors: dict[str, Tensor], more: Sequence[Tensor]) -> list[Tensor]:
        known = {name: [tensors[name]] for name in primal.state} | marks.tensors
        known |= {name: [tensors[name]] for name in primal.inputs}
        faults = [*_target_faults(leaves, target_index), *_name_faults(wanted, known, list(primal.inputs))]
        check([*faults, *map(_changed, marks.changed())])
        target, sources = leaves[target_index], [known[str(name)][0] for name in wanted]
        return [
            torch.zeros(source.shape, dtype=source.dtype, device=source.device) if gradient is None else gradient
            for source, gradient in zip(sources, gradients_of([target], [torch.ones_like(target)], sources))
        ]

    known = {**primal.inputs, **primal.state}
    required = {name for name in known if name in wanted} | (set(primal.inputs) if marks.wanted else set())
    derivative = derivative_of(primal, {name for name in required if is_real(known[name])}, marks, ask)
    return planned(derivative, planner)


@called("gradients()")
def gradients(
    fn: Callable[..., Any],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    checkpoints: Checkpoints = "memory",
) -> Any:
    """Run ``fn(*inputs)`` and its backward, and keep only the values in between that ``checkpoints`` selects.

    >>> dx, dw = graph.gradients(loss_of, [x, w], checkpoints="memory")

    This is the API of TensorFlow's memory-saving gradients (Salimans and Bulatov 2018), for a function in place of a
    graph. Each call traces ``fn`` again; :func:`gradient` traces once, and returns a module that runs many times.

    Args:
        fn: a function of positional tensors, or a module.
        inputs: one tensor, or a list or tuple of them.
        grad_outputs: one gradient for each tensor among ``fn``'s outputs; None stands for ones. Default: ones for all.
        checkpoints: the values to keep for the backward. ``"memory"``: about the square root of the values that
            separate inputs from outputs; if no value does, the schedule that needs the least memory. ``"speed"``:
            outputs of convolutions and matrix products. ``"collection"``: values marked by
            :func:`~torchckpt.graph.annotations.mark`. Names of marks and modules, in full, as patterns, or in part;
            tensors of ``inputs`` may be among them, and are ignored. A function that takes a
            :class:`~torchckpt.graph.keep.Value` and returns a bool. None: all values outside of regions.
            ``fn``'s outputs are not kept.

    Returns:
        One gradient for each input, in a list or tuple like ``inputs``; a tensor if ``inputs`` is one. None for an
        input that no floating output depends on. A sparse gradient stays sparse unless a dense one is added to it.

    Raises:
        ArgumentError: a policy or a name is unknown; ``checkpoints`` selects nothing; a gradient has a wrong shape.
        CaptureError: ``fn`` depends on the values of its tensors, changes its inputs, or has no derivative.
    """
    examples = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    arriving = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [])
    more = [gradient for gradient in arriving if gradient is not None]
    results = _adjoint(fn, examples, arriving, more, checkpoints)(*examples, *more)
    return results[0] if isinstance(inputs, Tensor) else type(inputs)(results)  # type: ignore[call-arg]


@TRACE_LOCK.tracing()
def _adjoint(
    fn: Callable[..., Any], examples: Sequence[Tensor], arriving: Sequence[Tensor | None], more: Sequence[Tensor],
    checkpoints: Checkpoints,
) -> fx.GraphModule:
    """The gradients of ``examples``, as a module that takes them, and then ``more``: what of ``arriving`` is given."""
    planner = planner_of(_without_inputs(checkpoints, examples))
    primal = Primal(fn, examples)
    required = {name for name, tensor in primal.inputs.items() if tensor.is_floating_point() or tensor.is_complex()}

    def ask(leaves: list[Any], tensors: dict[str, Tensor], more: Sequence[Tensor]) -> list[Tensor | None]:
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        check(_output_faults(outputs, arriving))
        following = iter(more)
        pairs = zip(outputs, arriving or [None] * len(outputs))
        starts = [_ones(output) if gradient is None else next(following) for output, gradient in pairs]
        return gradients_of(outputs, starts, [tensors[name] for name in primal.inputs])

    return planned(derivative_of(primal, required, Marks(), ask, more), planner, outputs=False)


def _wanted(require_grads: Sequence[int | str] | None, primal: Primal) -> list[object]:
    """``require_grads`` with positions of inputs replaced by names. Invalid entries stay, and are reported later."""
    names = list(primal.inputs)
    if require_grads is None:
        real = [name for name, tensor in primal.inputs.items() if is_real(tensor)]
        if not real:
            works = f'require_grads=["{next(iter(primal.state), "weight")}"], a parameter of a module, or a mark'
            raise_fault(Fault("no input has a floating dtype, and require_grads names no value", f"{names}", works))
        return list(real)
    listed = [require_grads] if isinstance(require_grads, (int, str)) else require_grads
    return [names[entry] if _is_place(entry, len(names)) else entry for entry in listed]


def _is_place(value: object, count: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _name_faults(wanted: Sequence[object], known: Mapping[str, Sequence[Tensor]], inputs: list[str]) -> list[Fault]:
    """What is wrong with the entries of ``require_grads``. ``known`` has the tensors of a traced call by name."""
    entries = list(dict.fromkeys(wanted))
    twice = [name for name, count in Counter(map(str, wanted)).items() if count > 1]
    faults = [Fault("a gradient is asked for twice", f"{name!r} twice", f"require_grads={entries}") for name in twice]
    return faults + [fault for entry in entries if (fault := _name_fault(entry, known, inputs))]


def _name_fault(entry: object, known: Mapping[str, Sequence[Tensor]], inputs: list[str]) -> Fault | None:
    if isinstance(entry, int):
        wrong = f"an int is the position of none of the {len(inputs)} inputs"
        return Fault(wrong, repr(entry), f"require_grads=[{len(inputs) - 1}]")
    if not isinstance(entry, str):
        rule = "an entry of require_grads is neither the position of an input nor a name"
        return Fault(rule, repr(entry), f"require_grads=[0], or [{inputs[0]!r}]" if inputs else "['h']")
    tensors = known.get(entry)
    if tensors is None:
        near = get_close_matches(entry, known, 3, 0.3) or list(known)[-3:]
        works = f'require_grads={near}; or graph.mark(value, "{entry}") in the function'
        return Fault("a name in require_grads is that of no input, mark or parameter", repr(entry), works)
    if len(tensors) > 1:
        works = f'graph.mark(value, "{entry} 2"): a name for each'
        return Fault("a mark in require_grads is on several tensors", f"{len(tensors)} marked {entry!r}", works)
    if not is_real(tensors[0]):
        received = f"{entry!r}: {tensors[0].dtype}"
        return Fault("a value in require_grads has no floating dtype", received, f"{entry}.float() as an input")
    return None


def _target_faults(leaves: Sequence[Any], index: int) -> list[Fault]:
    if not _is_place(index, len(leaves)):
        return [Fault(f"target_index is the index of none of the {len(leaves)} outputs", repr(index), "target_index=0")]
    target = leaves[index]
    if not is_real(target):
        received = f"output {index}: {target.dtype if isinstance(target, Tensor) else repr(target)}"
        return [Fault("the target has no floating dtype", received, "return loss, hits; with target_index=0")]
    if target.dim():
        received = f"output {index} of shape {tuple(target.shape)}"
        works = "return y.sum(); or graph.gradients(fn, x)"
        return [Fault("the target is not a scalar, without dimensions", received, works)]
    return []


def _changed(name: str) -> Fault:
    rule = "a marked value in require_grads is changed in place after its mark"
    works = f'h = graph.mark(h, "{name}") * 2, in place of h.mul_(2)'
    return Fault(rule, f"{name!r} is changed in place", works)


def _without_inputs(checkpoints: Checkpoints, inputs: Sequence[Tensor]) -> Keep:
    if not isinstance(checkpoints, (list, tuple)):
        return checkpoints  # type: ignore[return-value]
    tensors = [entry for entry in checkpoints if isinstance(entry, Tensor)]
    others = [tensor for tensor in tensors if all(tensor is not other for other in inputs)]
    if others:
        rule = "checkpoints has tensors of another call, in place of names of marks or modules"
        received = f"{len(others)} tensors that are not inputs"
        raise_fault(Fault(rule, received, 'graph.mark(h, "h") in the function, and checkpoints=["h"]'))
    return [entry for entry in checkpoints if not isinstance(entry, Tensor)]


def _output_faults(outputs: Sequence[Tensor], arriving: Sequence[Tensor | None]) -> list[Fault]:
    if not outputs:
        return [Fault("the function returns no tensor", "no tensor among its outputs", "return y")]
    if arriving and len(arriving) != len(outputs):
        rule = "grad_outputs has not one gradient for each tensor that the function returns"
        return [Fault(rule, f"{len(arriving)} for {len(outputs)}", "None among them, which stands for ones")]
    return [
        Fault("a gradient has another shape than its output", f"{tuple(gradient.shape)} for {tuple(output.shape)}",
              "grad_outputs=[torch.ones_like(y)]")
        for output, gradient in zip(outputs, arriving) if gradient is not None and gradient.shape != output.shape
    ]


def _ones(output: Tensor) -> Tensor:
    """Ones with the layout of ``output``. They do not depend on it where possible, which would keep it alive."""
    if not output.is_contiguous():
        return torch.ones_like(output)
    return torch.ones(output.shape, dtype=output.dtype, device=output.device)
