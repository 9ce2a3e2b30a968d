"""Twin: a small pipeline with the published design of torchgpipe (Kim et al., 2020), for comparison with ours.

Written from the paper, and only as much as is measured. Per micro-batch i and stage j:

    x ─► Checkpoint(i, j) ─► fork ─────────► join ─► Wait ─► Copy ─► Wait ─► stage j + 1
                              └─► Recompute ──┘
    micro-batch i - 1 ─► fork ─ ─ phony ─ ─► join ─► micro-batch i

``Checkpoint`` runs the stage without gradients, and in its backward a backward of its own through what ``Recompute``
has made. A thread per device runs the stages, its tasks and results going through queues; it lives as long as the twin.
Left out, in favour of the twin: skips, inputs of several tensors, checks of what the stages return.
"""
from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

__all__ = ["Region", "Twin", "Worker", "fork", "join"]


class Twin:
    """Called with a mini-batch, it returns what the Sequential would."""

    def __init__(self, module: nn.Sequential, balance: Sequence[int], chunks: int, checkpoint: str) -> None:
        layers = iter(module)
        self._stages = [nn.Sequential(*(next(layers) for _ in range(count))) for count in balance]
        self._chunks = chunks
        self._regions = {"always": chunks, "except_last": chunks - 1, "never": 0}[checkpoint]
        self._worker = Worker()  # one, for all stages are on one device

    def __call__(self, x: Tensor) -> Tensor:
        batches = list(x.chunk(self._chunks))
        for tick in _clock(len(batches), len(self._stages)):
            self._fence(batches, tick)
            self._compute(batches, tick)
        return torch.cat(batches)

    def close(self) -> None:
        self._worker.close()

    def _fence(self, batches: list[Tensor], tick: Sequence[tuple[int, int]]) -> None:
        for i, j in tick:
            if i > 0 and batches[i - 1].requires_grad:
                batches[i - 1], phony = fork(batches[i - 1])
                batches[i] = join(batches[i], phony)
            if j > 0:
                batches[i] = _Copy.apply(batches[i])

    def _compute(self, batches: list[Tensor], tick: Sequence[tuple[int, int]]) -> None:
        last = len(self._stages) - 1
        regions: dict[int, Region] = {}
        for i, j in tick:
            x = _Wait.apply(batches[i]) if j > 0 else batches[i]
            if i < self._regions:
                region = regions[i] = Region(self._stages[j], x)
                self._worker.start(region.checkpoint)
            else:
                self._worker.start(functools.partial(self._stages[j], x))
        for i, j in tick:
            output = self._worker.result()
            output = regions[i].recompute(output) if i in regions else output
            batches[i] = _Wait.apply(output) if j < last else output


class Worker:
    """A thread, with one queue for tasks and one for results."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[tuple[Callable[[], Tensor], bool] | None] = queue.Queue()
        self._results: queue.Queue[Tensor | BaseException] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, task: Callable[[], Tensor]) -> None:
        self._tasks.put((task, torch.is_grad_enabled()))

    def result(self) -> Tensor:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self._tasks.put(None)

    def _run(self) -> None:
        while (given := self._tasks.get()) is not None:
            task, graded = given
            try:
                with torch.set_grad_enabled(graded):
                    self._results.put(task())
            except BaseException as error:
                self._results.put(error)


class Region:
    """One stage on one micro-batch: the function, its input, and the results of its recomputation."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function, self.x, self.device = function, x, x.device
        self.random: Tensor | None = None
        self.recomputed: list[tuple[Tensor, Tensor]] = []  # outputs with their graphs, and the leaves of those

    def checkpoint(self) -> Tensor:
        output: Tensor = Checkpoint.apply(phony(self.device), self, self.x)
        return output

    def recompute(self, output: Tensor, stream: AbstractContextManager[None] = nullcontext()) -> Tensor:  # noqa: B008
        """``stream``: where the replay will run."""
        output, edge = fork(output)
        with stream:
            edge = Recompute.apply(edge, self, self.x)
        return join(output, edge)


class Checkpoint(Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor, region: Region, x: Tensor) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(x)
        region.random = torch.get_rng_state()
        with torch.no_grad():
            return region.function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None]:
        output, leaf = ctx.region.recomputed.pop()
        torch.autograd.backward(output, grad)
        return None, None, leaf.grad


class Recompute(Function):
    @staticmethod
    def forward(ctx: Any, phony: Tensor, region: Region, x: Tensor) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(x)
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None]:
        region, (x,) = ctx.region, ctx.saved_tensors
        leaf = x.detach().requires_grad_(x.requires_grad)
        now = torch.get_rng_state()
        torch.set_rng_state(region.random)
        with torch.enable_grad():
            region.recomputed.append((region.function(leaf), leaf))
        torch.set_rng_state(now)
        return None, None, None


class Fork(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach(), phony(x.device).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad


class Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, phony: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Identity(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# On a device without streams, these nodes wait for nothing and copy nothing, but they are in the graph.
_Wait = _Copy = _Identity


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    output, phony = Fork.apply(x)
    return output, phony


def join(x: Tensor, phony: Tensor) -> Tensor:
    output: Tensor = Join.apply(x, phony)
    return output


@functools.cache
def phony(device: torch.device) -> Tensor:
    return torch.empty(0, device=device, requires_grad=True)


def _clock(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    for tick in range(m + n - 1):
        yield [(tick - j, j) for j in range(max(0, tick - m + 1), min(n, tick + 1))]
