"""Chains, perceptrons, recurrence: models whose graph one can draw."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.case import Parts, case, classify

__all__ = ["NestedOutputs", "TanhChain", "Unrolled", "lstm", "mlp", "nested_outputs", "sparse_embedding", "tanh_chain"]


@case("mlp24", layers=24)
def mlp(layers: int, width: int = 8, batch: int = 4) -> Parts:
    """Linear and ReLU, by turns."""
    model = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())))
    return model, lambda: (torch.randn(batch, width),), classify


class TanhChain(nn.Module):
    """``nodes`` tensors, the input among them: each the tanh of the one before, or of the sum of the two before."""

    def __init__(self, nodes: int, residual: bool) -> None:
        super().__init__()
        self.nodes, self.residual = nodes, residual

    def forward(self, node: Tensor) -> Tensor:
        before = None
        for _ in range(self.nodes - 1):
            reads = node if before is None else node + before
            before, node = node if self.residual else None, reads.tanh()
        return node


@case("tanh_chain")
@case("tanh_chain_residual", residual=True)
def tanh_chain(nodes: int = 5, residual: bool = False, elements: int = 250_000) -> Parts:
    """No parameters; the input requires grad. The default is the 1 MB (10**6 bytes) of TensorFlow's test chains."""
    return TanhChain(nodes, residual), lambda: (torch.randn(elements, requires_grad=True),), torch.sum


class Unrolled(nn.Module):
    """An LSTM cell over a sequence, by a Python loop; logits of its last state."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        state = None
        for step in sequence.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


@case("lstm50", steps=50)
def lstm(steps: int, width: int = 8, batch: int = 4, classes: int = 5) -> Parts:
    return Unrolled(width, classes), lambda: (torch.randn(batch, steps, width),), classify


class NestedOutputs(nn.Module):
    """A tuple of tensors and dicts: one is integer, one is not read by the loss, one is a view of another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head, self.spare = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        best = {"class": logits.argmax(-1), "value": logits.amax(-1)}
        return hidden, {"logits": logits, "first": logits[:, :1], "best": best, "unused": self.spare(hidden).exp()}

    @staticmethod
    def loss(outputs: tuple[Tensor, dict[str, Any]]) -> Tensor:
        hidden, read = outputs
        return classify(read["logits"]) + hidden.square().mean() + (read["best"]["value"] * read["first"][:, 0]).sum()


@case("nested_outputs")
def nested_outputs(width: int = 6, batch: int = 4) -> Parts:
    return NestedOutputs(width), lambda: (torch.randn(batch, width, requires_grad=True),), NestedOutputs.loss


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@case("sparse_embedding")
def sparse_embedding(words: int = 50, width: int = 8, length: int = 5, batch: int = 4) -> Parts:
    """The gradient of the table is a sparse tensor, with words that occur twice."""
    table = nn.Embedding(words, width, sparse=True)
    model = nn.Sequential(table, Mean(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return model, lambda: (torch.randint(words, (batch, length)),), classify
