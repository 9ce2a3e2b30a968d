"""Streams: who waits for whom, and when, with recording streams on the CPU in place of an accelerator's.

Everything but the streams is real: the graph, the engine, the order in which it runs the nodes. That in a backward one
stream waits for another is the engine's doing, and is seen in ``tests/device/library/test_waits.py``.
"""
from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.pipe.stages import run, stages_of
from torchckpt.pipe.run import links
from torchckpt.pipe.run.links import Place

CPU = torch.device("cpu")


class FakeStream:
    """Writes down what it is asked, under its name. The current ones are on a stack, as with real streams."""

    current: ClassVar[list[FakeStream]] = []
    device_index = 0

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def __enter__(self) -> None:
        self.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.current.pop()

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


class FakePlace(Place):
    """A place whose side streams are counted: one for what leaves, or enters, at a time."""

    def side_stream(self) -> Any:
        compute: Any = self.compute
        compute.sides += 1
        return FakeStream(f"copy{compute.number}.{compute.sides}", compute.events)


class Stage(nn.Module):
    def __init__(self, number: int, events: list[str]) -> None:
        super().__init__()
        self.weight, self.number, self.events = nn.Parameter(torch.ones(2)), number, events

    def forward(self, input: Tensor) -> Tensor:
        self.events.append(f"{'recompute' if torchckpt.is_recomputing() else 'forward'} {self.number}")
        output = (input * self.weight).exp()
        if not torchckpt.is_recomputing():
            output.register_hook(lambda grad: self.events.append(f"backward {self.number}"))
        return output


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    computes = iter(range(9))

    def of(device: torch.device) -> Place:
        number = next(computes)
        stream: Any = FakeStream(f"compute{number}", events)
        stream.number, stream.sides = number, 0
        return FakePlace(device, stream)

    def transfer(tensor: Tensor, device: torch.device) -> Tensor:
        on = FakeStream.current
        events.append(f"copy, {on[-2].name} to {on[-1].name}")
        return tensor.clone()

    monkeypatch.setattr(Place, "of", staticmethod(of))
    monkeypatch.setattr(links, "_transfer", transfer)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(links, "_record", lambda tensor, stream: None)
    return events


def test_stages_on_one_device_and_stream_are_linked_all_the_same(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place.of(CPU)
    monkeypatch.setattr(Place, "of", staticmethod(lambda device: place))
    two_stages(events, chunks=1, checkpointed=1).backward()
    assert events == [
        "forward 0",  # the input is here already
        "copy0.1 waits for compute0",
        "copy, copy0.1 to copy0.2",
        "compute0 waits for copy0.2",
        "forward 1",
        "recompute 1",
        "backward 1",
        "copy, copy0.2 to copy0.1",
        "recompute 0",
        "backward 0",
    ]


def two_stages(events: list[str], chunks: int, checkpointed: int) -> Tensor:
    stages = stages_of([Stage(0, events), Stage(1, events)], devices=[CPU, CPU])
    output = run(stages, torch.ones(chunks, 2), chunks, checkpointed, 1, threads=False)
    assert isinstance(output, Tensor)
    return output.sum()


def test_one_micro_batch_is_copied_from_the_caller_to_one_stage_and_on_to_the_next(events: list[str]) -> None:
    two_stages(events, chunks=1, checkpointed=1)
    # compute2 is the caller's; a copy takes a stream on each side
    assert events == [
        "copy2.1 waits for compute2",
        "copy, copy2.1 to copy0.1",
        "compute0 waits for copy0.1",
        "forward 0",
        "copy0.2 waits for compute0",
        "copy, copy0.2 to copy1.1",
        "compute1 waits for copy1.1",
        "forward 1",
    ]


def test_the_replay_comes_after_the_gradients_copy_is_enqueued_and_before_what_reads_it(events: list[str]) -> None:
    loss = two_stages(events, chunks=1, checkpointed=1)
    events.clear()
    loss.backward()
    assert events == [
        "recompute 1",
        "backward 1",
        "copy, copy1.1 to copy0.2",  #     [2], for which the engine let copy1.1 wait [1]
        "recompute 0",  #                  [3]
        "backward 0",  #                   [7], for which it let compute0 wait [5]
    ]


def test_the_next_replay_of_a_lane_comes_as_soon_as_its_gradient_was_handed_on(events: list[str]) -> None:
    loss = two_stages(events, chunks=2, checkpointed=2)
    events.clear()
    loss.backward()
    stage_1 = [event for event in events if event.endswith(" 1") or event.startswith("copy, copy1")]
    assert stage_1 == [
        "recompute 1",
        "backward 1",
        "copy, copy1.2 to copy0.4",  # the gradient of micro-batch 1 leaves
        "recompute 1",
        "backward 1",
        "copy, copy1.1 to copy0.2",
    ]
    stage_0 = [event for event in events if event.endswith(" 0")]
    assert stage_0 == ["recompute 0", "backward 0"] * 2


def test_without_streams_nothing_waits_and_nothing_is_copied() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    assert links.wait(None, None, (x,))[0].data_ptr() == x.data_ptr()
    place = Place.of(CPU)
    assert place == (CPU, None)
    assert place.side_stream() is None
    assert links.copy(place, None, place, None, (x,))[0].data_ptr() == x.data_ptr()


def test_gradients_of_a_link_stay_undefined_where_nothing_flows() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    place = Place.of(CPU)
    a, _ = links.copy(place, None, place, None, links.wait(None, None, (x, y)))
    a.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))  # type: ignore[arg-type]
    assert y.grad is None
