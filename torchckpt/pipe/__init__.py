"""One process, several devices: a Sequential as a pipeline of micro-batches, in the autograd graph."""
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
