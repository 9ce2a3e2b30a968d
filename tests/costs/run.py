"""A real run on the CPU: what a stage keeps if some of its blocks are recomputed, and what that computes."""
from __future__ import annotations

from collections.abc import Collection
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from tests.settings import default_dtype
from torchckpt.costs.parts import repeated_children
from torchckpt.regions.core.checkpointing import checkpoint
from torchckpt.regions.core.scope import Scope
from torchckpt.regions.saved import bytes_of
from torchckpt.testing import flops

__all__ = ["DTYPES", "Real"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Some(Scope):
    """Regions by number: those of ``dropped`` are regions, others plain calls."""

    def __init__(self, dropped: Collection[int]) -> None:
        super().__init__()
        self.dropped = dropped
        self.count = 0

    def run(self, function, args, kwargs, options):
        self.keep = self.count not in self.dropped
        self.count += 1
        return super().run(function, args, kwargs, options)


class Real:
    """Stages that are run."""

    def __init__(self, build: Any, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        with default_dtype(dtype):
            self.stages, example, *loss = build()
        self.inputs = example if isinstance(example, tuple) else (example,)
        self.loss = loss[0] if loss else None
        self.dtype = dtype
        self.blocks = repeated_children(self.stages)

    def inputs_of(self, stage: int) -> tuple[Any, ...]:
        """What the stages before return."""
        inputs = self.inputs
        for place in range(stage):
            outputs = self._run(place, inputs, ())
            listed = outputs if isinstance(outputs, tuple) else (outputs,)
            inputs = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in listed)
        return inputs

    def saved_bytes(self, stage: int, dropped: Collection[int]) -> int:
        """Parameters and buffers do not count."""
        module, inputs, saved = self.stages[stage], self.inputs_of(stage), []
        with saved_tensors_hooks(lambda x: saved.append(x.detach()) or x.detach(), lambda x: x):
            outputs = self._run(stage, inputs, dropped)
        del outputs
        return bytes_of(saved, but=[*module.parameters(), *module.buffers()])

    def forward_flops(self, stage: int) -> int:
        inputs = self.inputs_of(stage)
        with flops() as counted:
            self._run(stage, inputs, ())
        return counted.total

    def backward_flops(self, stage: int, dropped: Collection[int] = ()) -> int:
        outputs = self._run(stage, self.inputs_of(stage), dropped)
        graded = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        with flops() as counted:
            torch.autograd.backward(graded, [torch.ones_like(leaf) for leaf in graded])
        return counted.total

    def _run(self, stage: int, inputs: tuple[Any, ...], dropped: Collection[int]) -> Any:
        with default_dtype(self.dtype), _Some(dropped).entered(), _as_regions(self.stages[stage], self.blocks):
            return self._called(stage, inputs)

    def _called(self, stage: int, inputs: tuple[Any, ...]) -> Any:
        outputs = self.stages[stage](*inputs)
        return self.loss(outputs) if self.loss is not None and stage == len(self.stages) - 1 else outputs


@contextmanager
def _as_regions(stage: nn.Module, blocks: Collection[nn.Module]):
    """Calls of ``blocks`` are regions."""
    changed = []
    for block in {module for module in stage.modules() if any(module is other for other in blocks)}:
        plain = block.forward
        block.forward = lambda *args, plain=plain, **kwargs: checkpoint(plain, *args, **kwargs)
        changed.append(block)
    try:
        yield
    finally:
        for block in changed:
            del block.forward
