"""Variants: one model, trained with and without recomputation, from the same weights and the same seeds."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchckpt import Pipe

from .model import Size, gpt

__all__ = ["DEFAULT", "NONE", "STOCK", "TORCHCKPT", "Variant", "variants"]

NONE, STOCK = "no checkpointing", "torch.utils.checkpoint"
TORCHCKPT, DEFAULT = 'torchckpt "always"', 'torchckpt "except_last"'


class Variant:
    """A model in two stages, and its optimizer."""

    def __init__(self, name: str, pipe: Pipe) -> None:
        self.name, self.pipe = name, pipe
        self.optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3, betas=(0.9, 0.95))

    def loss(self, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """Run the forward, with dropout from this seed, and return the loss."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        logits = self.pipe(batch[0])
        return cross_entropy(logits.flatten(0, 1), batch[1].flatten().to(logits.device))

    def step(self, batch: tuple[Tensor, Tensor], seed: int) -> float:
        loss = self.loss(batch, seed)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def wait(self) -> None:
        """Wait until the devices have finished all their work."""
        for device in {parameter.device for parameter in self.pipe.parameters()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.pipe.parameters() if parameter.grad is not None]

    def stages(self) -> Iterator[Pipe]:
        """Each stage as a pipeline of its own, over the same layers."""
        layers = iter(self.pipe.children())
        for count in self.pipe.balance:
            stage = nn.Sequential(*(next(layers) for _ in range(count)))
            yield Pipe(stage, chunks=self.pipe.chunks, checkpoint=self.pipe.checkpoint)


def variants(size: Size, devices: list[str], seed: int) -> list[Variant]:
    """All variants; the first is the one without checkpointing."""
    torch.manual_seed(seed)
    model = gpt(size)
    plain, ours, default = (copy.deepcopy(model) for _ in range(3))
    first = size.balance[0]
    stock = nn.Sequential(Checkpointed(model[:first]), Checkpointed(model[first:]))
    options: dict[str, Any] = {"chunks": size.chunks, "devices": devices}
    return [
        Variant(NONE, Pipe(plain, size.balance, checkpoint="never", **options)),
        Variant(STOCK, Pipe(stock, [1, 1], checkpoint="never", **options)),
        Variant(TORCHCKPT, Pipe(ours, size.balance, checkpoint="always", **options)),
        Variant(DEFAULT, Pipe(default, size.balance, checkpoint="except_last", **options)),
    ]


class Checkpointed(nn.Module):
    """A stage under torch's own checkpointing: like ``torchckpt.Pipe``, one region for each stage and micro-batch."""

    def __init__(self, stage: nn.Sequential) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.stage, x, use_reentrant=False)
