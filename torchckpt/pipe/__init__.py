"""One process, several devices: a Sequential as a pipeline of micro-batches, in the autograd graph."""
from torchckpt.pipe.microbatch import NoChunk
from torchckpt.pipe.partition import WithDevice
from torchckpt.pipe.pipe import Pipe

__all__ = ["NoChunk", "Pipe", "WithDevice"]
