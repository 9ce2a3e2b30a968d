"""Load-bearing waits: with any stream of a program held back, what it computes is the same, and nothing waits in vain.

Streams are held from before the forward until the backward is queued. Whoever does not wait for them reads memory that
is not written yet, or that is freed already: NaN, on this device. ``mutations.py`` says which test needs which line.
"""
from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.pipe.skips import Pop, Stash
from tests.slow import few
from torchckpt.pipe import balance
from torchckpt.pipe.run.links import Place
from torchckpt.regions.core import call
from torchckpt.regions.devices import Clock
from torchckpt.regions.state.module_state import record_state

DEVICES = ("sim:0", "sim:1")


# one region -----------------------------------------------------------------------------------------------------------


def leaf(*shape):
    tensor = torch.randn(*shape, device="sim:0").requires_grad_()
    torch.accelerator.synchronize()
    return tensor


def body(x):
    """Saves its result, and nothing of its input."""
    return (x + 1).exp()


def body_that_keeps(x):
    return torchckpt.keep(lambda x: x + 1, x).exp()


def expected_of(x):
    gradient = torch.autograd.grad(body(x * 2).sum(), x)[0]
    torch.accelerator.synchronize()
    return gradient


def prefetched_on_the_second(streams, function, x):
    """What a region on the first stream returns, once its replay waits on the second."""
    first, second = streams
    with first:
        region = torchckpt.Checkpointing(function, x * 2)
        output = region.checkpoint()
    with second:
        region.prefetch()
    assert not second.query()
    return output


def test_a_replay_waits_for_the_stream_of_its_inputs(sim, streams):
    x = leaf(8)
    expected = expected_of(x)
    with sim.held(streams[0]):
        output = prefetched_on_the_second(streams, body, x)
    torch.accelerator.synchronize()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


@pytest.mark.parametrize("function", [body, body_that_keeps], ids=["inputs", "what is kept"])
def test_what_a_replay_on_another_stream_reads_is_kept_until_it_has_run(sim, streams, function):
    first, second = streams
    x = leaf(8)
    expected = expected_of(x)
    with first:
        region = torchckpt.Checkpointing(function, x * 2)
        output = region.checkpoint()
    with sim.held(second):
        with second:
            region.prefetch()  # after which nothing holds x * 2, nor what is kept
        first.synchronize()
    torch.accelerator.synchronize()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


def test_a_backward_waits_for_a_replay_on_another_stream(sim, streams):
    _, second = streams
    x = leaf(8)
    expected = expected_of(x)
    region = torchckpt.Checkpointing(body, x * 2)
    loss = region.checkpoint().sum()
    torch.accelerator.synchronize()
    with sim.held(second):
        with second:
            region.prefetch()
        gradient = torch.autograd.grad(loss, x)[0]
        assert not torch.accelerator.current_stream().query()
    assert torch.equal(gradient, expected)


def test_what_a_replay_on_another_stream_made_is_kept_until_the_backward_has_run(sim, streams):
    _, second = streams
    x = leaf(8)
    expected = expected_of(x)
    region = torchckpt.Checkpointing(body, x * 2)
    loss = region.checkpoint().sum()
    with second:
        region.prefetch()
    torch.accelerator.synchronize()
    with sim.held():
        gradient = torch.autograd.grad(loss, x)[0]
        del loss, region
        second.synchronize()
    assert torch.equal(gradient, expected)


def test_a_replay_waits_for_the_stream_that_made_what_is_kept(sim, streams):
    x = leaf(8)
    expected = expected_of(x)
    with ExitStack() as stack:

        def late(x):  # the inputs of the region are there before
            stack.enter_context(sim.held(streams[0]))
            return x + 1

        output = prefetched_on_the_second(streams, lambda x: torchckpt.keep(late, x).exp(), x)
    torch.accelerator.synchronize()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


# a pipeline -----------------------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Makes a tensor on the device that is current."""

    def forward(self, x):
        return x + torch.ones(4, device="sim")


def layers():
    """Two stages of five layers, and a skip from the first to the second."""
    torch.manual_seed(0)
    first = [nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.3), Shifted(), Stash()]
    return nn.Sequential(*first, nn.Linear(4, 4), Shifted(), nn.Dropout(0.3), Pop(), nn.Linear(4, 4))


