"""Separators: the values through which all data of the forward flows, found in one sweep."""
from __future__ import annotations

from collections.abc import Sequence, Set

from torchckpt.model.remat.step.dataflow import Dataflow

__all__ = ["separating_storages", "separators"]


def separators(reads: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of a graph that no edge jumps over, in ascending order.

    In a topological order, a node separates those before it from those after it iff no edge leads from one to the
    other past it: with it removed, nothing after it can be reached from anything before it. The first node and the
    last always do. One sweep over nodes and edges.

    Args:
        reads: of node ``i``, the nodes that it reads; all of them come before ``i``.

    Example:
        Of a chain of five with a skip from 1 to 3, all but 2:

        >>> separators([[], [0], [1], [1, 2], [3]])
        [0, 1, 3, 4]
    """
    last_reader = list(range(len(reads)))
    for node, before in enumerate(reads):
        for read in before:
            last_reader[read] = node
    found, reached = [], -1
    for node, last in enumerate(last_reader):
        if reached <= node:
            found.append(node)
        reached = max(reached, last)
    return found


def separating_storages(flow: Dataflow, there: Set[int] = frozenset()) -> list[int]:
    """The storages from which alone the rest of the forward can run, in the order in which they are written.

    A storage separates the operations of the forward up to the one that writes it from those after it iff the latter
    read nothing that the former wrote, but it. What is given does not count, for it is there anyway: a parameter may
    enter at any place, and an input of the step may be read a second time. What an early operation computes from an
    input and a late one reads does count. A value that no later operation of the forward reads separates nothing.

    This is the criterion of the 'memory' policy of TensorFlow's memory-saving gradients (Salimans and Bulatov, 2018),
    which removes every value in turn and looks for connected components; one sweep finds the same.

    Args:
        there: storages that are kept in any case, such as a small attention mask that every layer reads; they count as
            little as what is given.
    """
    known = flow.given | there
    operations = flow.operations[: flow.forward]
    reads = [[storage for storage in operation.reads if storage not in known] for operation in operations]
    read = {storage for storages in reads for storage in storages}
    nodes = separators([[flow.writer[storage] for storage in storages] for storages in reads])
    outputs = ([storage for storage in operations[node].writes if storage in read] for node in nodes)
    return [storages[0] for storages in outputs if len(storages) == 1]
