"""Link: stages whose messages arrive a set time after they are sent.

The sender writes when its message will arrive into a table that all processes share, as they share the clock; the
receiver waits for the message itself, and then until that time. It does so in the ``wait()`` of the receive, right
before the computation that needs it: there the runtime would wait for a slow link.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from benchmarks.pipeline.sleeping.block import sleep_until

__all__ = ["BACK", "FORTH", "LinkedStage", "Wire", "new_table"]

FORTH, BACK = 0, 1
"""The directions: of activations, of gradients."""
_SENT, _ARRIVES = 0, 1


def new_table(stages: int, micro_batches: int) -> Tensor:
    """By direction, receiving stage and micro-batch: the times at which the message is sent and arrives."""
    return torch.zeros(2, stages, micro_batches, 2, dtype=torch.float64).share_memory_()


class Wire:
    """Both directions of the links of one process: each carries one message at a time, for ``seconds``."""

    def __init__(self, table: Tensor, seconds: float) -> None:
        self._table, self._seconds = table, seconds
        self._free = [0.0, 0.0]

    def send(self, direction: int, to_stage: int, micro_batch: int) -> None:
        now = time.perf_counter()
        self._free[direction] = arrives = max(now, self._free[direction]) + self._seconds
        entry = self._table[direction, to_stage, micro_batch]
        entry[_SENT], entry[_ARRIVES] = now, arrives

    def sent(self, direction: int, to_stage: int, micro_batch: int) -> float:
        return float(self._table[direction, to_stage, micro_batch, _SENT])

    def arrives(self, direction: int, to_stage: int, micro_batch: int) -> float:
        return float(self._table[direction, to_stage, micro_batch, _ARRIVES])


class LinkedStage(PipelineStage):
    """torch's stage with messages over a :class:`Wire`. Data, order and number of messages stay torch's."""

    def __init__(self, module: nn.Module, index: int, stages: int, wire: Wire) -> None:
        super().__init__(module, index, stages, torch.device("cpu"))
        self.wire = wire

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if ops:
            self.wire.send(FORTH, self.stage_index + 1, fwd_chunk_id)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if ops:
            self.wire.send(BACK, self.stage_index - 1, bwd_chunk_id)
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._delayed(super().get_fwd_recv_ops(fwd_chunk_id), FORTH, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._delayed(super().get_bwd_recv_ops(bwd_chunk_id), BACK, bwd_chunk_id)

    def _delayed(self, ops: list[dist.P2POp], direction: int, micro_batch: int) -> list[dist.P2POp]:
        arrives = partial(self.wire.arrives, direction, self.stage_index, micro_batch)
        for op in ops:
            op.op = partial(_receive, arrives)  # P2POp's constructor takes only torch's own functions
        return ops


def _receive(arrives: Callable[[], float], *args: Any, **kwargs: Any) -> _Delivery:
    return _Delivery(dist.irecv(*args, **kwargs), arrives)


class _Delivery:
    """A substitute for the result of ``irecv``, with the methods that the runtime uses."""

    def __init__(self, work: Any, arrives: Callable[[], float]) -> None:
        self._work, self._arrives = work, arrives

    def wait(self) -> None:
        self._work.wait()
        sleep_until(self._arrives())
