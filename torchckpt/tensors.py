"""Tensors: those in arguments and outputs, the autograd nodes behind them, and the FLOPs of a call with them."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import islice
from numbers import Number
from types import MemberDescriptorType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

__all__ = [
    "ATOMS", "MUTABLE", "PLAIN", "PutBack", "attributes_of", "copy_attributes", "detached", "flop_formula", "graded_as",
    "gradient_bytes", "hidden_tensors", "hides_tensors", "inner_tensors", "is_iterator", "is_of_tensors", "lengths_in",
    "may_equal", "node_name", "nodes_behind", "noted", "of_class", "parameter_as", "runs_when_accumulated",
    "tensors_in", "tensors_of", "tensors_of_pair", "version_of", "with_lengths",
]

ATOMS = frozenset({type(None), bool, int, float, complex, str})
"""Types of what holds nothing: numbers and words."""
PLAIN = (Number, str, Enum, torch.dtype, type(None))
"""Types of what a module is set to. ``ATOMS`` are the usual ones; ``Number`` has those of NumPy, too."""
MUTABLE = (list, dict, set)
"""Types of a setting that may change in place."""
_MOST_NOTED = 64
"""The most items of one, of a tuple or of a frozenset."""
_OF_ITERATORS = ("array", "builtins", "collections", "itertools", "_collections")  # the last until Python 3.11
_DEPTH, _MOST, _ALL = 4, 1000, 10_000
"""How deep objects are looked into for tensors, the most values of one container, and of all together."""

PutBack: TypeAlias = Callable[[Sequence[Tensor]], Any]
"""Rebuilds a structure from the tensors that take the places of its own."""


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of ``tree``, in the order of its leaves; one that stands in two places comes twice."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):  # torch's pytree takes five times as long
        return [tensor for each in tree if type(each) not in ATOMS for tensor in tensors_in(each)]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that ``tensor`` wraps, such as this rank's part of a DTensor; itself, if it wraps none."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    values = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [inner for value in values if isinstance(value, Tensor) for inner in inner_tensors(value)]


def gradient_bytes(stages: Mapping[int, Iterable[Tensor]]) -> dict[int, float]:
    """The bytes on this device of the gradients that the parameters of each stage have. One that stages share counts
    for the last of them, whose backward comes first."""
    owners = {parameter: stage for stage in sorted(stages) for parameter in stages[stage]}
    found = dict.fromkeys(stages, 0.0)
    for parameter, stage in owners.items():
        parts = [] if parameter.grad is None else inner_tensors(parameter.grad)
        found[stage] += sum(part.numel() * part.element_size() for part in parts)
    return found


def tensors_of(tree: Any) -> tuple[tuple[Tensor, ...], PutBack]:
    """The tensors in ``tree``, each once, and a function that rebuilds the tree from as many other tensors.

    A tensor that is in several places of the tree is replaced by the same new tensor in all of them. The new tensor
    gets the Python attributes that were set on the old one.
    """
    leaves, spec = pytree.tree_flatten(tree)
    unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    numbers = {key: number for number, key in enumerate(unique)}
    places = [(place, numbers[id(leaf)]) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    attributes = [(n, tensor.__dict__.copy()) for n, tensor in enumerate(unique.values()) if tensor.__dict__]

    def put_back(tensors: Sequence[Tensor]) -> Any:
        for number, values in attributes:
            tensors[number].__dict__.update(values)
        filled = list(rest)
        for place, number in places:
            filled[place] = tensors[number]
        return pytree.tree_unflatten(filled, spec)

    return tuple(unique.values()), put_back


def tensors_of_pair(pair: tuple[Any, Any]) -> tuple[tuple[Tensor, ...], PutBack]:
    """As :func:`tensors_of`, but faster for the usual (args, kwargs) of a stage, and for what its call returns."""
    first, second = pair
    if not second and isinstance(first, Tensor) and not first.__dict__:
        return (first,), lambda tensors: (tensors[0], {})  # what most stages return
    is_one = not second and type(first) is tuple and len(first) == 1 and isinstance(first[0], Tensor)
    if is_one and not first[0].__dict__:
        return first, lambda tensors: (tuple(tensors), {})  # the arguments of most stages
    return tensors_of(pair)


def copy_attributes(source: Tensor, target: Tensor) -> Tensor:
    """Copy the Python attributes that were set on ``source`` to ``target``, and return ``target``."""
    if source.__dict__:
        target.__dict__.update(source.__dict__)
    return target


def lengths_in(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that say how long the parts of a nested tensor are, if it is jagged."""
    return {name: lengths for name in ("_offsets", "_lengths") if (lengths := getattr(tensor, name, None)) is not None}


