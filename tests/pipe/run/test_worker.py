"""Workers: threads that raise what their stages raise, carry the caller's state, and leave nothing behind."""
from __future__ import annotations

import os
import signal
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import torchckpt
from tests.pipe.skips import Pop, Stash
from tests.pipe.stages import run as run_stages
from tests.pipe.stages import stages_of
from tests.settings import default_dtype, without_collector
from torchckpt.pipe.run.worker import in_caller, keep_workers, workers
from torchckpt.regions import flags, private
from torchckpt.regions.core.scope import Scope


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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
    before = set(threading.enumerate())
    with pytest.raises(kind) as raised:
        run([nn.Linear(2, 2), Calls(raises(kind("why")))], torch.ones(4, 2), threads)
    assert "where_it_is_raised" in "".join(traceback.format_tb(raised.value.__traceback__))
    assert set(threading.enumerate()) <= before  # one of a test before may have ended


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


VARIABLE: ContextVar[str] = ContextVar("variable", default="none")


@contextmanager
def variable(value: str) -> Iterator[None]:
    token = VARIABLE.set(value)
    try:
        yield
    finally:
        VARIABLE.reset(token)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("mode", "asked"),
    [
        (torch.no_grad, torch.is_grad_enabled),
        (torch.inference_mode, torch.is_inference_mode_enabled),
        (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
        (lambda: torch.autocast("cpu", torch.float16), lambda: torch.get_autocast_dtype("cpu")),
        (lambda: torch.autocast("cpu", cache_enabled=False), torch.is_autocast_cache_enabled),
        (lambda: torch.device("meta"), torch.get_default_device),
        (lambda: default_dtype(torch.float64), torch.get_default_dtype),
        (lambda: variable("set"), VARIABLE.get),
        (deterministic, torch.are_deterministic_algorithms_enabled),
        (deterministic, torch.is_deterministic_algorithms_warn_only_enabled),
        (lambda: FlopCounterMode(display=False), private.dispatch_modes_are_active),
        (lambda: Nothing(), lambda: len(private.function_modes())),
        (Scope().entered, lambda: flags.local.thread.scope),
        (lambda: saved_tensors_hooks(lambda x: x, lambda x: x), lambda: private.hooks_in_force(False) is not None),
        (torch.autograd.profiler.profile, private.profiler_is_on),
    ],
)
def test_each_thing_that_holds_in_the_caller_holds_in_every_stage(mode: Any, asked: Any) -> None:
    before, seen, x = asked(), [], torch.ones(2, 2)

    class Asks(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(asked())
            return x

    with mode():
        here = asked()
        run_stages(stages_of([Asks(), Asks()]), x, 1, 0, 1, threads=True)
    run_stages(stages_of([Asks(), Asks()]), x, 1, 0, 1, threads=True)
    assert here != before
    assert seen[:2] == [here, here]
    assert seen[2:] == [before, before]


def test_the_profiler_sees_every_stage() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run([nn.Linear(2, 2), nn.Linear(2, 2)], torch.ones(4, 2), threads=True)
    seen = [event.name for event in profile.events() if event.name.startswith("torchckpt::")]
    assert sorted(seen) == [f"torchckpt::forward[stage={j},mb={i}]" for j in range(2) for i in range(2)]


def test_flops_of_every_stage_are_counted() -> None:
    counted = []
    for threads in (False, True):
        with torchckpt.testing.flops() as flops:
            run([nn.Linear(2, 2), nn.Linear(2, 2)], torch.ones(4, 2), threads).sum().backward()
        counted.append(flops.total)
    assert counted[0] == counted[1] > 0


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


def test_save_on_cpu_gets_the_boundaries_back() -> None:
    layers, x = [nn.Linear(3, 3), nn.Linear(3, 3)], torch.randn(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(run(layers, x, threads=False).sum(), x)
    with torch.autograd.graph.save_on_cpu():
        output = run(layers, x, threads=True)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


@pytest.mark.parametrize("threads", [False, True], ids=["caller", "threads"])
def test_after_an_exception_nothing_of_the_mini_batch_is_alive(threads: bool) -> None:
    freed: list[int] = []

    class Fails(nn.Linear):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            weakref.finalize(x.untyped_storage(), freed.append, self.count)
            self.count += 1
            if self.count == 3:
                raise ValueError("why")
            return super().forward(x)

    with without_collector():
        with pytest.raises(ValueError, match="why") as raised:
            run([nn.Linear(2, 2), Stash(), Fails(2, 2), Pop()], torch.ones(4, 2), threads, chunks=4)
        del raised
        assert sorted(freed) == [0, 1, 2]


def test_the_exception_of_a_worker_holds_nothing_in_a_cycle() -> None:
    freed: list[Any] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            local = x + 1
            weakref.finalize(local, freed.append, "local")
            raise ValueError("why")

    with without_collector():
        with pytest.raises(ValueError, match="why") as raised:
            run([Fails()], torch.ones(2, 2), threads=True, chunks=1)
        del raised
        assert freed == ["local"]


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


def threads_of(count: int, *outputs: Tensor) -> set[threading.Thread]:
    """The workers of a forward that has made ``outputs``."""
    found: set[threading.Thread] = set()
    with workers(count) as start:
        start([(stage, lambda: found.add(threading.current_thread())) for stage in range(count)])
        keep_workers(outputs)
    return found


def test_workers_end_with_their_block() -> None:
    found = threads_of(3)
    assert [worker.name for worker in found] != []
    assert not any(worker.is_alive() for worker in found)


def test_workers_are_those_of_a_forward_whose_graph_is_there() -> None:
    x = torch.ones(2, requires_grad=True)
    output = x.sin()
    first = threads_of(2, output, x)
    second = threads_of(3)
    assert [len(first), len(second)] == [2, 3]
    assert first < second
    assert all(worker.is_alive() for worker in first)
    other: list[set[threading.Thread]] = []
    thread = threading.Thread(target=lambda: other.append(threads_of(2)))
    thread.start()
    thread.join(60)
    assert not second & other[0]
    del output
    for worker in second:
        worker.join(60)
    assert not any(worker.is_alive() for worker in second)
    assert not threads_of(2) & second


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own() -> None:
    output = torch.ones(2, requires_grad=True).sin()
    threads_of(2, output)
    child = os.fork()
    if not child:  # a thread that is not there would run no task
        signal.alarm(60)
        os._exit(len(threads_of(2)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_task_is_gone_when_its_caller_goes_on() -> None:
    def use(x: Tensor) -> None:
        x.sin()

    for _ in range(100):
        x = torch.ones(2)
        alive = weakref.ref(x)
        with workers(1) as start:
            start([(0, partial(use, x))])
            del x
            assert alive() is None
