"""Sums: gradients of one value are added in place, as autograd adds them.

A backward that adds out of place holds three tensors where autograd holds two: a weight that is read in two places,
once in part, then takes half as much again.
"""
from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace

from torch import fx

from torchckpt.graph.step.joint import Joint, is_sum, reached

__all__ = ["added_in_place"]


def added_in_place(joint: Joint) -> Joint:
    """``joint`` with sums of gradients that overwrite one of their operands. Each of them then runs only once.

    An operand is overwritten if an operator of torch makes it in the backward, in a storage of its own that fits it and
    the sum alike, and the sum alone reads it.
    """
    flow, operations = joint.flow, list(joint.flow.operations)
    backward = reached(joint.tangents)
    tensors = Counter(storage for storages in joint.storages.values() for storage in storages)
    alone = {storage for storage, count in tensors.items() if count == 1} - flow.results - flow.given
    sums: dict[fx.Node, fx.Node] = {}
    for index in range(flow.forward, len(operations)):
        node = joint.nodes[index]
        if node is None or node not in backward or not is_sum(node):
            continue
        (size,) = (flow.sizes_bytes[storage] for storage in operations[index].writes)
        for part in node.all_input_nodes:
            fits = joint.storages[part] <= alone and [flow.sizes_bytes[s] for s in joint.storages[part]] == [size]
            if fits and part in backward and _is_free(part, node):
                sums[node] = part
                less = operations[index].workspace_bytes - size
                operations[index] = replace(operations[index], workspace_bytes=less, repeatable=False)
                break
    return replace(joint, flow=replace(flow, operations=tuple(operations)), sums=sums)


def _is_free(part: fx.Node, node: fx.Node) -> bool:
    """Whether ``node`` alone reads ``part``, which an operator of torch has made with the layout of ``node``."""
    maker = part.args[0] if part.target is operator.getitem else part
    value, made = part.meta["val"], node.meta["val"]
    is_whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    is_torch = getattr(getattr(maker, "target", None), "namespace", "") == "aten"
    return is_torch and is_whole and value.stride() == made.stride() and set(part.users) == {node}
