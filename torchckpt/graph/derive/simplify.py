"""Simplify: remove transposes around the matrix products of a traced graph, without any additional product.

A derivative of ``A @ B`` is a product with a transposed operand, and where an operand was transposed already, the
gradient comes out transposed and is transposed back. With ``T`` the swap of the last two dimensions, ``G`` the gradient
that arrives and ``'`` for ``T``, the rules ``T(T(a)) -> a`` and ``T(a @ b) -> T(b) @ T(a)`` leave these derivatives:

    forward     dA        dB
    A  @ B'     G  @ B    G' @ A
    A' @ B      B  @ G'   A  @ G
    A' @ B'     B' @ G'   G' @ A'

The rules are those of the simplifier behind TVM Relax's ``Gradient`` pass. Unlike it, this one never computes a product
twice (it turns a product, that is, swaps and transposes its factors, only where the one reader is a transpose), never
adds a transpose, handles the ``view`` and ``expand`` nodes around a batched product, and reuses a transpose that the
graph already has.

A turned product is a different kernel call, which may round differently. On a CPU (MKL, oneDNN; ``mm`` and ``bmm``, 12
sizes from 1 to 512, plain and transposed operands) all of 144 turned products were bit-equal in bfloat16 and in
float16, 143 in float32, and 75 in float64; the others differed by rounding. ``exact=True`` turns no product, and all
values stay bit-equal.
"""
from __future__ import annotations

import copy
import heapq
import operator
import threading
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, called, raise_fault
from torchckpt.graph.private.runtime import storage_number
from torchckpt.tensors import tensors_in

__all__ = ["simplify"]

_Operator: Any = type(torch.ops.aten.mm.default)

_PRODUCTS = {
    "aten::mm": 0, "aten::mm.dtype": 0, "aten::bmm": 0, "aten::bmm.dtype": 0, "aten::matmul": 0,
    "aten::addmm": 1, "aten::addmm.dtype": 1, "aten::baddbmm": 1, "aten::baddbmm.dtype": 1,
}  # and how many addends come before the two factors
_RESHAPES = frozenset({"aten::view", "aten::_unsafe_view"})
_VIEWS = _RESHAPES | {"aten::expand"}
_READ_STRIDES = "aten::as_strided"


_alone = threading.Lock()
"""Python's filters of warnings are of the process. Of two threads that change them at once, the later one would restore
what the earlier one has set."""


@called("simplify()")
def simplify(gm: fx.GraphModule, *, exact: bool = False) -> fx.GraphModule:
    """A new module that computes the same with fewer transposes; ``gm`` itself is not changed.

    In the backward of ``F.linear``, 2 of 5 transposes are left. A transposed product that is an output (the gradient of
    a transposed weight) becomes contiguous. Views that change nothing, and dead code, are dropped; operations with side
    effects stay. ``meta["val"]`` is right for every node, strides and shared storages included.

    A product stays as it is where its new strides would reach a node whose values depend on strides: ``as_strided``, a
    random operation, an operator that is not ATen's, or a view that is impossible with the new strides.

    Args:
        gm: an ATen graph of functional operators, as AOTAutograd traces it: ``meta["val"]`` of its nodes are fake
            tensors of one mode.
        exact: leave the products as they are, and cancel transposes only where the strides stay the same. All values
            are then bit-equal. (For the backward of ``F.linear`` the result is the same.) Default: False.

    Raises:
        ArgumentError: the nodes have no fake tensors, or fake tensors of several modes.
    """
    with _alone, warnings.catch_warnings():  # torch copies a signature of pytrees in a way that torch has deprecated
        warnings.simplefilter("ignore", FutureWarning)
        graph = copy.deepcopy(gm.graph)
    graph.eliminate_dead_code()
    if any(node.op == "call_function" for node in graph.nodes):
        _Simplifier(graph, exact).run()
    simplified = fx.GraphModule(gm, graph)
    simplified.meta.update(gm.meta)
    return simplified


class _Path(NamedTuple):
    """The path from a node up through views of its batch, to ``core``; ``swapped`` is a known transpose of it."""

    views: list[fx.Node]  # outermost first
    core: fx.Node
    swapped: fx.Node | None
    alone: bool  # each node on the path has one reader


