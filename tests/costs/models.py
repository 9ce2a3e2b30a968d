"""Models of two stages each, that differ in who keeps what; ``MODELS`` and ``DIFFERING`` by name."""
from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.plan_llama import Size, made
from torchckpt import checkpoint

WIDTH, ROWS = 8, 6


class Mlp(nn.Module):
    """Its last operation saves nothing that is not saved before."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Ends(nn.Module):
    """Saves its output, which is the next one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Shared(nn.Module):
    """All blocks are given one tensor that the stage makes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rand(ROWS, WIDTH, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, scale=scale)
        return x.sin()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.silu(self.inner(x)) * scale


class Norms(nn.Module):
    """Convolutions whose norms have buffers; in place where that is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self._layer() for _ in range(3)))
        self.pool = nn.AdaptiveAvgPool2d(1)

    def _layer(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pool(self.layers(x))


class Regions(nn.Module):
    """Its regions are functions, and one of them has two inputs, of which one comes from before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate = Mlp(), Mlp(0.2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.first, x)
        z = checkpoint(self._gated, y, skip=x)
        return checkpoint(self.second, z) * 2.0

    def _gated(self, y: Tensor, skip: Tensor) -> Tensor:
        return y * torch.sigmoid(self.gate(skip))


class Frozen(nn.Sequential):
    """The first two blocks are not trained, and so need no backward where no gradient comes from before."""

    def __init__(self) -> None:
        super().__init__(*(Mlp() for _ in range(4)))
        for block in (self[0], self[1]):
            block.requires_grad_(False)


class Tied(nn.Sequential):
    """One block is called twice."""

    def __init__(self) -> None:
        block = Mlp()
        super().__init__(block, Mlp(), block)


class Pair(nn.Module):
    """Returns two tensors, of which one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x) if mask is None else block(x) * mask
        return x, x > 0


class Differing(nn.Module):
    """Blocks of one class, of which the last three do something else than the first two, by ``how``: nothing of their
    arguments or attributes says so, or little."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.turn = how, SimpleNamespace(is_late=False)
        self.blocks = nn.ModuleList(_Switched(self.turn) for _ in range(5))
        for number, block in enumerate(self.blocks):
            if how == "hooks":
                end = torch.sigmoid if number >= 2 else torch.neg
                block.inner.register_forward_hook(lambda module, args, output, end=end: end(output))
            elif how == "a patched module" and number >= 2:
                block.inner.forward = torch.sigmoid

    def forward(self, x: Tensor) -> Tensor:
        x, scale = x * 1.0, torch.rand(ROWS, WIDTH, dtype=x.dtype)
        for number, block in enumerate(self.blocks):
            is_late = number >= 2
            self.turn.is_late = self.how == "an object" and is_late
            if self.how == "methods":
                x = checkpoint(block.gated if is_late else block, x)
            elif self.how == "aliases":
                x = block(x, x * 1.0 if is_late else x)
            elif self.how == "what is shared":
                x = block(x, scale + 1.0 if is_late else scale)
            else:
                with self._around(is_late):
                    x = block(x)
        return x.sin().to(scale.dtype)

    def _around(self, is_late: bool) -> AbstractContextManager[object]:
        if self.how == "autocast" and is_late:
            return torch.autocast("cpu", torch.bfloat16)
        return torch.set_grad_enabled(self.how != "no grad" or is_late)


class _Switched(nn.Module):
    def __init__(self, turn: SimpleNamespace) -> None:
        super().__init__()
        self.inner, self.gate, self.turn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), turn

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.inner(x)) * 2.0
        return self.gated(y) if self.turn.is_late else y if scale is None else y * scale

    def gated(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.sigmoid(self.gate(x)) * 2.0


_HOW = ("no grad", "autocast", "methods", "hooks", "a patched module", "an object", "aliases", "what is shared")


def vector() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def _of(stage, example=vector, loss=None):
    def build():
        parts = ([stage(), stage()], example())
        return parts if loss is None else (*parts, loss)

    return build


MODELS = {
    "llama": lambda: made(Size(4, 64, 8, 2, 96, 64, 16, 2, 2)),
    "llama with dropout": lambda: made(Size(4, 64, 8, 8, 96, 64, 16, 2, 2, dropout=0.1)),
    "mlp": _of(lambda: nn.Sequential(*(Mlp() for _ in range(3)))),
    "saves its output": _of(lambda: nn.Sequential(*(Ends() for _ in range(3))), loss=lambda y: y.square().sum()),
    "shared": _of(Shared),
    "norms": _of(Norms, lambda: torch.randn(2, 4, 5, 5)),
    "regions": _of(Regions),
    "frozen": _of(Frozen),
    "tied": _of(Tied),
    "pair": _of(Pair),
    "copies": _of(lambda: copy.deepcopy(nn.Sequential(*(copy.deepcopy(Mlp()) for _ in range(3))))),
    "attention": _of(
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True) for _ in range(2))),
        lambda: torch.randn(2, ROWS, WIDTH),
    ),
}
DIFFERING = {how: _of(partial(Differing, how)) for how in _HOW}