class Streams:
    """Streams of a pipeline, by what they are for; those that ``late`` names are held."""

    def __init__(self, sim, late: str) -> None:
        self._sim, self._late, self._stack = sim, late, ExitStack()

    def compute(self) -> list[torch.Stream]:
        """The current streams of the devices from now on. Nothing should run on the default ones, which stand still."""
        made = [torch.Stream(device) for device in DEVICES]
        for number, stream in enumerate(made):
            self._stack.enter_context(self._sim.held(torch.sim.default_stream(number)))
            self._hold_if(f"compute {number}", stream)
        return made

    def side(self, stream: torch.Stream) -> None:
        self._hold_if(f"copies {stream.device_index}", stream)

    def _hold_if(self, name: str, stream: torch.Stream) -> None:
        if name in self._late:
            self._stack.enter_context(self._sim.held(stream))

    def release(self) -> None:
        self._stack.close()


def with_late_streams(sim, monkeypatch, late: str, program: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What ``program`` returns, which waits for nothing, where the streams named in ``late`` are held meanwhile."""
    side_stream, streams = Place.side_stream, Streams(sim, late)

    def watched(self):
        stream = side_stream(self)
        streams.side(stream)
        return stream

    monkeypatch.setattr(Place, "side_stream", watched)
    sim.synchronize()
    first, second = streams.compute()
    try:
        with sim.timeout(5):
            with second, first:  # sim:0 is current
                results = program()
            for stream in (first, second) if late == "nothing" else ():
                stream.synchronize()  # a timeout, where it waits for a stream that stands still
    finally:
        monkeypatch.setattr(Place, "side_stream", side_stream)
        streams.release()
    sim.synchronize()
    return [result.cpu() for result in results]


LATE = ["nothing", "compute 0", "compute 1", "copies 0", "copies 1", "compute 0, copies 1", "compute 1, copies 0"]
PROGRAMS = {
    "always": {"checkpoint": "always"},
    "look-ahead 2": {"checkpoint": "always", "lookahead": 2},
    "except last": {"checkpoint": "except_last"},
    "never": {"checkpoint": "never"},
    "step": {"checkpoint": "always", "step": True},
    "step that keeps all": {"checkpoint": "never", "step": True},
}


def program(module, x, target, checkpoint, lookahead=1, step=False):
    """A pipeline's output or loss, and all gradients; nothing in it waits for a device."""
    pipe = torchckpt.Pipe(module, [5, 5], DEVICES, 4, checkpoint, lookahead)

    def run() -> list[Tensor]:
        for device in range(2):
            with torch.sim.device(device):
                torch.sim.manual_seed(3)
        if step:
            loss = pipe.step(x * 1, target, loss_fn=nn.functional.mse_loss)
            return [loss, *(parameter.grad for parameter in pipe.parameters())]
        output = pipe(x * 1)
        nn.functional.mse_loss(output, target).backward()
        return [output.detach(), x.grad, *(parameter.grad for parameter in pipe.parameters())]

    return run


@few(2)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("options", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("where", DEVICES, ids=["input here", "input there"])
def test_a_pipeline_whose_streams_are_late(sim, monkeypatch, where, options, late):
    x, target = torch.randn(8, 4), torch.randn(8, 4).to("sim:1")

    def run(late):
        own = x.to(where).requires_grad_(not options.get("step"))
        return with_late_streams(sim, monkeypatch, late, program(layers(), own, target, **options))

    results = run(late)
    assert not any(result.isnan().any() for result in results)
    assert all(map(torch.equal, results, run("nothing")))


@pytest.mark.parametrize("options", PROGRAMS.values(), ids=PROGRAMS)
def test_a_layer_makes_its_tensors_on_the_device_of_its_stage(sim, options):
    x, target = torch.randn(8, 4).to("sim:0").requires_grad_(), torch.randn(8, 4).to("sim:1")
    results = program(layers(), x, target, **options)()  # on the default streams, which are current in every thread
    assert not any(result.isnan().any() for result in results)
    assert torch.accelerator.current_device_index() == 0


# lanes ----------------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A stage that writes down its replays and the ends of its backwards, with the number of the micro-batch."""

    def __init__(self, name, events):
        super().__init__()
        self.weight, self.name, self.events = nn.Parameter(torch.ones(1)), name, events

    def forward(self, pair):
        x, number = pair if isinstance(pair, tuple) else (pair, pair.detach()[:, :1])
        mark = f"{self.name}{int(number[0].item())}"
        if torchckpt.is_recomputing():
            self.events.append(f"R{mark}")
        elif x.requires_grad:
            x.register_hook(lambda grad: self.events.append(f"B{mark}"))
        y = x + (x * self.weight).exp() * 0
        return (y, number) if isinstance(pair, tuple) else y


def events_of(devices, lookahead, outputs, chunks=4):
    """What stages, each with a letter for a name, do in a backward."""
    events = []
    stages = [Watched(name, events) for name in "abc"[: len(devices)]]
    pipe = torchckpt.Pipe(nn.Sequential(*stages), [1] * len(devices), devices, chunks, "always", lookahead)
    x = torch.arange(float(chunks), device=devices[0])[:, None].requires_grad_()
    output = pipe(x * 1 if outputs == 1 else (x * 1, torch.arange(chunks, device=devices[0])))
    (output if outputs == 1 else output[0]).sum().backward()
    return events


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    ("lookahead", "picture"),
    [(1, "R3 B3 R2 B2 R1 B1 R0 B0"), (2, "R3 R2 B3 R1 B2 R0 B1 B0"), (3, "R3 R2 R1 B3 R0 B2 B1 B0")],
)
def test_the_order_of_every_lane(sim, lookahead, picture, outputs):
    for devices in DEVICES[:1], DEVICES:
        events = events_of(devices, lookahead, outputs)
        for name in "ab"[: len(devices)]:
            assert " ".join(event.replace(name, "") for event in events if name in event) == picture


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    ("lookahead", "picture"),
    [
        (1, "Rb3 Bb3 Rb2 Bb2 Rb1 Ra3 Ba3 Ra2 Bb1 Rb0 Ba2 Ra1 Bb0 Ba1 Ra0 Ba0"),
        (2, "Rb3 Rb2 Bb3 Rb1 Bb2 Rb0 Ra3 Ra2 Ba3 Ra1 Bb1 Ba2 Ra0 Bb0 Ba1 Ba0"),
    ],
)
def test_the_order_of_two_lanes_in_one_thread(sim, lookahead, picture, outputs):
    assert " ".join(events_of(("sim:0", "sim:0"), lookahead, outputs)) == picture


