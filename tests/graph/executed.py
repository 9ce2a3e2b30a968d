"""Executed: what a graph of :func:`gradient` saves and runs, in words that a test can write down."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from torchckpt.graph.derive.adjoint import FORWARD_OUTPUTS
from torchckpt.graph.step.joint import needed

__all__ = ["backward", "counted", "repeats", "saved"]

VIEWS = ("alias", "expand", "view", "t", "transpose", "detach", "getitem")


def counted(module: fx.GraphModule) -> Counter[str]:
    """How often each operator is called, by its short name: ``aten.tanh.default`` is ``tanh``."""
    return Counter(_short(node) for node in module.graph.nodes if node.op == "call_function")


def saved(module: fx.GraphModule) -> set[str]:
    """The values of the forward that the backward reads, those that are outputs left out."""
    forward, rest = _parted(module)
    read = {_origin(source) for node in rest for source in node.all_input_nodes}
    return {node.name for node in read & forward - set(_outputs(module))}


def backward(module: fx.GraphModule) -> list[str]:
    """What runs after the forward, by operators; of what ran before, ``>`` and the name that it had then."""
    _, rest = _parted(module)
    first = _firsts(module)
    ran = [node for node in rest if _short(node) not in VIEWS]
    return [_short(node) if first[node] is node else f">{first[node].name}" for node in ran]


def repeats(module: fx.GraphModule) -> list[str]:
    """The operations that run again, by the names that they had at first, in their order."""
    return [name[1:] for name in backward(module) if name.startswith(">")]


def _parted(module: fx.GraphModule) -> tuple[set[fx.Node], list[fx.Node]]:
    """The operations that the outputs need, and the others."""
    wanted = needed(_outputs(module))
    called = [node for node in module.graph.nodes if node.op == "call_function"]
    return {node for node in called if node in wanted}, [node for node in called if node not in wanted]


def _outputs(module: fx.GraphModule) -> list[fx.Node]:
    outputs: list[fx.Node] = []
    fx.node.map_arg(module.graph.output_node().args, outputs.append)
    return outputs[: module.meta[FORWARD_OUTPUTS]]


def _firsts(module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Of each operation, the first that computes the same: one operator of the same values."""
    known: dict[object, fx.Node] = {}
    firsts: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        alike = node if node.op != "call_function" else (str(node.target), *_alike(node, firsts))
        firsts[node] = known.setdefault(alike, node)
    return firsts


def _alike(node: fx.Node, firsts: dict[fx.Node, fx.Node]) -> Iterator[object]:
    for argument in (*node.args, *node.kwargs.items()):
        yield firsts[argument] if isinstance(argument, fx.Node) else repr(argument)


def _origin(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of."""
    while node.op == "call_function" and _short(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _short(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).split(".")[0].removeprefix("aten.")
