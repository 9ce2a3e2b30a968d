"""Pipelines in one process: ``Pipe`` runs a Sequential on several devices, micro-batch by micro-batch.

    module            what users call: ``Pipe``
    balance           how many layers each stage gets
    run               one forward and backward
    partition, microbatch    layers into stages; a mini-batch into micro-batches
    skip, skip_search        tensors that pass over layers; the layer that an error names
    batchnorm                running statistics of the mini-batch
    in_place          layers that change the inputs of their stage
"""
from torchckpt.pipe.balance import Balance, balance_by_bytes, balance_by_time
from torchckpt.pipe.batchnorm import DeferredBatchNorm
from torchckpt.pipe.microbatch import NoChunk
from torchckpt.pipe.module import Pipe
from torchckpt.pipe.partition import WithDevice

__all__ = [
    "Balance",
    "DeferredBatchNorm",
    "NoChunk",
    "Pipe",
    "WithDevice",
    "balance_by_bytes",
    "balance_by_time",
]
