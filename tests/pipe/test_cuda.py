"""The pipeline on real streams: two stages, on one GPU or on two. CUDA events say what ran when."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from torchckpt.pipe import links

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DELAY_CYCLES = 100_000_000  # about 50 ms, against well under 1 ms for a stage


def devices() -> list[str]:
    return ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cuda:0", "cuda:0"]


def mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Timed(nn.Module):
    """A layer that records CUDA events around itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
        self.replays: list[tuple[Any, Any]] = []
        self.backwards: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        begin = mark()
        y: Tensor = self.layers(x)
        # Not the end of the layer, which an early stop would skip, but of all that its replay runs.
        if torchckpt.is_recomputing():
            self.replays.append((begin, mark()))
        elif y.requires_grad:
            y.register_hook(lambda grad: self.backwards.append(mark()))
        return y.sin()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Delays every copy of a backward, on the stream that it runs on, and says from when to when."""
    delays: list[tuple[Any, Any]] = []
    transfer = links._transfer

    def delayed(tensor: Tensor, device: torch.device) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            begin = mark()
            torch.cuda._sleep(DELAY_CYCLES)
            delays.append((begin, mark()))
        return transfer(tensor, device)

    monkeypatch.setattr(links, "_transfer", delayed)
    return delays


@pytest.mark.parametrize("chunks", [1])
def test_the_replay_runs_while_the_copy_of_its_gradient_is_delayed(chunks: int, delays: list[tuple[Any, Any]]) -> None:
    stages = [Timed(), Timed()]
    pipe = torchckpt.Pipe(nn.Sequential(*stages), [1, 1], devices=devices(), chunks=chunks, checkpoint="always")
    x = torch.randn(64 * chunks, 256, device="cuda:0")
    pipe(x).sum().backward()  # warms up
    for record in (delays, stages[0].replays, stages[0].backwards):
        record.clear()
    loss = pipe(x).sum()
    torch.cuda.synchronize()
    loss.backward()
    torch.cuda.synchronize()
    assert len(delays) == len(stages[0].replays) == len(stages[0].backwards) == chunks
    for (delay_begin, delay_end), (_, replay_end), backward in zip(delays, stages[0].replays, stages[0].backwards):
        assert delay_begin.elapsed_time(replay_end) < delay_begin.elapsed_time(delay_end)  # done before the copy began
        assert delay_end.elapsed_time(backward) > 0  # and the backward waited for the copy


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_recomputing_changes_no_bit_with_dropout_on_the_gpu(checkpoint: Any, lookahead: int) -> None:
    def run(mode: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        module = nn.Sequential(Timed(), Timed())
        pipe = torchckpt.Pipe(module, [1, 1], devices(), 4, mode, lookahead)
        x = torch.randn(64, 256, device="cuda:0")
        pipe(x).square().mean().backward()
        return [parameter.grad for parameter in module.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(checkpoint), run("never")))  # type: ignore[arg-type]


def test_the_input_may_be_on_the_cpu_and_the_output_is_on_the_last_device() -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices(), chunks=2)
    x = torch.randn(4, 4, requires_grad=True)
    y = pipe(x)
    y.sum().backward()
    assert y.device == torch.device(devices()[1])
    assert x.grad is not None
    assert x.grad.device.type == "cpu"


def test_the_peak_is_lower_than_without_recomputing() -> None:
    def peak(mode: Any) -> int:
        module = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16)))
        pipe = torchckpt.Pipe(module, [8, 8], devices(), 8, mode)
        x = torch.randn(8192, 512, device="cuda:0")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pipe(x).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak("always") < peak("never") / 2
