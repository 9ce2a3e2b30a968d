"""Pipelines in one process: ``Pipe`` runs a Sequential on several devices, micro-batch by micro-batch."""
from torchckpt.pipe.balance import Balance, balance_by_bytes, balance_by_time
from torchckpt.pipe.batchnorm import DeferredBatchNorm
from torchckpt.pipe.microbatch import NoChunk
from torchckpt.pipe.partition import WithDevice
from torchckpt.pipe.pipe import Pipe

__all__ = [
    "Balance",
    "DeferredBatchNorm",
    "NoChunk",
    "Pipe",
    "WithDevice",
    "balance_by_bytes",
    "balance_by_time",
]
