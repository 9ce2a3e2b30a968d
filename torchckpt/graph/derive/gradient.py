"""gradient(): make a graph module that returns a function's outputs and their gradients."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.graph.choose.keep import Keep
from torchckpt.graph.derive.adjoint import planned, planner_of
from torchckpt.graph.derive.derivative import Traced, derivative_of, gradients_of
from torchckpt.graph.derive.primal import Marks, Primal, is_real

__all__ = ["gradient"]


@called("gradient()")
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

    Values inside a :func:`~torchckpt.graph.annotate.marks.region` are not kept for the derivatives, but computed again
    when a
    derivative needs them. The rules are those of the ``Gradient`` pass of TVM Relax and of ``annotation.checkpoint`` of
    TVM Relay. All values are equal to eager autograd's, bit for bit. The module records nothing for autograd.

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

    def ask(traced: Traced) -> list[Tensor | None]:
        named = _Found(traced, wanted)
        faults = [*_target_faults(traced.leaves, target_index), *named.faults(), *map(_changed, marks.changed())]
        check(faults)
        target, tensors = traced.leaves[target_index], named.tensors()
        gradients = gradients_of([target], [torch.ones_like(target)], tensors)
        return [
            torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if gradient is None else gradient
            for tensor, gradient in zip(tensors, gradients)
        ]

    known = {**primal.inputs, **primal.state}
    required = {name for name in known if name in wanted} | (set(primal.inputs) if marks.wanted else set())
    derivative = derivative_of(primal, {name for name in required if is_real(known[name])}, marks, ask)
    return planned(derivative, planner)


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
    return [names[one] if _is_place(one, len(names)) else one for one in listed]


def _is_place(value: object, count: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


class _Found:
    """The tensors of a traced call that ``require_grads`` names, and the faults in those names."""

    def __init__(self, traced: Traced, wanted: Sequence[object]) -> None:
        self._wanted = wanted
        self._known: dict[str, Sequence[Tensor]] = {
            **{name: [tensor] for name, tensor in traced.state.items()},
            **traced.marked,
            **{name: [tensor] for name, tensor in traced.inputs.items()},
        }
        self._inputs = list(traced.inputs)

    def tensors(self) -> list[Tensor]:
        return [self._known[str(one)][0] for one in self._wanted]

    def faults(self) -> list[Fault]:
        twice = [one for one, count in Counter(map(str, self._wanted)).items() if count > 1]
        once = f"require_grads={list(dict.fromkeys(self._wanted))}"
        faults = [Fault("a gradient is asked for twice", f"{one!r} twice", once) for one in twice]
        return faults + [fault for one in dict.fromkeys(self._wanted) if (fault := self._fault(one))]

    def _fault(self, one: object) -> Fault | None:
        if isinstance(one, int):
            count = len(self._inputs)
            wrong = f"an int is the position of none of the {count} inputs"
            return Fault(wrong, repr(one), f"require_grads=[{count - 1}]")
        if not isinstance(one, str):
            rule = "an entry of require_grads is neither the position of an input nor a name"
            return Fault(rule, repr(one), f"require_grads=[0], or [{self._inputs[0]!r}]" if self._inputs else "['h']")
        tensors = self._known.get(one)
        if tensors is None:
            near = get_close_matches(one, self._known, 3, 0.3) or list(self._known)[-3:]
            works = f'require_grads={near}; or graph.mark(value, "{one}") in the function'
            return Fault("a name in require_grads is that of no input, mark or parameter", repr(one), works)
        if len(tensors) > 1:
            works = f'graph.mark(value, "{one} 2"): a name for each'
            return Fault("a mark in require_grads is on several tensors", f"{len(tensors)} marked {one!r}", works)
        if not is_real(tensors[0]):
            return Fault("a value in require_grads has no floating dtype", f"{one!r}: {tensors[0].dtype}",
                         f"{one}.float() as an input")
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
