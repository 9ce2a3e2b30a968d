"""Bits: all that a few steps of training leave, plainly and with regions, compared to the bit."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import torchckpt

__all__ = ["KINDS", "WAYS", "Left", "Regions", "Switch", "differing", "loss_of", "run_states", "train"]

KINDS = ("losses", "gradients", "parameters", "buffers", "random state", "predictions")

WAYS: dict[str, Callable[..., Any]] = {
    "torch.utils.checkpoint": torch.utils.checkpoint.checkpoint,
    "torchckpt": torchckpt.checkpoint,
}

Switch: TypeAlias = Callable[[nn.Module, Callable[..., Any]], AbstractContextManager[Any]]
"""Turns the checkpointing of a model on, with a function in the place of torch's, until the context ends."""


class Regions:
    """Counts what goes through it to ``way``, in place of torch's ``checkpoint``."""

    def __init__(self, way: Callable[..., Any]) -> None:
        self.way = way
        self.forwards = 0
        """Calls of regions outside of replays, with gradients on."""
        self.reached = 0
        """Those of which an output gets a gradient: the loss reads it."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = self.way(function, *args, **kwargs)
        graded = [output for output in tensors_in(outputs) if output.requires_grad]
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # no backward is running
            self.forwards += 1
            if graded:
                self._watch(graded)
        return outputs

    def _watch(self, outputs: list[Tensor]) -> None:
        seen: list[None] = []

        def note(_: Tensor) -> None:
            self.reached += not seen
            seen.append(None)

        for output in outputs:
            output.register_hook(note)


class Left(NamedTuple):
    """What training leaves, by kind; how often a region was made, and replayed; what a forward saved."""

    values: dict[str, list[Tensor | None]]
    regions: int
    reached: int = 0
    replays: int = 0
    saved_bytes: int = 0


def train(
    build: Callable[[], tuple[nn.Module, Any]],
    way: Callable[..., Any] | None,
    steps: int,
    switch: Switch = lambda model, function: nullcontext(),
) -> Left:
    """Build a model and train it, from one seed.

    Args:
        build: a model, with its input: a tensor, or a dict of keywords.
        way: stands in for torch's ``checkpoint``; None for a model that makes no regions.
        switch: gives the model the function; not used without ``way``.
    """
    seed()
    model, inputs = build()
    regions = Regions(way or torch.utils.checkpoint.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[Tensor | None] = []
    with switch(model, regions) if way else nullcontext(), torchckpt.testing.count_recomputes() as recomputes:
        for step in range(steps):
            optimizer.zero_grad()
            with torchckpt.testing.saved_bytes() if step == steps - 1 else nullcontext() as saved:
                loss = loss_of(called(model.train(), inputs))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        values = {
            "losses": losses,
            "gradients": [parameter.grad for parameter in model.parameters()],
            "parameters": [*model.parameters()],
            "buffers": [*model.buffers()],
            "random state": run_states(),
        }
        with torch.no_grad():
            values["predictions"] = [*tensors_in(called(model.eval(), inputs))]
    total = saved.total if saved is not None else 0
    return Left(values, regions.forwards, regions.reached, recomputes.total, total)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if numpy := _numpy():
        numpy.random.seed(0)


def run_states() -> list[Tensor | None]:
    """The states of the random numbers: torch's, Python's, NumPy's."""
    states: list[Tensor | None] = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    if numpy := _numpy():
        states.append(torch.tensor([*numpy.random.get_state()[1], numpy.random.get_state()[2]], dtype=torch.int64))
    return states


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def loss_of(outputs: Any) -> Tensor:
    """A number that depends on every output that has a gradient."""
    graded = [output for output in tensors_in(outputs) if output.requires_grad]
    return torch.stack([output.abs().float().square().mean() for output in graded]).sum()


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """The tensors of what models return: also those of dataclasses, and of classes of mappings."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from _each(outputs.values())
    elif isinstance(outputs, (list, tuple)):
        yield from _each(outputs)
    elif is_dataclass(outputs):
        yield from _each(getattr(outputs, field.name) for field in fields(outputs))


def _each(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from tensors_in(value)


def differing(left: Left, other: Left) -> list[str]:
    """The kinds of which some tensor has other bits."""
    return [kind for kind in KINDS if not _same(left.values[kind], other.values[kind])]


def _same(left: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(left, other, strict=True) if a is not None or b is not None]
    return all(a is not None and b is not None and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    """So that a NaN equals itself, and zeros of two signs differ."""
    return tensor.detach().reshape(-1).view(torch.uint8)
