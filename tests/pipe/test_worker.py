"""Workers: threads that raise what their stages raise, carry the caller's state, and leave nothing behind."""
from __future__ import annotations

import gc
import threading
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import torchckpt
from tests.pipe.stages import run as run_stages
from tests.pipe.stages import stages_of
from torchckpt.pipe.worker import in_caller, workers


def run(layers: list[nn.Module], x: Tensor, threads: bool, chunks: int = 2) -> Any:
    return run_stages(stages_of(layers), x, chunks, chunks, 1, threads)


class Calls(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(2, 2), call

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return self.linear(x)


def raises(exception: BaseException) -> Any:
    def where_it_is_raised() -> None:
        raise exception

    return where_it_is_raised


@pytest.mark.parametrize("threads", [False, True], ids=["caller", "threads"])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_any_exception_reaches_the_caller_with_its_traceback_and_leaves_no_thread(
    kind: type[BaseException], threads: bool
) -> None:
    before = threading.active_count()
    with pytest.raises(kind) as raised:
        run([nn.Linear(2, 2), Calls(raises(kind("why")))], torch.ones(4, 2), threads)
    assert "where_it_is_raised" in "".join(traceback.format_tb(raised.value.__traceback__))
    assert threading.active_count() == before


def test_the_first_stage_to_fail_wins_and_the_others_stop_after_their_task() -> None:
    calls: list[str] = []

    def fails() -> None:
        calls.append("second")
        raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        run([Calls(lambda: calls.append("first")), Calls(fails)], torch.ones(8, 2), threads=True, chunks=8)
    assert sorted(calls) == ["first", "first", "second"]  # the two tasks of the second tick, and the first


def test_the_next_call_works_after_a_failure() -> None:
    fail = [True]
    layer = Calls(lambda: raises(RuntimeError("once"))() if fail.pop(0) else fail.append(False))
    with pytest.raises(RuntimeError, match="once"):
        run([layer], torch.ones(2, 2), threads=True, chunks=1)
    fail.append(False)
    assert run([layer], torch.ones(2, 2), threads=True, chunks=1).shape == (2, 2)


def test_what_holds_in_the_caller_holds_in_every_worker() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_default_device().type,
                torchckpt.is_checkpointing(),
            )
        )

    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert run([Calls(look), Calls(look)], x, threads=True, chunks=1).dtype == torch.bfloat16
    with torch.no_grad(), torch.device("meta"):
        run([Calls(look).to_empty(device="meta")], torch.ones(2, 2), threads=True, chunks=1)
    assert seen == [
        (True, True, torch.bfloat16, "cpu", True),
        (True, True, torch.bfloat16, "cpu", True),
        (False, False, torch.bfloat16, "meta", False),
    ]


def test_hooks_around_the_call_see_the_boundaries_of_the_workers() -> None:
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run([nn.Linear(2, 3), nn.Linear(3, 4)], torch.ones(5, 2), threads=True, chunks=1)
    assert sorted(packed) == [(5, 2), (5, 3)]


@pytest.mark.parametrize("call", [torchckpt.checkpoint, lambda function, x: function(x)], ids=["in a region", "plain"])
def test_a_pipeline_with_threads_inside_a_region_is_the_pipeline(call: Any) -> None:
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)]
    x = torch.randn(6, 3, requires_grad=True)

    def gradient(call: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.autograd.grad(call(lambda x: run(layers, x, True, 3), x).square().sum(), x)[0]

    assert torch.equal(gradient(call), gradient(lambda function, x: run(layers, x, False, 3)))


def test_the_exception_of_a_worker_holds_nothing_in_a_cycle() -> None:
    freed: list[Any] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            local = x + 1
            weakref.finalize(local, freed.append, "local")
            raise ValueError("why")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="why") as raised:
            run([Fails()], torch.ones(2, 2), threads=True, chunks=1)
        del raised
        assert freed == ["local"]
    finally:
        gc.enable()


def test_gradients_are_those_of_the_caller_s_thread() -> None:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]
    x = torch.randn(6, 3)
    grads = []
    for threads in (False, True):
        run(layers, x, threads, chunks=3).square().sum().backward()
        grads.append([parameter.grad for layer in layers for parameter in layer.parameters()])
        for layer in layers:
            layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads))  # type: ignore[arg-type]


def test_two_threads_use_one_pipe_at_once() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = torchckpt.Pipe(plain, [1, 2], chunks=3)
    wrong: list[int] = []

    def use(number: int) -> None:
        x = torch.full((6, 4), float(number), requires_grad=True)
        expected = torch.cat([plain(part) for part in x.tensor_split(3)])
        for _ in range(20):
            output = pipe(x)
            (grad,) = torch.autograd.grad(output.sum(), x)
            (direct,) = torch.autograd.grad(expected.sum(), x, retain_graph=True)
            if not (torch.equal(output, expected) and torch.equal(grad, direct)):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_tasks_in_the_caller_run_in_order() -> None:
    order: list[int] = []
    in_caller([(stage, lambda stage=stage: order.append(stage)) for stage in (2, 0, 1)])  # type: ignore[misc]
    assert order == [2, 0, 1]


def test_workers_end_with_their_block() -> None:
    before = threading.active_count()
    with workers(3) as start:
        names: list[str] = []
        start([(stage, lambda: names.append(threading.current_thread().name)) for stage in range(3)])
        assert sorted(names) == [f"torchckpt worker {stage}_0" for stage in range(3)]
    assert threading.active_count() == before
