"""Count: one stage run with tensors that have no memory: a forward, and two backwards.

    forward                    backward for inputs           backward for inputs and parameters
    [1] parts start and end;   [3] the number of a node      [4] the same; its excess
        each has the storages      tells the part that           over [3] is the
        that it saves              made it                       weight gradient
    [2] for each part, what has run when it saves its last tensor: a replay ends there
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.costs.ledger import (
    AFTER,
    BEFORE,
    BOTH_GRADS,
    FORWARD,
    INPUT_GRAD,
    Held,
    Holdings,
    Ledger,
    SecondsOf,
    Tally,
)
from torchckpt.costs.parts import Static, static_of, watched
from torchckpt.costs.private import sequence_now, sequence_of
from torchckpt.tensors import tensors_in

__all__ = ["Counted", "Part", "counted"]


@dataclass(frozen=True)
class Part:
    """A block, or operations outside of blocks."""

    forward: Tally
    input_grad: Tally
    weight_grad: Tally
    recompute: Tally
    """The operations of the forward up to the last tensor that it saves."""
    held: Held
    static: Static
    changes_input: bool = False
    """Whether it changes an input in place. Then it cannot run again."""


@dataclass(frozen=True)
class Counted:
    """What was counted for one stage."""

    before: Part
    blocks: tuple[Part, ...]
    after: Part
    message_bytes: int
    """The bytes of the floating-point tensors that the stage is called with."""


class _Forward:
    """Data about a stage, collected during its forward."""

    def __init__(self, ledger: Ledger, static: Iterable[StorageWeakRef]) -> None:
        self.ledger = ledger
        self.holdings = Holdings(frozenset(static))
        self.replays: dict[int, Tally] = {}  # by part, what had run at its last save
        self.inputs: list[Tensor] = []  # inputs of blocks that need a gradient
        self.changing: set[int] = set()  # blocks that change what they are given
        self._versions: list[tuple[Tensor, int]] = []
        self._starts: list[tuple[int, int]] = [(-1, BEFORE)]  # the number of a node, and the part from there on

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in((args, kwargs))
        self.inputs += [one for one in tensors if one.requires_grad and not isinstance(one, nn.Parameter)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._turn(len(self.holdings.given))
        self.holdings.give(tensors)

    def leave(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            self.changing.add(self.ledger.part)
        self._turn(AFTER)

    def pack(self, tensor: Tensor) -> Tensor:
        part = self.ledger.part
        self.holdings.save(part, tensor)
        self.replays[part] = self.ledger.tallies[FORWARD, part].copy()
        return tensor if tensor.is_leaf else tensor.detach()

    def part_of(self, node: Node) -> int:
        at = bisect_right(self._starts, sequence_of(node), key=lambda start: start[0])
        return self._starts[at - 1][1]

    def _turn(self, part: int) -> None:
        phase, self.ledger.phase = self.ledger.phase, None
        self._starts.append((sequence_now(), part))
        self.ledger.phase, self.ledger.part = phase, part


def counted(
    stage: nn.Module, call: Callable[[], Any], inputs: Any, seconds_of: SecondsOf, children: Sequence[nn.Module] | None
) -> tuple[Counted, Any]:
    """Run ``call``, the forward of ``stage`` on ``inputs``, and its backwards. Returns the counts and the outputs.

    Args:
        children: the modules whose calls are blocks; None where regions are.
    """
    static = static_of(stage)
    ledger = Ledger(seconds_of, static)
    forward = _Forward(ledger, static)
    with ledger:
        with saved_tensors_hooks(forward.pack, _same), watched(forward, children), _phase(ledger, FORWARD):
            outputs = call()
        graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        parameters = [one for one in stage.parameters() if one.requires_grad]
        leaves = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        _follow(graded, forward)
        _backward(ledger, INPUT_GRAD, graded, [*leaves, *forward.inputs])
        _backward(ledger, BOTH_GRADS, graded, [*leaves, *forward.inputs, *parameters])
    held = forward.holdings.found(ledger.makers)
    shares: dict[int, Static] = {}
    for storage, own in static.items():
        user = ledger.users.get(storage, BEFORE)
        shares[user] = shares.get(user, Static()) + own

    def part(at: int) -> Part:
        ahead, inner, both = (ledger.tallies[phase, at] for phase in (FORWARD, INPUT_GRAD, BOTH_GRADS))
        replay = forward.replays.get(at, Tally())
        return Part(ahead, inner, both - inner, replay, held[at], shares.get(at, Static()), at in forward.changing)

    blocks = tuple(map(part, range(len(forward.holdings.given))))
    message = sum(one.numel() * one.element_size() for one in tensors_in(inputs) if one.is_floating_point())
    return Counted(part(BEFORE), blocks, part(AFTER), message), outputs


def _follow(outputs: Sequence[Tensor], forward: _Forward) -> None:
    """Have each node of the graph say in which part it was made, before it runs backwards."""
    stack = [output.grad_fn for output in outputs]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(_turning(forward.ledger, forward.part_of(node)))
            stack.extend(parent for parent, _ in node.next_functions)


def _turning(ledger: Ledger, part: int) -> Callable[[Any], None]:
    def turn(_: Any) -> None:
        ledger.part = part

    return turn


def _backward(ledger: Ledger, phase: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if not outputs or not inputs:
        return
    gradients = [torch.ones_like(output) for output in outputs]
    with _phase(ledger, phase):
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=phase == INPUT_GRAD, allow_unused=True)


@contextmanager
def _phase(ledger: Ledger, phase: str) -> Iterator[None]:
    ledger.phase, ledger.part = phase, BEFORE
    try:
        yield
    finally:
        ledger.phase = None


def _same(tensor: Tensor) -> Tensor:
    return tensor
