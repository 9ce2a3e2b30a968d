"""One process, several devices: a pipeline in the autograd graph."""
from torchckpt.pipe.balance import Balance, balance_by_bytes, balance_by_time
from torchckpt.pipe.batchnorm import DeferredBatchNorm
from torchckpt.pipe.pipe import Pipe

__all__ = ["Balance", "DeferredBatchNorm", "Pipe", "balance_by_bytes", "balance_by_time"]
