"""gradients(): compute the gradients of a function's outputs with respect to its inputs, in less memory."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.graph.choose.keep import Keep
from torchckpt.graph.derive.adjoint import planned, planner_of
from torchckpt.graph.derive.derivative import Traced, derivative_of, gradients_of
from torchckpt.graph.derive.primal import Marks, Primal

__all__ = ["gradients"]

Checkpoints: TypeAlias = "Keep | Sequence[str | Tensor]"


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
            :func:`~torchckpt.graph.annotate.marks.mark`. Names of marks and modules, in full, as patterns, or in part;
            tensors of ``inputs`` may be among them, and are ignored. A function that takes a
            :class:`~torchckpt.graph.step.values.Value` and returns a bool. None: all values outside of regions.
            ``fn``'s outputs are not kept.

    Returns:
        One gradient for each input, in a list or tuple like ``inputs``; a tensor if ``inputs`` is one. None for an
        input that no floating output depends on. A sparse gradient stays sparse unless a dense one is added to it.

    Raises:
        ArgumentError: a policy or a name is unknown; ``checkpoints`` selects nothing; a gradient has a wrong shape.
        CaptureError: ``fn`` depends on the values of its tensors, changes its inputs, or has no derivative.
    """
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    planner = planner_of(_without_inputs(checkpoints, tensors))
    primal = Primal(fn, tensors)
    arriving = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [])
    required = {name for name, tensor in primal.inputs.items() if tensor.is_floating_point() or tensor.is_complex()}

    def ask(traced: Traced) -> list[Tensor | None]:
        outputs = [leaf for leaf in traced.leaves if isinstance(leaf, Tensor)]
        check(_faults(outputs, arriving))
        following = iter(traced.more)
        given = [None if one is None else next(following) for one in arriving] or [None] * len(outputs)
        starts = [_ones(output) if one is None else one for output, one in zip(outputs, given)]
        return gradients_of(outputs, starts, list(traced.inputs.values()))

    more = [one for one in arriving if one is not None]
    derivative = derivative_of(primal, required, Marks(), ask, more)
    made = planned(derivative, planner, outputs=False)(*tensors, *more)
    return made[0] if isinstance(inputs, Tensor) else type(inputs)(made)  # type: ignore[call-arg]


def _without_inputs(checkpoints: Checkpoints, inputs: Sequence[Tensor]) -> Keep:
    if not isinstance(checkpoints, (list, tuple)):
        return checkpoints  # type: ignore[return-value]
    others = [one for one in checkpoints if isinstance(one, Tensor) and not any(one is given for given in inputs)]
    if others:
        rule = "checkpoints has tensors of another call, in place of names of marks or modules"
        received = f"{len(others)} tensors that are not inputs"
        raise_fault(Fault(rule, received, 'graph.mark(h, "h") in the function, and checkpoints=["h"]'))
    return [one for one in checkpoints if not isinstance(one, Tensor)]


def _faults(outputs: Sequence[Tensor], arriving: Sequence[Tensor | None]) -> list[Fault]:
    if not outputs:
        return [Fault("the function returns no tensor", "no tensor among its outputs", "return y")]
    if arriving and len(arriving) != len(outputs):
        rule = "grad_outputs has not one gradient for each tensor that the function returns"
        return [Fault(rule, f"{len(arriving)} for {len(outputs)}", "None among them, which stands for ones")]
    return [
        Fault("a gradient has another shape than its output", f"{tuple(one.shape)} for {tuple(output.shape)}",
              "grad_outputs=[torch.ones_like(y)]")
        for output, one in zip(outputs, arriving) if one is not None and one.shape != output.shape
    ]


def _ones(output: Tensor) -> Tensor:
    """Ones with the layout of ``output``. They do not depend on it where possible, which would keep it alive."""
    if not output.is_contiguous():
        return torch.ones_like(output)
    return torch.ones(output.shape, dtype=output.dtype, device=output.device)