def test_a_replay_waits_for_a_backward_that_goes_through_another_device(sim):
    events = []

    class ByCpu(nn.Module):
        def forward(self, x):
            host = x.cpu()
            if torchckpt.is_recomputing():
                events.append("R")
            else:
                host.register_hook(lambda grad: time.sleep(0.05))  # in the thread of the CPU
                x.register_hook(lambda grad: events.append("B"))
            return host.exp().to(x.device)

    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), ByCpu()), [1, 1], ("sim:0", "sim:0"), 3, "always")
    pipe(torch.randn(3, 4).to("sim:0")).sum().backward()
    assert "".join(events) == "RBRBRB"


def test_what_a_backward_did_not_read_is_let_go_at_its_end(sim):
    alive = Counter()

    class Branches(nn.Linear):
        def forward(self, x):
            unused = super().forward(x).exp()  # exp saves its result
            if torchckpt.is_recomputing():
                alive["now"] += 1
                alive["peak"] = max(alive["peak"], alive["now"])
                weakref.finalize(unused.untyped_storage(), alive.subtract, {"now": 1})
            return x + 1, unused.sin()

    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), Branches(4, 4)), [1, 1], DEVICES, 4, "always")
    used = pipe(torch.randn(4, 4).to("sim:0"))[0]
    used.sum().backward()
    assert alive == {"now": 0, "peak": 1}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_replay_runs_while_the_copy_of_its_gradient_is_late(sim, monkeypatch, number):
    replayed, sent, side_stream = [], [], Place.side_stream

    class Stage(nn.Linear):
        def forward(self, x):
            y = super().forward(x).exp()
            if torchckpt.is_recomputing() and str(x.device) == "sim:0":
                replayed.append(torch.accelerator.current_stream(x.device).record_event())
            return y.sin()

    def watched(self):
        stream = side_stream(self)
        if str(self.device) == "sim:0":
            sent.append(stream)  # one for each micro-batch, and later its gradient
        return stream

    monkeypatch.setattr(Place, "side_stream", watched)
    pipe = torchckpt.Pipe(nn.Sequential(Stage(4, 4), Stage(4, 4)), [1, 1], DEVICES, 3, "always")
    loss = pipe(torch.randn(6, 4).to("sim:0")).sum()
    sim.synchronize()
    with sim.held(sent[number]), sim.timeout(5):
        loss.backward()
        replayed[2 - number].synchronize()  # the last micro-batch is the first that is replayed
        assert not sent[number].query()


