"""What do other ways to recompute leave of BatchNorm and dropout? Three layers of each kind, beside plain training.

    python benchmarks/peers/ways.py        # seconds; torch_remat is left out where it is not installed

A way that compiles draws the random numbers of the compiled graph, so its masks are not those of eager mode, whatever
is recomputed.
"""
from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.machine import machine
from benchmarks.peers.bits import WAYS, Left, Regions, differing, train

LAYERS = {"LayerNorm and dropout": nn.LayerNorm, "BatchNorm and dropout": nn.BatchNorm1d}
STEPS = 2
BUDGET = "torch.compile, activation_memory_budget 0"


class Net(nn.Module):
    """Each layer in a region, or in none."""

    def __init__(self, norm: type[nn.Module], makes_regions: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm(8), nn.Dropout(0.2)) for _ in range(3))
        self.makes_regions = makes_regions

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.makes_regions else layer(x)
        return x


def built(norm: type[nn.Module], makes_regions: bool, is_compiled: bool = False) -> tuple[nn.Module, Tensor]:
    model: Any = Net(norm, makes_regions)
    if is_compiled:
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager_decomp_partition")
    return model, torch.randn(16, 8)


@contextmanager
def _switch(_: nn.Module, function: Regions) -> Iterator[None]:
    with mock.patch.object(torch.utils.checkpoint, "checkpoint", lambda *args, **named: function(*args, **named)):
        yield


def ways() -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "torch.utils.checkpoint", WAYS["torch.utils.checkpoint"]
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    yield "the same, selective", partial(checkpoint, context_fn=contexts)
    if importlib.util.find_spec("torch_remat"):
        yield "torch_remat", _remat
        yield "torch_remat, with a hook for random numbers", partial(_remat, hooks=(_RandomState(),))
    yield "torchckpt", WAYS["torchckpt"]


def _keep_products(context: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _remat(function: Callable[..., Any], *args: Any, use_reentrant: bool, hooks: tuple[Any, ...] = ()) -> Any:
    import torch_remat

    return torch_remat.checkpoint(region_name="layer", recompute_state_hooks=hooks)(function)(*args)


class _RandomState:
    """What torch_remat asks its users to write."""

    def snapshot(self) -> Tensor:
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        torch.set_rng_state(state)


class Found(NamedTuple):
    """What differs from plain training, and how often each BatchNorm has counted a batch."""

    differs: list[str]
    counted: set[int]


def found(norm: type[nn.Module]) -> dict[str, Found]:
    """Of each way, after ``STEPS``."""
    plain = train(partial(built, norm, False), None, STEPS)
    made = {name: train(partial(built, norm, True), way, STEPS, _switch) for name, way in ways()}
    with mock.patch("torch._functorch.config.activation_memory_budget", 0.0):
        made[BUDGET] = train(partial(built, norm, False, is_compiled=True), None, STEPS)
    return {name: Found(differing(plain, left), _counted(left)) for name, left in made.items()}


def _counted(left: Left) -> set[int]:
    """Of the buffers of BatchNorm, ``num_batches_tracked`` alone is an integer."""
    return {int(buffer) for buffer in left.values["buffers"] if buffer is not None and not buffer.is_floating_point()}


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{', '.join(machine().values())}; differs from plain training in:\n")
    columns = [found(norm) for norm in LAYERS.values()]
    print(f"| | {' | '.join(LAYERS)} | updates of BatchNorm a step |\n|---|{'---|' * len(LAYERS)}---|")
    for name in columns[0]:
        (counted,) = columns[-1][name].counted
        cells = [", ".join(column[name].differs) or "=" for column in columns]
        print(f"| {name} | {' | '.join(cells)} | {counted // STEPS} |")


if __name__ == "__main__":
    main()
