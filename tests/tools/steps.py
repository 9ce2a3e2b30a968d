"""Training steps of a tool: what is compared, and how."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchckpt.testing import count_recomputes

STEPS, ROWS, SIZE = 3, 4, 8


class Block(nn.Module):
    """Two linear layers with a dropout after them, around which its input skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.second(nn.functional.gelu(self.first(x))), 0.2, self.training)


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows() -> Tensor:
    """As many as all steps take."""
    return torch.randn(STEPS * ROWS, SIZE, generator=torch.Generator().manual_seed(1))


def local(tensor: Any) -> Tensor:
    """A copy of what this rank has of it."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def equal(received: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """To the bit."""
    return len(received) == len(expected) > 0 and all(map(torch.equal, received, expected))


def trained(
    model: nn.Module,
    loss_of: Callable[[Any], Tensor],
    batches: Sequence[Any],
    backward: Callable[[Tensor], None] = Tensor.backward,
    optimizer: Any = None,
) -> tuple[list[Tensor], dict[str, int]]:
    """Losses, gradients, parameters and the next random numbers of each step, and the replays by region."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if optimizer is None else optimizer
    seen = []
    with count_recomputes() as recomputes:
        for number, batch in enumerate(batches):
            torch.manual_seed(100 + number)
            loss = loss_of(batch)
            backward(loss)
            gradients = [parameter.grad for parameter in model.parameters()]
            seen += [local(loss), *(local(gradient) for gradient in gradients if gradient is not None)]
            optimizer.step()
            optimizer.zero_grad()
            seen += [*map(local, model.parameters()), torch.rand(2)]
    return seen, {name.strip("'"): count for name, count in recomputes.by_region.items()}
