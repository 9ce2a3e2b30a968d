"""Separators: the values through which all data of the forward flows, found in one sweep."""
from __future__ import annotations

from collections.abc import Sequence, Set

from torchckpt.model.remat.step.dataflow import Dataflow

__all__ = ["separating_storages", "separators"]


def separators(reads: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of a graph that no edge jumps over, in ascending order.

    Without such a node, no node after it can be reached from a node before it. The first node and the last one always
    separate. Takes one sweep over nodes and edges.

    Args:
        reads: for each node, the nodes that it reads. Nodes are in a topological order.

    Example:
        In a chain of five with a skip from 1 to 3, all but 2 separate:

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
    """The storages that each cut the forward in two, in the order in which they are written.

    The operations after a separating storage read nothing that was written before it. Given storages are an exception:
    parameters, and inputs of the step, may be read anywhere. A storage that no later operation of the forward reads
    separates nothing.

    This is the criterion of the 'memory' policy of TensorFlow's memory-saving gradients (Salimans and Bulatov, 2018).
    That policy removes every value in turn and looks for connected components; one sweep finds the same values.

    Args:
        there: other storages that may be read anywhere, since they are always kept, such as a small attention mask
            that every layer reads.
    """
    known = flow.given | there
    operations = flow.operations[: flow.forward]
    reads = [[storage for storage in operation.reads if storage not in known] for operation in operations]
    read = {storage for storages in reads for storage in storages}
    nodes = separators([[flow.writer[storage] for storage in storages] for storages in reads])
    outputs = ([storage for storage in operations[node].writes if storage in read] for node in nodes)
    return [storages[0] for storages in outputs if len(storages) == 1]