def with_lengths(tensor: Tensor, lengths: dict[str, Tensor]) -> Tensor:
    """``tensor`` with the tensors ``lengths`` in place of its own, if these are equal."""
    own = lengths_in(tensor)
    if own.keys() != lengths.keys() or not all(map(torch.equal, own.values(), lengths.values())):
        return tensor
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # of a subclass
    parts = {name: getattr(tensor, name) for name in names} | lengths
    again: Tensor = type(tensor).__tensor_unflatten__(parts, context, None, None)  # type: ignore[attr-defined]
    return again


def of_class(cls: type[Tensor], tensor: Tensor) -> Tensor:
    """``tensor`` as a ``cls``. Where subclasses do not see functions, as in the backward of a loss of one, what is made
    of one is a plain tensor. A subclass that sees operators, such as a DTensor, makes its own, and what is made of a
    parameter is none."""
    return tensor if type(tensor) is cls or not _is_kept(cls) else tensor.as_subclass(cls)


def detached(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph, of its class (:func:`of_class`), and no view: an autograd Function that returns a
    view forbids operations in place on it. (``_make_subclass``: as of a parameter; no public form.)"""
    cls = tensor.__class__
    return tensor._make_subclass(cls, tensor) if cls is not Tensor and _is_kept(cls) else tensor.detach()


def parameter_as(parameter: Tensor, values: Tensor) -> Any:
    """A parameter with ``values``, which has the class and the attributes of ``parameter``."""
    cls, required = parameter.__class__, parameter.requires_grad
    made = nn.Parameter(values, required) if _sees_operators(cls) else parameter._make_subclass(cls, values, required)
    return copy_attributes(parameter, made)


@contextmanager
def graded_as(flags: Sequence[tuple[Tensor, bool]]) -> Iterator[None]:
    """A context in which leaves require grad or not, as ``flags`` say."""
    before = [(leaf, leaf.requires_grad) for leaf, _ in flags]
    try:
        for leaf, is_graded in flags:
            leaf.requires_grad_(is_graded)
        yield
    finally:
        for leaf, is_graded in before:
            leaf.requires_grad_(is_graded)


def may_equal(values: Tensor | None, tensor: Tensor) -> bool:
    """Whether ``tensor`` has these ``values``, or cannot be compared with them."""
    if values is None or type(tensor) is not Tensor or tensor.is_meta or tensor.layout != torch.strided:
        return True
    try:
        return torch.equal(values, tensor)
    except NotImplementedError:  # such as float4
        return True


def _is_kept(cls: type[Tensor]) -> bool:
    return not (_sees_operators(cls) or issubclass(cls, nn.Parameter))


def _sees_operators(cls: type[Tensor]) -> bool:
    return cls.__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_iterator(leaf: object) -> bool:
    """Whether ``leaf`` is a generator or another iterator of Python's own. Mocks and files are iterators, too."""
    return type(leaf).__module__ in _OF_ITERATORS and issubclass(type(leaf), Iterator)


def hides_tensors(leaf: object) -> bool:
    """Whether ``leaf`` of a tree is an object that holds tensors where torch's pytree does not look."""
    return next(hidden_tensors(leaf), None) is not None


def hidden_tensors(leaf: object) -> Iterator[Tensor]:
    """The tensors that ``leaf`` of a tree holds where torch's pytree does not look; but not those in large containers,
    deep inside, or behind many other values."""
    values = islice(_values_in(leaf, _DEPTH), _ALL)
    return (cast("Tensor", value) for value in values if issubclass(type(value), Tensor))


def _values_in(value: object, depth: int) -> Iterator[object]:
    kind = type(value)  # not isinstance(): proxies answer anything
    if depth == 0 or issubclass(kind, (Tensor, nn.Module, type, str, bytes, int, float, memoryview)) or value is None:
        return
    inside: Collection[object] = ()
    if issubclass(kind, dict):
        inside = dict.values(cast("dict[Any, object]", value))
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        inside = cast("Collection[object]", value)
    elif kind.__dictoffset__ or hasattr(kind, "__slots__"):
        inside = attributes_of(value)
    elif issubclass(kind, Mapping):  # in C, as those below
        inside = list(cast("Mapping[Any, object]", value).values())
    elif issubclass(kind, (Sequence, Set)):
        inside = cast("Collection[object]", value)
    if len(inside) <= _MOST:
        for each in list(inside):
            yield each
            if type(each) not in ATOMS:
                yield from _values_in(each, depth - 1)


def noted(value: Any) -> Any:
    """What a call may hold of ``value``: a number or a word, a copy of a few of these; a tuple of tensors without a
    graph, as the state of an LSTM; of others, the type."""
    kind = type(value)
    if is_of_tensors(value):
        return kind if any(each.grad_fn is not None for each in value) else value
    if kind in MUTABLE:
        return value.copy() if _is_plain(value.values() if kind is dict else value) else kind
    return value if isinstance(value, PLAIN) or (isinstance(value, (tuple, frozenset)) and _is_plain(value)) else kind


def is_of_tensors(value: Any) -> bool:
    """Whether ``value`` is a tuple of tensors."""
    return type(value) is tuple and bool(value) and all(isinstance(each, Tensor) for each in value)


def _is_plain(items: Collection[Any]) -> bool:
    return len(items) <= _MOST_NOTED and (
        ATOMS.issuperset(map(type, items)) or all(isinstance(item, PLAIN) for item in items)
    )


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was changed in place. An inference tensor does not tell."""
    return 0 if tensor.is_inference() else tensor._version


def runs_when_accumulated(parameter: Tensor) -> bool:
    """Whether a hook runs where a gradient of ``parameter`` is accumulated. Of those at its node, only what torch's
    ``_apply_optimizer_in_backward`` leaves on the parameter tells."""
    return bool(parameter._post_accumulate_grad_hooks) or hasattr(parameter, "_in_backward_optimizers")


def attributes_of(value: object) -> list[object]:
    """The values of the attributes of an object; none of a proxy that has nothing behind it."""
    kind, found = type(value), list[object]()
    if kind.__dictoffset__:
        with suppress(Exception):  # of the user's code
            found += vars(value).values()
    for cls in kind.__mro__ if hasattr(kind, "__slots__") else ():
        for slot in cls.__dict__.values() if "__slots__" in cls.__dict__ else ():
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError):  # it is empty
                    found.append(slot.__get__(value))
    return found


def nodes_behind(
    roots: Iterable[Tensor | Node | None], counts: Callable[[Node], bool] = lambda node: True
) -> Iterator[Node]:
    """The autograd nodes that ``roots`` depend on, each once, in the order in which a walk of their graph meets them;
    but neither those that do not count nor what is behind these."""
    stack, seen = [root.grad_fn if isinstance(root, Tensor) else root for root in roots], set[Node]()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen and counts(node):
            seen.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions)


def node_name(node: Node) -> str:
    """The name of an autograd node. A Function of the user's may keep something else as ``ctx.name``, which is its
    node's attribute."""
    return type(node).name(node)


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """The function that counts the FLOPs of a call of ``operator``, by its arguments and its result, ``out_val``.

    None for an operator without FLOPs: all but products of matrices, convolutions and attention.
    """
    from torch.utils.flop_counter import flop_registry  # nothing else needs it

    name = str(operator)
    if name.removesuffix("_backward") in _ATTENTION:
        return _attention_backward_flops if name.endswith("_backward") else _attention_flops
    return flop_registry.get(operator)


_ATTENTION = frozenset(
    f"aten._scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
"""Kernels of attention. Torch's registry lacks the one of the CPU before 2.15, and fewer heads of keys before 2.13."""


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    count: Callable[..., int] = sdpa_flop_count
    return count(query.shape, _with_heads(key, query), _with_heads(value, query))


def _attention_backward_flops(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    count: Callable[..., int] = sdpa_backward_flop_count
    return count(gradient.shape, query.shape, _with_heads(key, query), _with_heads(value, query))


def _with_heads(tensor: Tensor, query: Tensor) -> torch.Size:
    """The shape of keys or values with a head for each head of the queries."""
    return torch.Size((tensor.shape[0], query.shape[1], *tensor.shape[2:]))
