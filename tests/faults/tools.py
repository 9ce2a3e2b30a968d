"""Tools: a training step of the small GPT by each tool of the library. A new tool gets a row in ``TOOLS``."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

import torchckpt
from tests.distributed.stages import Stage
from tests.faults.gpt import TOKENS, WIDTH, WORDS, Block, Gpt, batch, loss_of
from torchckpt import graph
from torchckpt.distributed import recompute_ahead

__all__ = ["TOOLS", "Tool", "Training", "same"]


class Training:
    """A model, its optimizer, and ``run``, which does forward and backward and returns the losses."""

    def __init__(self, modules: Sequence[nn.Module], run: Callable[[], Sequence[Tensor]]) -> None:
        self.modules, self._run = nn.ModuleList(modules), run
        self.optimizer = torch.optim.AdamW(self.modules.parameters(), lr=0.01, foreach=True)

    def step(self) -> list[Tensor]:
        """One step; the losses."""
        self.optimizer.zero_grad()
        losses = [loss.detach() for loss in self._run()]
        self.optimizer.step()
        return losses

    def state(self) -> dict[str, Any]:
        """A copy of what a step changes."""
        return {
            "modules": copy.deepcopy(dict(self.modules.state_dict())),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`state` has copied, and forget gradients, as after a step that failed."""
        self.optimizer.zero_grad()
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        torch.set_rng_state(state["generator"])

    def seen(self) -> list[Any]:
        """What one step leaves: losses, gradients, and the state after it."""
        losses = self.step()
        gradients = [parameter.grad for parameter in self.modules.parameters()]
        return [losses, copy.deepcopy(gradients), self.state()]

    def owned(self) -> list[Tensor]:
        """The tensors that may live on when a step has failed."""
        state = [value for of in self.optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
        return [*self.modules.parameters(), *self.modules.buffers(), *state]


def same(one: Any, other: Any) -> bool:
    """Whether two are equal: tensors to the bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# the tools ------------------------------------------------------------------------------------------------------------


def of_model(model: nn.Module) -> Training:
    tokens, target = batch()

    def run() -> list[Tensor]:
        loss = loss_of(model(tokens), target)
        loss.backward()
        return [loss]

    return Training([model], run)


def modules(depth: int) -> Training:
    model = Gpt(depth)
    torchckpt.checkpoint_layers(model, Block)
    return of_model(model)


def offloaded(depth: int) -> Training:
    model = Gpt(depth)
    torchckpt.offload_layers(model, Block, min_bytes=0)
    return of_model(model)


def nested(depth: int) -> Training:
    """A region around all blocks, in which each is one; one runs a kept part."""
    model = Gpt(depth)
    tokens, target = batch()
    embedding, *blocks, head = model

    def inner(block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * torchckpt.keep(lambda x: x.detach().mean().sigmoid(), x)

    def outer(x: Tensor) -> Tensor:
        for block in blocks:
            x = torchckpt.checkpoint(inner, block, x)
        return x

    def run() -> list[Tensor]:
        loss = loss_of(head(torchckpt.checkpoint(outer, embedding(tokens))), target)
        loss.backward()
        return [loss]

    return Training([model], run)


def by_hand(depth: int) -> Training:
    """Regions whose replays have places in the graph, but for the last, which is replayed before the backward."""
    model = Gpt(depth)
    tokens, target = batch()
    embedding, *blocks, head = model

    def run() -> list[Tensor]:
        x = embedding(tokens)
        for block in blocks:
            region = torchckpt.Checkpointing(block, x)
            x = region.recompute(region.checkpoint())
        loss = loss_of(head(x), target)
        region.prefetch()
        loss.backward()
        return [loss]

    return Training([model], run)


def piped(depth: int, **options: Any) -> torchckpt.Pipe:
    balance = [1 + depth // 2, depth - depth // 2 + 1]
    return torchckpt.Pipe(Gpt(depth), balance=balance, chunks=2, **options)


def stepping(model: torchckpt.Pipe) -> Training:
    tokens, target = batch()
    return Training([model], lambda: [model.step(tokens, target=target, loss_fn=loss_of)])


def pipe(depth: int) -> Training:
    return of_model(piped(depth, checkpoint="always"))


def pipe_step(depth: int) -> Training:
    return stepping(piped(depth, checkpoint="always"))


def pipe_budget(depth: int) -> Training:
    return of_model(piped(depth, budget="70%"))


def pipe_step_budget(depth: int) -> Training:
    return stepping(piped(depth, budget="80%"))


def traced(depth: int) -> Training:
    return of_model(graph.rematerialize(Gpt(depth), batch()[0], budget="90%"))


def layers_budget(depth: int) -> Training:
    model = Gpt(depth)
    torchckpt.checkpoint_layers(model, Block, budget="75%")
    return of_model(model)


def schedule(depth: int, name: str = "ScheduleInterleaved1F1B", **options: Any) -> Training:
    """One rank of gloo with two stages."""
    layers = [*Gpt(depth)]
    parts = [nn.Sequential(*layers[: 1 + depth // 2]), nn.Sequential(*layers[1 + depth // 2 :])]
    torchckpt.checkpoint_layers(nn.ModuleList(parts), Block)
    tokens, target = batch(2)
    hidden, logits = (torch.zeros(1, TOKENS, size, requires_grad=True) for size in (WIDTH, WORDS))
    ends = [(tokens[:1], hidden), (hidden, logits)]
    stages = [
        Stage(part, index, 2, torch.device("cpu"), input_args=given, output_args=returned)
        for index, (part, (given, returned)) in enumerate(zip(parts, ends))
    ]
    live = recompute_ahead(getattr(schedules, name)(stages, len(tokens), loss_fn=loss_of), **options)

    def run() -> list[Tensor]:
        losses: list[Tensor] = []
        live.step(tokens, target=target, losses=losses)
        return losses

    return Training(parts, run)


def schedule_budget(depth: int) -> Training:
    return schedule(depth, budget="90%")


class Tool(NamedTuple):
    make: Callable[[int], Training]
    """Makes the training of a GPT of so many blocks."""
    steps: int = 1
    """How many steps run before all are alike."""
    stays: bool = False
    """Whether a mode that counts operators stays entered from a step until the next one begins."""
    plans_less: bool = False
    """Whether a step has other operators after a lack of memory."""


TOOLS = {
    "checkpoint_layers": Tool(modules),
    "offload_layers": Tool(offloaded, 3),
    "checkpoint, keep, nested": Tool(nested),
    "Checkpointing": Tool(by_hand),
    "Pipe": Tool(pipe),
    "Pipe.step": Tool(pipe_step),
    "Pipe(budget=)": Tool(pipe_budget, 3, stays=True, plans_less=True),
    "Pipe(budget=).step": Tool(pipe_step_budget, 3, plans_less=True),
    "graph.rematerialize": Tool(traced, 2),
    "checkpoint_layers(budget=)": Tool(layers_budget, 4, stays=True),
    "recompute_ahead": Tool(schedule, 2),
    "recompute_ahead(budget=)": Tool(schedule_budget, 7),
}
"""By name."""