class _Simplifier:
    """Tries the rules on every node, last first, until none applies; an attempt that is refused is undone."""

    def __init__(self, graph: fx.Graph, exact: bool) -> None:
        self.graph, self.exact = graph, exact
        self.mode = _mode_of(graph)
        self.additions: list[fx.Node] = []

    def run(self) -> None:
        for turns in (False,) if self.exact else (False, True):
            self.turns = turns  # a turned product must not read a transpose that is about to be cancelled
            while sum(map(self._rewrite, reversed(list(self.graph.nodes)))):
                pass

    def _rewrite(self, node: fx.Node) -> bool:
        if not node.users:
            return False
        self.additions = []
        try:
            new = self._replacement(node)
            values = None if new is None else self._relaid(node, _value(new))
        except (RuntimeError, ValueError):  # an operator refuses the new strides
            new = values = None
        dead = set() if new is None else _dead_without(node, new)
        if new is None or values is None or _swaps(self.additions) > _swaps(dead):
            for addition in reversed(self.additions):
                self.graph.erase_node(addition)
            return False
        node.replace_all_uses_with(new)
        for reader, value in values.items():
            reader.meta["val"] = value
            reader.meta.pop("tensor_meta", None)
        for gone in sorted(dead, reverse=True):
            self.graph.erase_node(gone)
        return True

    # the rules --------------------------------------------------------------------------------------------------------

    def _replacement(self, node: fx.Node) -> fx.Node | None:
        source = _viewed(node)
        if source is not None and _layout(_value(node)) == _layout(_value(source)):
            return source
        source = _swap_operand(node)
        return None if source is None else self._without_swap(source, node)

    def _without_swap(self, node: fx.Node, before: fx.Node) -> fx.Node | None:
        """``T(node)`` made from existing nodes; None if that would need a new transpose of ``node``."""
        path = self._path(node, before)
        if path.swapped is None and not self._may_turn(path):
            return None
        swapped = path.swapped or self._turned(path.core)
        for view in reversed(path.views):
            swapped = self._view(view, swapped, before)
        return swapped

    def _path(self, node: fx.Node, before: fx.Node) -> _Path:
        views, alone = [], len(node.users) == 1
        while (swapped := _swap_operand(node) or _earlier_swap(node, before)) is None:
            source = _batch_viewed(node)
            if source is None:
                break
            views.append(node)
            node = source
            alone = alone and len(node.users) == 1
        return _Path(views, node, swapped, alone)

    def _may_turn(self, path: _Path) -> bool:
        """Whether the core is a product with one reader, and turning it adds at most one transpose."""
        return self.turns and path.alone and _operands(path.core) is not None and self._taken(path.core) <= 1

    def _taken(self, product: fx.Node) -> int:
        """How many transposes the operands of a turned product add; negative where some are cancelled."""
        count = 0
        for path in [self._path(operand, product) for operand in set(_operands(product) or ())]:
            if path.swapped is None:
                count += self._taken(path.core) if self._may_turn(path) else 1
            elif path.alone and _swap_operand(path.core) is not None:
                count -= 1
        return count

    def _turned(self, product: fx.Node) -> fx.Node:
        """``T(a @ b)`` as ``T(b) @ T(a)``, inserted before ``a @ b``."""
        operands = _operands(product) or []
        swapped = {operand: self._swapped(operand, product) for operand in dict.fromkeys(operands)}
        *addends, left, right = (swapped[operand] for operand in operands)
        rest = product.args[len(operands):]
        return self._call(product.target, (*addends, right, left, *rest), product, product, **product.kwargs)

    def _swapped(self, node: fx.Node, before: fx.Node) -> fx.Node:
        swapped = self._without_swap(node, before)
        if swapped is None and _value(node).dim() == 2:
            return self._call(torch.ops.aten.t.default, (node,), before, before)
        return swapped or self._call(torch.ops.aten.transpose.int, (node, -2, -1), before, before)

    def _view(self, view: fx.Node, source: fx.Node, before: fx.Node) -> fx.Node:
        """``view`` applied to the batch dimensions of ``source``, whose last two dimensions are swapped."""
        *batch, rows, columns = _value(view).shape
        if _value(source).shape == (*batch, columns, rows):
            return source
        *sizes, last_but_one, last = cast(list[Any], view.args[1])
        return self._call(view.target, (source, [*sizes, last, last_but_one]), view, before, **view.kwargs)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, before: fx.Node, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        self.additions.append(node)
        node.meta = {key: value for key, value in like.meta.items() if key != "tensor_meta"}
        node.meta["val"] = self._evaluated(node, {})
        return node

    # the values -------------------------------------------------------------------------------------------------------

    def _relaid(self, old: fx.Node, value: Tensor) -> dict[fx.Node, Any] | None:
        """The new values of all nodes whose layout changes once ``old`` is ``value``; None if one must not change."""
        if _place(_value(old)) == _place(value):
            return {}
        if self.exact:
            return None
        values: dict[fx.Node, Any] = {old: value}
        waiting = list(old.users)
        heapq.heapify(waiting)
        while waiting:
            node = heapq.heappop(waiting)
            if node.op == "output" or node in values:
                continue
            if not _takes_any_strides(node):
                return None
            result = self._evaluated(node, values)
            if not _is_settled(node, result, values):
                values[node] = result
                for user in node.users:
                    heapq.heappush(waiting, user)
        del values[old]
        return values

    def _evaluated(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        def value(argument: fx.Node) -> Any:
            return values[argument] if argument in values else argument.meta["val"]

        args, kwargs = cast(Any, fx.node.map_arg((node.args, node.kwargs), value))
        with self.mode, torch.no_grad():
            if _name(node) in _RESHAPES:  # size 1: a fake view takes strides that a real one refuses
                args = [args[0].squeeze(), *args[1:]]
            return cast(Any, node.target)(*args, **kwargs)


# what a node is -------------------------------------------------------------------------------------------------------


def _name(node: fx.Node) -> str:
    return str(node.target.name()) if isinstance(node.target, _Operator) else ""


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _is_tensor(argument: object, dims: int = 0) -> bool:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return _is_fake(value) and cast(Tensor, value).dim() >= dims


def _swap_operand(node: fx.Node) -> fx.Node | None:
    """``a`` where ``node`` is ``T(a)``."""
    name = _name(node)
    if name not in ("aten::t", "aten::mT", "aten::transpose.int", "aten::permute"):
        return None
    operand, *order = node.args
    if not isinstance(operand, fx.Node) or not _is_tensor(operand, 2) or node.kwargs:
        return None
    dims = _value(operand).dim()
    if name == "aten::transpose.int":
        swaps = sorted(dim % dims for dim in order) == [dims - 2, dims - 1]  # type: ignore[operator]
    elif name == "aten::permute":
        swaps = [dim % dims for dim in order[0]] == [*range(dims - 2), dims - 1, dims - 2]  # type: ignore[operator, union-attr]
    else:
        swaps = True
    return operand if swaps else None


def _earlier_swap(node: fx.Node, before: fx.Node) -> fx.Node | None:
    return next((user for user in node.users if user < before and _swap_operand(user) is not None), None)


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` is a view or an expansion of, if it is one."""
    if _name(node) not in _VIEWS or len(node.args) != 2 or not _is_tensor(node.args[0]):
        return None
    return node.args[0]  # type: ignore[return-value]


def _batch_viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` views with its last two dimensions as they are: ``T`` may go before the view."""
    source = _viewed(node)
    if source is None or not (_is_tensor(node, 2) and _is_tensor(source, 2)):
        return None
    return source if _value(node).shape[-2:] == _value(source).shape[-2:] else None


def _operands(node: fx.Node) -> list[fx.Node] | None:
    """The addends of ``node``, then its two factors; None if it is no product of matrices."""
    addends = _PRODUCTS.get(_name(node))
    if addends is None:
        return None
    operands = node.args[: addends + 2]
    if len(operands) < addends + 2 or not all(_is_tensor(operand, 2) for operand in operands):
        return None
    return list(operands)  # type: ignore[arg-type]


def _takes_any_strides(node: fx.Node) -> bool:
    """Whether the results of ``node`` depend only on the values of its inputs, and not on their strides."""
    name = _name(node)
    known = node.target is operator.getitem or (name.startswith("aten::") and not name.startswith(_READ_STRIDES))
    if node.op != "call_function" or not known or node.is_impure():
        return False
    if name and torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return False
    results = pytree.tree_leaves(node.meta.get("val"))
    are_known = all("val" in argument.meta for argument in node.all_input_nodes)
    return are_known and all(result is None or _is_fake(result) for result in results)


# what a value is ------------------------------------------------------------------------------------------------------


def _is_fake(value: object) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "fake_mode")


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.storage_offset()


def _place(value: Tensor) -> tuple[Any, ...]:
    return _layout(value), storage_number(value)


def _is_settled(node: fx.Node, result: Any, moved: Mapping[fx.Node, Any]) -> bool:
    """Whether the change ends at ``node``: ``result`` has the old layout, and shares no storage with a moved input."""
    read = [tensor for argument in node.all_input_nodes for tensor in tensors_in(moved.get(argument))]
    storages = set(map(storage_number, read))
    pairs = zip(tensors_in(node.meta["val"]), tensors_in(result))
    return all(_layout(old) == _layout(new) and storage_number(new) not in storages for old, new in pairs)


def _mode_of(graph: fx.Graph) -> Any:
    """The one mode of all fake tensors of the graph."""
    values = (tensor for node in graph.nodes for tensor in tensors_in(node.meta.get("val")))
    modes = {id(mode): mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None}
    if len(modes) != 1:
        rule = "meta['val'] of the nodes are not fake tensors of one mode"
        works = "simplify(make_fx(function, tracing_mode='fake')(*inputs)), or a graph that AOTAutograd has traced"
        raise_fault(Fault(rule, f"fake tensors of {len(modes)} modes", works))
    return next(iter(modes.values()))


# what a graph is ------------------------------------------------------------------------------------------------------


def _dead_without(node: fx.Node, kept: fx.Node) -> set[fx.Node]:
    """``node``, and the transposes, views and products that nothing else reads."""
    dead, left = {node}, [*node.all_input_nodes]
    while left:
        source = left.pop()
        simple = _swap_operand(source) is not None or _viewed(source) is not None or _operands(source) is not None
        if simple and source is not kept and dead.issuperset(source.users):
            dead.add(source)
            left.extend(source.all_input_nodes)
    return dead


def _swaps(nodes: Any) -> int:
    return sum(_swap_operand(node) is not None for node in nodes)
