"""``Pipe``: a Sequential, cut into stages, that runs a mini-batch as a pipeline of micro-batches."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import nn

from torchckpt.errors import Fault, raise_faults
from torchckpt.kernel.ambient import accelerator_type
from torchckpt.kernel.checkpointing import outside, refuse_transforms
from torchckpt.pipe.microbatch import Batch, gather, scatter
from torchckpt.pipe.partition import (
    Stage,
    balance_faults,
    device_faults,
    even_balance,
    indexed,
    partition,
    placement_faults,
)
from torchckpt.pipe.pipeline import run_pipeline
from torchckpt.typing import CheckpointMode

__all__ = ["Pipe"]

_MODES: tuple[str, ...] = get_args(CheckpointMode)


class Pipe(nn.Module):
    """Runs ``module`` in stages, micro-batch by micro-batch, and recomputes activations before their gradient arrives.

    The forward returns what the module would return, and ``loss.backward()`` works as ever: the pipeline lives in the
    autograd graph. Parameters, their names and ``state_dict`` keys are those of the module, which is used, not copied.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> pipe = torchckpt.Pipe(model, balance=[2, 1], chunks=4)
    >>> loss = pipe(torch.randn(16, 8)).sum()
    >>> loss.backward()

    Args:
        module: an ``nn.Sequential``, whose layers take and return a tensor or a tuple of tensors.
        balance: layers per stage. Without it, as many stages as ``devices``, of layers as even in number as can be; or
            one stage.
        devices: the device of each stage, to which its layers are moved. Without it, a stage is where its parameters
            are, and one without parameters where the stage before it is.
        chunks: micro-batches per mini-batch. A mini-batch with fewer rows makes as many as it has rows.
        checkpoint: which micro-batches run as regions: ``"always"`` all; ``"except_last"`` all but the last, whose
            activations would be needed at once; ``"never"`` none.
        lookahead: how many micro-batches of a stage may be recomputed and alive. With 1 each is recomputed as soon as
            the one before it is done, while its gradient is on its way; more hide more only where stages are uneven.

    Raises:
        ArgumentError: a wrong call, all its faults in one message; or, at the forward, a wrong mini-batch.

    The pipeline is GPipe's (Huang et al., 2019), in the autograd graph as in torchgpipe (Kim et al., 2020).
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        devices: Sequence[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        lookahead: int = 1,
    ) -> None:
        super().__init__()
        raise_faults("Pipe", _faults(module, balance, devices, chunks, checkpoint, lookahead))
        self._modules.update(module._modules)  # the very layers, under their names
        self.training = module.training
        self.chunks, self.checkpoint, self.lookahead = chunks, checkpoint, lookahead
        self.balance = list(balance) if balance else even_balance(len(module), len(devices) if devices else 1)
        self.devices = [indexed(torch.device(device)) for device in devices] if devices else None
        stages = self._stages()
        if self.devices:
            for stage in stages:
                for layer in stage.layers:
                    layer.to(stage.device)
        raise_faults("Pipe", placement_faults(stages))

    def _stages(self) -> list[Stage]:
        layers = [layer for layer in self._modules.values() if layer is not None]
        return partition(layers, self.balance, self.devices or [None] * len(self.balance))

    def forward(self, input: Batch) -> Batch:
        """Run a mini-batch: a tensor, or a tuple of tensors, each with the rows along dimension 0.

        Returns:
            What the module would return for it, on the device of the last stage; a plain tuple for a tuple of any kind.
            Layers that look across rows, such as BatchNorm, see one micro-batch at a time. Random numbers that stages
            on different accelerators draw from the CPU's generator come in no fixed order.
        """
        if torch.compiler.is_dynamo_compiling():
            return outside(self.forward, input)  # type: ignore[no-any-return]  # a forward returns a Batch
        if torch.is_grad_enabled():
            refuse_transforms()
        micro_batches = scatter(input, self.chunks)
        m = len(micro_batches)
        checkpointed = {"always": m, "except_last": m - 1, "never": 0}[self.checkpoint]
        stages = self._stages()
        threads = any(stage.device.type == accelerator_type() for stage in stages)
        return gather(run_pipeline(stages, micro_batches, checkpointed, self.lookahead, threads))


def _faults(module: Any, balance: Any, devices: Any, chunks: Any, checkpoint: Any, lookahead: Any) -> list[Fault]:
    faults = []
    layers = len(module) if isinstance(module, nn.Sequential) else 0
    if not layers:
        received = "an empty Sequential" if isinstance(module, nn.Sequential) else type(module).__name__
        rule = "the module must be an nn.Sequential of at least one layer"
        faults.append(Fault(rule, received, "Pipe(nn.Sequential(embedding, *blocks, head), balance=[4, 4])"))
    if balance is not None and layers:
        faults += balance_faults(balance, layers)
    if devices is not None:
        stages = len(balance) if isinstance(balance, Sequence) else None
        faults += device_faults(devices, stages, layers)
    for name, value in (("chunks", chunks), ("lookahead", lookahead)):
        if type(value) is not int or value < 1:
            works = f"{name}={8 if name == 'chunks' else 1}"
            faults.append(Fault(f"{name} must be a positive int", f"{name}={value!r}", works))
    if checkpoint not in _MODES:
        received = f"checkpoint={checkpoint!r}"
        faults.append(Fault(f"checkpoint must be one of {_MODES}", received, 'checkpoint="except_last"'))
    return faults