# clocks ---------------------------------------------------------------------------------------------------------------

CYCLES = 100_000_000  # 50 ms


@pytest.fixture
def late(sim):
    """An event that its stream comes to late."""
    torch.sim._sleep(CYCLES)
    return torch.accelerator.current_stream().record_event()


def test_a_clock_is_read_when_the_device_is_idle(late, monkeypatch):
    idle = []
    clock = Clock(torch.device("sim:0"))
    monkeypatch.setattr("torchckpt.regions.devices.time.perf_counter", lambda: float(idle.append(late.query()) or 0))
    clock.reader()
    assert idle == [True]


def test_a_clock_waits_for_the_mark_that_it_counts_from(sim, monkeypatch):
    clock = Clock(torch.device("sim:0"))
    stamp, mark = clock.stamp(), clock._event

    def late_mark():
        torch.sim._sleep(CYCLES)
        return mark()

    monkeypatch.setattr(clock, "_event", late_mark)
    assert clock.reader()(stamp) > 0  # an event that is not there yet has no time


def test_layers_are_timed_when_the_device_is_idle(late):
    balance._now([torch.device("sim:0")])
    assert late.query()


# what keep leaves on buffers ------------------------------------------------------------------------------------------


class BodyThatKeepsABuffer(nn.Module):
    """``body``, with a one that a kept function writes into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.zeros(8, device="sim:0"))
        torch.accelerator.synchronize()

    def forward(self, x):
        torchckpt.keep(self.one.fill_, 1.0)
        return (x + self.one).exp()


def test_a_buffer_that_a_replay_on_another_stream_reads_is_kept_until_it_has_run(sim, streams):
    first, second = streams
    x = leaf(8)
    expected = expected_of(x)
    with first:
        region = torchckpt.Checkpointing(BodyThatKeepsABuffer(), x * 2)
        output = region.checkpoint()
    with sim.held(second):
        with second:
            region.prefetch()  # after which nothing holds the copy of the buffer
        first.synchronize()
    torch.accelerator.synchronize()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


class Doubling(nn.Module):
    """Doubles its scale at each call, so that a replay reads a copy of the old one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8, device="sim"))
        torch.accelerator.synchronize()

    def forward(self, x):
        y = (x * self.scale).exp()
        if not torchckpt.is_recomputing():
            self.scale.mul_(2)
        return y


def test_a_replay_waits_for_the_copy_of_a_buffer(sim, streams, monkeypatch):
    x, module = leaf(8), Doubling()
    (expected,) = torch.autograd.grad((x * 2).exp().sum(), x)
    with ExitStack() as stack:

        def late(*args):  # the inputs of the region are there before
            stack.enter_context(sim.held(streams[0]))
            return record_state(*args)

        monkeypatch.setattr(call, "record_state", late)
        output = prefetched_on_the_second(streams, module, x)
    torch.accelerator.synchronize()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


def test_the_copy_of_a_buffer_is_kept_until_a_replay_on_another_stream_has_read_it(sim, streams):
    first, second = streams
    x, module = leaf(8), Doubling()
    (expected,) = torch.autograd.grad((x * 1).exp().sum(), x)
    with first:
        region = torchckpt.Checkpointing(module, x)
        output = region.checkpoint()
        torchckpt.checkpoint(module, x)  # which copies the buffer anew
    with sim.held(second):
        with second:
            region.prefetch()  # after which nothing holds the first copy
        first.synchronize()
    torch.accelerator.synchronize()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
