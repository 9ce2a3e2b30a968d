"""One process, several devices: a pipeline in the autograd graph."""
from torchckpt.pipe.batchnorm import DeferredBatchNorm
from torchckpt.pipe.pipe import Pipe

__all__ = ["DeferredBatchNorm", "Pipe"]
