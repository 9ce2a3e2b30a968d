"""The pipeline on streams that run beside each other: on one accelerator or on two. Events say what ran when."""
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.accelerator import TYPE, module_of
from tests.pipe.skips import Pop, Stash
from tests.pipe.stages import gradients
from tests.slow import few
from torchckpt.pipe import NoChunk, Pipe, WithDevice
from torchckpt.pipe.run import links
from torchckpt.planning import Kind

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]

FIRST = f"{TYPE}:0"
DELAY_CYCLES = 100_000_000  # about 50 ms, against well under 1 ms for a stage
ROWS, WIDTH = (16384, 512) if TYPE == "cuda" else (4096, 64)  # there kernels have a workspace; here the CPU computes



def devices() -> list[str]:
    return [FIRST, f"{TYPE}:1"] if torch.accelerator.device_count() > 1 else [FIRST, FIRST]


def mark() -> Any:
    event = module_of(TYPE).Event(enable_timing=True)
    event.record()
    return event


class Timed(nn.Module):
    """A layer that records events around itself."""

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
            module_of(TYPE)._sleep(DELAY_CYCLES)
            delays.append((begin, mark()))
        return transfer(tensor, device)

    monkeypatch.setattr(links, "_transfer", delayed)
    return delays


@pytest.mark.parametrize("chunks", [1])
def test_the_replay_runs_while_the_copy_of_its_gradient_is_delayed(chunks: int, delays: list[tuple[Any, Any]]) -> None:
    stages = [Timed(), Timed()]
    pipe = torchckpt.Pipe(nn.Sequential(*stages), [1, 1], devices=devices(), chunks=chunks, checkpoint="always")
    x = torch.randn(64 * chunks, 256, device=FIRST)
    pipe(x).sum().backward()  # warms up

    def done_before_copies_begin() -> bool:
        for record in (delays, stages[0].replays, stages[0].backwards):
            record.clear()
        loss = pipe(x).sum()
        torch.accelerator.synchronize()
        loss.backward()
        torch.accelerator.synchronize()
        steps = list(zip(delays, stages[0].replays, stages[0].backwards, strict=True))
        assert len(steps) == chunks
        assert all(delay_end.elapsed_time(backward) > 0 for (_, delay_end), _, backward in steps)  # it waited for them
        return all(begin.elapsed_time(replay) < begin.elapsed_time(end) for (begin, end), (_, replay), _ in steps)

    assert any(done_before_copies_begin() for _ in range(5))  # a core that others have may be late


