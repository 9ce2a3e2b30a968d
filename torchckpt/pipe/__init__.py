"""Pipelines in one process: ``Pipe`` runs a Sequential on several devices, micro-batch by micro-batch.

    module            what users call: ``Pipe``
    balance           how many layers each stage gets
    budget            what is recomputed within so many bytes
    run               one forward and backward
    partition, microbatch    layers into stages; a mini-batch into micro-batches
    skip              tensors that pass over layers
    batchnorm         running statistics of the mini-batch
"""
from torchckpt.pipe.balance import Balance, balance_by_bytes, balance_by_time
from torchckpt.pipe.batchnorm import DeferredBatchNorm
from torchckpt.pipe.microbatch import NoChunk
from torchckpt.pipe.module import Pipe
from torchckpt.pipe.partition import WithDevice

__all__ = ["Balance", "DeferredBatchNorm", "NoChunk", "Pipe", "WithDevice", "balance_by_bytes", "balance_by_time"]
