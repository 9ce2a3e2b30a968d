"""Repeat: what runs when an operation is repeated, where it must not run a second time as it is.

A repeated dropout multiplies by the mask that it saved. A repeated batch norm does not update its running statistics
again. Other random operations run once, unless the generator's state was saved: a second draw gives other numbers.
Collectives run once: the other processes would not take part in a second one.
"""
from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from torchckpt.graph.private.runtime import (
    BATCH_NORM,
    BATCH_NORM_AGAIN,
    BATCH_NORM_BACKWARD,
    BATCH_NORM_BY_STATISTICS,
    FUSED_LSTM,
    branches_of,
    has_effect,
    is_collective,
    is_mutable,
    without_modes,
)
from torchckpt.graph.step.rng import draws, generator_state, replayed, state_of

__all__ = ["Repeat", "as_eager_runs", "forget_statistics", "repeat_of", "runs_once", "under_autograd"]

Resolve = Callable[[Any], Any]
"""Maps an argument in the joint graph to the same argument in the emitted graph."""

_DROPOUT: Any = torch.ops.aten.native_dropout.default
_DROPOUT_BACKWARD: Any = torch.ops.aten.native_dropout_backward.default


@dataclass(frozen=True)
class Repeat:
    """The nodes that a repeat reads, the nodes that it writes, and a function that adds the repeat to a graph."""

    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    emit: Callable[[fx.Graph, Resolve], tuple[fx.Node, ...]]


def runs_once(node: fx.Node) -> bool:
    """Whether ``node`` must not run twice: it draws random numbers, communicates, or writes to its arguments."""
    target = node.target
    if target is _DROPOUT:
        return node.args[2] is not False
    if any(runs_once(inner) for branch in branches_of(node) for inner in branch.graph.nodes):
        return True
    return target is generator_state or has_effect(target) or draws(node) or is_collective(target) or is_mutable(target)


def repeat_of(node: fx.Node) -> Repeat | None:
    """What a repeat of ``node`` runs instead; None if it runs ``node`` itself, or if there is no substitute."""
    outputs = outputs_of(node)
    if node.target is BATCH_NORM and node.args[5]:
        return _batch_norm(node, outputs)
    state = state_of(node)
    if state is not None:
        return _draw(node, state, outputs)
    if node.target is _DROPOUT and runs_once(node) and len(outputs) == 2:
        return _dropout(node, outputs[0], outputs[1])
    return None


def forget_statistics(graph: fx.Graph) -> None:
    """Remove the running statistics from the arguments of a training batch norm's backward, which ignores them."""
    for node in graph.find_nodes(op="call_function", target=BATCH_NORM_BACKWARD):
        if node.args[7]:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def as_eager_runs(graph: fx.Graph) -> None:
    """Change operations whose traced form gives other bits than eager, so that they give eager's bits.

    - Dropout on a CPU: eager computes the scale ``1 / (1 - p)`` in the dtype of the data. The traced kernels compute it
      in double, or round later. For some probabilities, such as 0.15, the two scales differ.
    - Dropout with ``p = 1``: eager draws no random numbers.
    - Fused LSTM: it makes the values for its backward only where autograd records gradients.
    - Batch norm on a CPU of a tensor that is not dense: eager returns a dense tensor, but the trace says that it is not
      dense. So a view of the result may have to be a copy.
    """
    for node in graph.find_nodes(op="call_function", target=_DROPOUT_BACKWARD):
        gradient, mask, scale = node.args
        if scale:
            node.args = (gradient, mask, _scale(1.0 / scale, node.meta["val"]))
    for node in graph.find_nodes(op="call_function", target=_DROPOUT):
        if node.args[1] == 1 and node.args[2] is not False:
            _drop_all(node, outputs_of(node))
        else:
            _round_scale(node, outputs_of(node))
    for node in graph.find_nodes(op="call_function", target=FUSED_LSTM):
        node.args, node.target = (node.target, *node.args), under_autograd
    if any(_has_gaps(node) for node in graph.find_nodes(op="call_function", target=BATCH_NORM)):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default


def under_autograd(target: Any, /, *args: Any) -> Any:
    """Run ``target`` on detached tensors with autograd enabled: the kernel acts as in training, no graph is built."""
    with torch.enable_grad():
        return target(*(part.detach() if isinstance(part, torch.Tensor) else part for part in args))


def _has_gaps(node: fx.Node) -> bool:
    """Whether the traced result is on a CPU, and neither contiguous nor channels last."""
    made = node.meta["val"][0]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    formatted = made.is_contiguous(memory_format=formats.get(made.dim(), torch.contiguous_format))
    return made.device.type == "cpu" and not (made.is_contiguous() or formatted)


def _drop_all(node: fx.Node, outputs: dict[int, fx.Node]) -> None:
    graph, data = node.graph, node.args[0]
    with graph.inserting_before(node):
        nothing = graph.call_function(torch.ops.aten.mul.Scalar, (data, 0.0))
        no_mask = graph.call_function(torch.ops.aten.zeros_like.default, (data,), {"dtype": torch.bool})
    for place, output in outputs.items():
        made = (nothing, no_mask)[place]
        made.meta = dict(output.meta)
        output.replace_all_uses_with(made)
        graph.erase_node(output)
    graph.erase_node(node)