@few(1)
@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_recomputing_changes_no_bit_with_dropout(checkpoint: Any, lookahead: int) -> None:
    def run(mode: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        module = nn.Sequential(Timed(), Timed())
        pipe = torchckpt.Pipe(module, [1, 1], devices(), 4, mode, lookahead)
        x = torch.randn(64, 256, device=FIRST)
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
        module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)))
        pipe = torchckpt.Pipe(module, [8, 8], devices(), 8, mode)
        x = torch.randn(ROWS // 2, WIDTH, device=FIRST)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        pipe(x).sum().backward()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - before

    assert peak("always") < peak("never") / 2


# skips ----------------------------------------------------------------------------------------------------------------


def skipping() -> nn.Sequential:
    """Skips from the first stage of four to the last, and from each to the next."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    first, second, third, last = blocks
    near = [Stash("near"), second, Pop("near")]
    return nn.Sequential(first, Stash("far"), *near, third, Pop("far"), last).to(FIRST)


def four() -> list[str]:
    return devices() * 2


def assert_equal(ours: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))  # type: ignore[arg-type]


def without_dropout(module: nn.Sequential) -> nn.Sequential:
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return module


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_skips_between_devices_are_the_plain_sequential(checkpoint: Any) -> None:
    x = torch.randn(64, 256, device=FIRST)
    plain = without_dropout(skipping())
    torch.autograd.backward([plain(part).square().sum() for part in x.tensor_split(4)])
    pipe = torchckpt.Pipe(without_dropout(skipping()), [2, 3, 1, 2], four(), 4, checkpoint)
    pipe(x).square().sum().backward()
    for ours, expected in zip(gradients(pipe), gradients(plain)):
        torch.testing.assert_close(ours, expected, check_device=False, rtol=1e-4, atol=1e-3)  # sums of 64 rows


def test_recomputing_changes_no_bit_with_skips_and_dropout() -> None:
    def run(mode: Any) -> list[Tensor | None]:
        pipe = torchckpt.Pipe(skipping(), [2, 3, 1, 2], four(), 4, mode)
        torch.manual_seed(1)
        x = torch.randn(64, 256, device=FIRST)
        pipe(x).square().mean().backward()
        return gradients(pipe)

    assert_equal(run("always"), run("never"))


def test_a_skip_arrives_on_the_device_of_the_stage_that_pops_it() -> None:
    class Looks(Pop):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(str(x.device))
            return super().forward(x)  # which fails where the two are on two devices

    seen: list[str] = []
    module = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Tanh(), Looks())
    pipe = torchckpt.Pipe(module, [2, 1, 1], [devices()[0], devices()[0], devices()[1]], 2)
    pipe(torch.randn(4, 4, device=FIRST)).sum().backward()
    assert seen[:2] == [devices()[1]] * 2


# one step -------------------------------------------------------------------------------------------------------------


def stepped(module: nn.Sequential, checkpoint: Any) -> tuple[Tensor, list[Tensor | None], torchckpt.Pipe]:
    pipe = torchckpt.Pipe(module, [2, 3, 1, 2], four(), 8, checkpoint)
    torch.manual_seed(1)
    x, target = torch.randn(64, 256, device=FIRST), torch.randn(64, 256)  # the target comes from the CPU
    loss = pipe.step(x, target, loss_fn=nn.functional.mse_loss)
    return loss, gradients(pipe), pipe


def test_a_step_has_the_loss_and_the_gradients_of_the_plain_sequential() -> None:
    loss, grads, _ = stepped(without_dropout(skipping()), "always")
    torch.manual_seed(1)
    x, target = torch.randn(64, 256, device=FIRST), torch.randn(64, 256).to(FIRST)
    plain = without_dropout(skipping())
    expected = nn.functional.mse_loss(plain(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), check_device=False)
    for ours, grad in zip(grads, gradients(plain)):
        torch.testing.assert_close(ours, grad, check_device=False)


def test_recomputing_changes_no_bit_of_a_step() -> None:
    always, never = stepped(skipping(), "always"), stepped(skipping(), "never")
    assert torch.equal(always[0], never[0])
    assert_equal(always[1], never[1])


def test_the_timeline_of_a_step_is_in_order_on_every_device() -> None:
    timeline = stepped(skipping(), "always")[2].timeline()
    kinds = {event.action.kind for event in timeline.events}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE}
    for rank, order in enumerate(timeline.schedule.ranks):
        events = [event for event in timeline.events if event.rank == rank]
        assert [event.action for event in events] == list(order)
        assert all(event.start_seconds <= event.end_seconds for event in events)


def test_a_step_keeps_boundaries_of_as_many_micro_batches_as_stages() -> None:
    def peak(call: Any, mode: Any) -> int:
        module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)))
        pipe = torchckpt.Pipe(module, [8, 8], devices(), 16, mode)
        x = torch.randn(ROWS, WIDTH, device=FIRST)
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        call(pipe, x)
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - before

    def step(pipe: torchckpt.Pipe, x: Tensor) -> None:
        pipe.step(x, x, loss_fn=nn.functional.mse_loss)

    def whole(pipe: torchckpt.Pipe, x: Tensor) -> None:
        nn.functional.mse_loss(pipe(x), x.to(devices()[1])).backward()

    assert peak(step, "never") < peak(whole, "never") / 3
    assert peak(step, "always") < peak(whole, "always")


def test_the_replay_of_a_step_runs_before_the_next_stage_s_backward() -> None:
    stages = [Timed(), Timed()]
    replays = [FIRST, FIRST]  # events of two devices cannot be compared
    pipe = torchckpt.Pipe(nn.Sequential(*stages), [1, 1], replays, chunks=2, checkpoint="always")
    x = torch.randn(64, 256, device=FIRST)
    pipe.step(x, x, loss_fn=nn.functional.mse_loss)
    torch.accelerator.synchronize()
    assert (len(stages[0].replays), len(stages[1].replays)) == (2, 0)  # the last stage keeps what it has
    assert (len(stages[0].backwards), len(stages[1].backwards)) == (2, 2)
    for (_, replay_end), backward in zip(stages[0].replays, stages[1].backwards):
        assert replay_end.elapsed_time(backward) > 0


# devices and arguments ------------------------------------------------------------------------------------------------


def test_a_stage_is_where_its_parameters_are_or_where_with_device_says() -> None:
    first, last = devices()
    module = nn.Sequential(nn.Linear(4, 4, device=first), WithDevice(nn.ReLU(), last), nn.Linear(4, 4, device=last))
    pipe = torchckpt.Pipe(module, chunks=2)
    assert [str(stage.device) for stage in pipe.stages] == ([first, last] if first != last else [first])
    output = pipe(torch.randn(4, 4))
    output.sum().backward()
    assert str(output.device) == last


def test_a_tensor_that_is_not_split_goes_to_the_first_device() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + table.sum(0)

    table = torch.randn(7, 4, requires_grad=True)
    pipe = torchckpt.Pipe(nn.Sequential(Looks(4, 4), nn.Linear(4, 4)), [1, 1], devices(), 2)
    pipe(torch.randn(4, 4), NoChunk(table)).sum().backward()
    assert table.grad is not None
    assert table.grad.device.type == "cpu"


def test_a_pipe_is_not_moved() -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices())
    with pytest.raises(torchckpt.errors.ArgumentError, match="cannot leave the devices of their stages"):
        pipe.cuda()


def test_the_profiler_sees_the_stages_of_workers() -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices(), 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe(torch.randn(4, 4, device=FIRST))
    seen = sorted(event.name for event in profile.events() if event.name.startswith("torchckpt::"))
    assert seen == [f"torchckpt::forward[stage={j},mb={i}]" for j in range(2) for i in range(2)]


class Numbered(nn.Linear):
    """Notes in which order its calls go back."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls, self.back = 0, []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not torchckpt.is_recomputing():
            y.register_hook(partial(lambda number, _: self.back.append(number), self.calls))
            self.calls += 1
        return y


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("stages", [1, 2])
def test_two_forwards_before_one_backward_go_back_as_without_a_pipe(checkpoint: Any, stages: int) -> None:
    def trained(pipe: Any) -> tuple[list[int], list[Tensor | None]]:
        torch.manual_seed(0)
        model, x = nn.Sequential(Numbered(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(16, 8, device=FIRST)
        call = pipe(model)
        (call(x).pow(2).mean() + (call(x) * 2).mean()).backward()
        return model[0].back, [gradient.cpu() for gradient in gradients(model)]

    def plain(model: nn.Module) -> Any:
        model.to(FIRST)
        return lambda x: torch.cat([model(part) for part in x.chunk(4)])

    back, expected = trained(plain)
    there = devices()[:stages]
    found, got = trained(lambda model: Pipe(model, [4 // stages] * stages, there, chunks=4, checkpoint=checkpoint))
    assert found == back == [7, 6, 5, 4, 3, 2, 1, 0]
    assert all(map(torch.equal, got, expected))
