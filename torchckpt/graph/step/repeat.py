"""Repeat: what runs when an operation is repeated, where it must not run a second time as it is.

A repeated dropout multiplies by the mask that it saved. A repeated batch norm does not update its running statistics
again. Other random operations run once, or again from a saved state of their generator, which is put back afterwards.
Collectives run once: the other processes would not take part in a second one.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from ctypes import c_float
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchckpt.errors import CaptureError, Fault
from torchckpt.graph.private.runtime import (
    BATCH_NORM,
    BATCH_NORM_AGAIN,
    BATCH_NORM_BACKWARD,
    BATCH_NORM_BY_STATISTICS,
    FUSED_LSTM,
    argument_of,
    branches_of,
    has_effect,
    is_collective,
    is_mutable,
    is_random,
    without_modes,
)
from torchckpt.tensors import tensors_in

__all__ = [
    "Repeat", "as_eager_runs", "forget_statistics", "generator_state", "nodes_in", "outputs_of", "record_states",
    "refuse_generators", "repeat_of", "replayed", "runs_once", "under_autograd",
]

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
    if target is generator_state or has_effect(target) or is_collective(target) or is_mutable(target):
        return True
    return _draws(node) or any(runs_once(inner) for branch in branches_of(node) for inner in branch.graph.nodes)


def repeat_of(node: fx.Node) -> Repeat | None:
    """What a repeat of ``node`` runs instead; None if it runs ``node`` itself, or if there is no substitute."""
    outputs = outputs_of(node)
    if node.target is BATCH_NORM and node.args[5]:
        return _batch_norm(node, outputs)
    if node.prev.op == "call_function" and node.prev.target is generator_state:
        return _draw(node, node.prev, outputs)
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
        return target(*(part.detach() if isinstance(part, Tensor) else part for part in args))


def _has_gaps(node: fx.Node) -> bool:
    """Whether the traced result is on a CPU, and neither contiguous nor channels last."""
    traced = node.meta["val"][0]
    return traced.device.type == "cpu" and not _is_formatted(traced)


def _is_formatted(traced: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    formatted = traced.is_contiguous(memory_format=formats.get(traced.dim(), torch.contiguous_format))
    return traced.is_contiguous() or formatted


def _drop_all(node: fx.Node, outputs: dict[int, fx.Node]) -> None:
    graph, data = node.graph, node.args[0]
    with graph.inserting_before(node):
        zeros = graph.call_function(torch.ops.aten.mul.Scalar, (data, 0.0))
        mask = graph.call_function(torch.ops.aten.zeros_like.default, (data,), {"dtype": torch.bool})
    for place, output in outputs.items():
        replacement = (zeros, mask)[place]
        replacement.meta = dict(output.meta)
        output.replace_all_uses_with(replacement)
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
    if scale == c_float(1.0 / share).value:
        return
    with node.graph.inserting_after(max(outputs.values())):
        scaled = node.graph.call_function(_DROPOUT_BACKWARD, (data, outputs[1], scale))
    with without_modes():
        scaled.meta = {**outputs[0].meta, "val": torch.empty_like(outputs[0].meta["val"])}  # of another storage
    outputs[0].replace_all_uses_with(scaled)


def outputs_of(node: fx.Node) -> dict[int, fx.Node]:
    """The ``getitem`` nodes of an operation with several outputs, by output index. Unused outputs have none."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def _batch_norm(node: fx.Node, outputs: dict[int, fx.Node]) -> Repeat:
    """Scale and shift by the saved mean and deviation where both were kept: they are small, and costly to compute.

    Otherwise run the whole batch norm again, without an update of its running statistics. On a CPU, the kernel for
    evaluation mode scales and shifts as the one for training does, with the same bits. It gets the deviation as a part
    of the weight: computed anew from a variance, the deviation would differ. What is not contiguous has a kernel that
    scales twice, by the deviation and by the weight, and so rounds twice.
    """
    data, weight, bias, running_mean, running_var, training, momentum, eps = node.args
    mean, deviation = outputs.get(1), outputs.get(2)
    values = [part.meta["val"] for part in nodes_in((data, weight, bias, running_mean, running_var, mean))]
    is_plain = all(
        value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64) and _is_formatted(value)
        for value in values
    )
    if mean is None or deviation is None or 0 not in outputs or not is_plain:
        written = tuple(outputs[place] for place in range(3) if place in outputs)

        def emit_whole(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
            repeat = graph.call_function(BATCH_NORM_AGAIN, resolve((data, weight, bias, training, momentum, eps)))
            repeat.meta["val"] = node.meta["val"][:3]
            return tuple(_part(repeat, output) for output in written)

        return Repeat(nodes_in((data, weight, bias)), written, emit_whole)

    def emit(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
        ones = _like(graph.call_function(torch.ops.aten.ones_like.default, (resolve(deviation),)), deviation)
        scale = resolve(deviation)
        if weight is not None:
            scale = _like(graph.call_function(torch.ops.aten.mul.Tensor, (scale, resolve(weight))), deviation)
        arguments = (resolve(data), scale, resolve(bias), resolve(mean), ones, momentum, 0.0)
        repeat = graph.call_function(BATCH_NORM_BY_STATISTICS, arguments)
        repeat.meta["val"] = node.meta["val"][:3]
        return (_part(repeat, outputs[0]),)

    return Repeat(nodes_in((data, weight, bias, mean, deviation)), (outputs[0],), emit)


def _dropout(node: fx.Node, output: fx.Node, mask: fx.Node) -> Repeat:
    data, probability = node.args[:2]
    scale = _scale(1.0 - cast(float, probability), node.meta["val"][0])

    def emit(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
        masked = graph.call_function(torch.ops.aten.mul.Tensor, (resolve(data), resolve(mask)))
        scaled = graph.call_function(torch.ops.aten.mul_.Tensor, (_like(masked, output), scale))
        return (_like(scaled, output),)

    return Repeat(nodes_in((data, mask)), (output,), emit)


def _scale(share: float, like: Tensor) -> float:
    """The scale of a dropout that keeps ``share`` of its elements. On a CPU it is rounded to the data's dtype."""
    if like.device.type != "cpu":
        return 1.0 / share
    with without_modes():
        return torch.ones((), dtype=like.dtype).div_(share).item()


def _draw(node: fx.Node, state: fx.Node, outputs: dict[int, fx.Node]) -> Repeat:
    def emit(graph: fx.Graph, resolve: Resolve) -> tuple[fx.Node, ...]:
        arguments = (resolve(state), state.args[0], node.target, *resolve(node.args))
        repeat = _like(graph.call_function(replayed, arguments, resolve(node.kwargs)), node)
        return tuple(_part(repeat, output) for output in outputs.values()) or (repeat,)

    return Repeat((state, *node.all_input_nodes), tuple(outputs.values()) or (node,), emit)


def nodes_in(values: Iterable[Any]) -> tuple[fx.Node, ...]:
    return tuple(value for value in values if isinstance(value, fx.Node))


def _part(repeat: fx.Node, output: fx.Node) -> fx.Node:
    """The output of ``repeat`` that stands for ``output``."""
    return _like(repeat.graph.call_function(operator.getitem, (repeat, output.args[1])), output)


def _like(node: fx.Node, original: fx.Node) -> fx.Node:
    node.meta["val"] = original.meta["val"]
    return node


# random numbers -------------------------------------------------------------------------------------------------------


def refuse_generators(graph: fx.Graph) -> None:
    """Raise a CaptureError if an operation has its own ``generator=``: a graph cannot hold the state of one."""
    for node in graph.nodes:
        if node.op == "call_function" and node.kwargs.get("generator") is not None:
            rule = "the call draws from a generator that is not the default one of its device"
            works = "torch.manual_seed() before the step; or draw outside of the call, and pass the tensor"
            raise CaptureError(str(Fault(rule, f"{node.name} with generator=", works)))


def record_states(graph: fx.Graph) -> None:
    """Insert before each random operation of ``graph`` a node that reads its generator's state."""
    for node in [node for node in graph.nodes if node.op == "call_function" and _draws(node)]:
        like = tensors_in(node.meta["val"])[0]
        with graph.inserting_before(node):
            state = graph.call_function(generator_state, (str(like.device),))
        state.meta["partitioner_tag"] = node.meta.get("partitioner_tag")
        size = generator_state(str(like.device)).numel()
        with like.fake_mode:  # type: ignore[attr-defined]
            state.meta["val"] = torch.empty(size, dtype=torch.uint8)


def _draws(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers; an attention whose dropout is 0 draws none."""
    return is_random(node.target) and argument_of(node, "dropout_p") != 0.0


def generator_state(device: str) -> Tensor:
    """The state of the default generator of ``device``."""
    if device == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def replayed(state: Tensor, device: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run ``target`` with the generator in ``state``, then restore the generator's present state."""
    before = generator_state(device)
    _set_generator(device, state)
    try:
        return target(*args, **kwargs)
    finally:
        _set_generator(device, before)


def _set_generator(device: str, state: Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