def _round_scale(node: fx.Node, outputs: dict[int, fx.Node]) -> None:
    """Keep only the mask of a float32 dropout whose scale differs from eager's, and multiply by eager's scale."""
    data, probability, _ = node.args
    like = node.meta["val"][0]
    if like.dtype != torch.float32 or not {0, 1} <= set(outputs):
        return
    share = 1.0 - cast(float, probability)
    scale = _scale(share, like)
    if scale == struct.unpack("f", struct.pack("f", 1.0 / share))[0]:
        return
    with node.graph.inserting_after(max(outputs.values())):
        made = node.graph.call_function(_DROPOUT_BACKWARD, (data, outputs[1], scale))
    with without_modes():
        made.meta = {**outputs[0].meta, "val": torch.empty_like(outputs[0].meta["val"])}  # of another storage
    outputs[0].replace_all_uses_with(made)


def outputs_of(node: fx.Node) -> dict[int, fx.Node]:
    """The ``getitem`` nodes of an operation with several outputs, by output index. Unused outputs have none."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def _batch_norm(node: fx.Node, outputs: dict[int, fx.Node]) -> Repeat:
    """Scale and shift by the saved mean and deviation where both were kept: they are small, and costly to compute.

    Otherwise run the whole batch norm again, without an update of its running statistics. On a CPU, the kernel for
    evaluation mode scales and shifts as the one for training does, with the same bits. It gets the deviation as a part
    of the weight: computed anew from a variance, the deviation would differ.
    """
    data, weight, bias, _, _, _, momentum, _ = node.args
    mean, deviation = outputs.get(1), outputs.get(2)
    values = [part.meta["val"] for part in (data, weight, bias, mean) if isinstance(part, fx.Node)]
    if mean is None or deviation is None or 0 not in outputs or not all(map(_is_plain, values)):
        return _batch_norm_again(node, tuple(outputs[place] for place in range(3) if place in outputs))

    def emit(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
        one = _like(graph.call_function(torch.ops.aten.ones_like.default, (resolve(deviation),)), deviation)
        scale = resolve(deviation)
        if weight is not None:
            scale = _like(graph.call_function(torch.ops.aten.mul.Tensor, (scale, resolve(weight))), deviation)
        arguments = (resolve(data), scale, resolve(bias), resolve(mean), one, momentum, 0.0)
        made = graph.call_function(BATCH_NORM_BY_STATISTICS, arguments)
        made.meta["val"] = node.meta["val"][:3]
        return (_like(graph.call_function(operator.getitem, (made, 0)), outputs[0]),)

    reads = (data, weight, bias, mean, deviation)
    return Repeat(tuple(value for value in reads if isinstance(value, fx.Node)), (outputs[0],), emit)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def _batch_norm_again(node: fx.Node, outputs: tuple[fx.Node, ...]) -> Repeat:
    data, weight, bias, _, _, training, momentum, eps = node.args
    arguments = (data, weight, bias, training, momentum, eps)

    def emit(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
        made = graph.call_function(BATCH_NORM_AGAIN, tuple(map(resolve, arguments)))
        made.meta["val"] = node.meta["val"][:3]
        return tuple(_like(graph.call_function(operator.getitem, (made, out.args[1])), out) for out in outputs)

    return Repeat(tuple(value for value in arguments if isinstance(value, fx.Node)), outputs, emit)


def _dropout(node: fx.Node, output: fx.Node, mask: fx.Node) -> Repeat:
    data, probability = node.args[:2]
    scale = _scale(1.0 - cast(float, probability), node.meta["val"][0])

    def emit(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
        masked = graph.call_function(torch.ops.aten.mul.Tensor, (resolve(data), resolve(mask)))
        scaled = graph.call_function(torch.ops.aten.mul_.Tensor, (_like(masked, output), scale))
        return (_like(scaled, output),)

    return Repeat((data, mask), (output,), emit)  # type: ignore[arg-type]


def _scale(share: float, like: torch.Tensor) -> float:
    """The scale of a dropout that keeps ``share`` of its elements. On a CPU it is rounded to the data's dtype."""
    if like.device.type != "cpu":
        return 1.0 / share
    with without_modes():
        return torch.ones((), dtype=like.dtype).div_(share).item()


def _draw(node: fx.Node, state: fx.Node, outputs: dict[int, fx.Node]) -> Repeat:
    device = state.args[0]

    def emit(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
        arguments = (resolve(state), device, node.target, *resolve(node.args))
        made = _like(graph.call_function(replayed, arguments, resolve(node.kwargs)), node)
        if not outputs:
            return (made,)
        return tuple(_like(graph.call_function(operator.getitem, (made, p)), part) for p, part in outputs.items())

    return Repeat((state, *node.all_input_nodes), tuple(outputs.values()) or (node,), emit)


def _like(made: fx.Node, node: fx.Node) -> fx.Node:
    made.meta["val"] = node.meta["val"]
    return made
