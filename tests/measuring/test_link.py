"""The link to the host: what measuring it takes, and who hears of a device that cannot."""
from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from tests.settings import without_collector
from torchckpt import CheckpointError
from torchckpt.errors import without_traceback
from torchckpt.measuring.link import measured_link
from torchckpt.regions.moved.copies import copies_of

pytestmark = pytest.mark.accelerator


class Stop(Exception):
    pass


def stops(failure):
    raise Stop(failure)


def raises(failure):
    raise without_traceback(failure)


@pytest.mark.parametrize("size", [3 * 2**20, 2**31])
def test_it_takes_no_more_than_a_region_and_192_mib(accelerator, size):
    arena = copies_of(accelerator).arena
    arena.begin_peak()
    before = torch.accelerator.memory_allocated(accelerator), arena.used_bytes
    torch.accelerator.reset_peak_memory_stats(accelerator)
    with pytest.raises(Stop, match="None"):
        measured_link(accelerator, size, stops)
    here, host = torch.accelerator.max_memory_allocated(accelerator), arena.peak_bytes
    assert here - before[0] == min(size, 3 * 2**26)
    assert host - before[1] == min(size, 3 * 2**26) * 2 // 3


@pytest.mark.parametrize("where", ["the device", "the host"])
def test_a_device_without_memory_tells_the_others_at_once(accelerator, monkeypatch, where):
    def refuse(*args, **kwargs):
        if where == "the device":
            raise torch.OutOfMemoryError("nothing left")
        raise CheckpointError("the host has no pinned memory")

    of, name, text = {
        "the device": (torch, "zeros", "has no memory left to measure its link"),
        "the host": (copies_of(accelerator).arena, "take", "the host has no pinned memory"),
    }[where]
    monkeypatch.setattr(of, name, refuse)
    with pytest.raises(Stop, match=text):
        measured_link(accelerator, 2**20, stops)


def test_what_was_to_be_copied_is_freed_with_the_error(accelerator, monkeypatch):
    def refuse(*args):
        raise CheckpointError("the host has no pinned memory")

    monkeypatch.setattr(copies_of(accelerator).arena, "take", refuse)
    with without_collector():
        before = torch.accelerator.memory_allocated(accelerator)
        with suppress(CheckpointError):
            measured_link(accelerator, 2**20, raises)
        assert torch.accelerator.memory_allocated(accelerator) == before


def test_copies_that_are_too_fast_to_time_have_a_rate(accelerator, monkeypatch):
    monkeypatch.setattr("torchckpt.measuring.link.Clock.reader", lambda clock: lambda stamp: 0.0)
    link = measured_link(accelerator, 3 * 2**20, lambda failure: None)
    assert (link.out, link.back, link.drag) == (2**20 / 1e-9, 2**20 / 1e-9, 0.0)
