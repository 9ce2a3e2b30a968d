"""Copies: to and from the host, and between devices, each on a stream."""
from __future__ import annotations

import pytest
import torch

from tests.device import Rates


def test_a_copy_there_and_back(sim):
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(x.to("sim:1").cpu(), x)
    assert torch.equal(x.t().to("sim:1").cpu(), x.t())
    assert torch.equal(x.to("sim:1", torch.int64).cpu(), x.long())
    assert torch.equal(x.to("sim:1").to("sim:2")[:, 1:].cpu(), x[:, 1:])


def test_a_copy_into_what_is_there(sim):
    there = torch.zeros(3, 4, device="sim:1")
    there.copy_(torch.arange(4.0))  # broadcast
    there[1:2] = 7
    here = torch.zeros(3, 4)
    here.copy_(there)
    assert here.tolist() == [[0, 1, 2, 3], [7, 7, 7, 7], [0, 1, 2, 3]]


def test_lazy_conjugation_and_negation_are_copied_as_values(sim):
    x = torch.tensor([1 + 2j, 3 - 1j])
    there = x.to("sim:0")
    assert torch.equal(there.conj().cpu(), x.conj())
    assert torch.equal(there.conj().imag.cpu(), x.conj().imag)
    assert torch.equal(x.conj().to("sim:0").cpu(), x.conj())


def test_a_copy_between_devices_waits_for_both(sim):
    x = torch.ones(3, device="sim:0")
    sim.synchronize()
    with sim.held(torch.accelerator.current_stream(0)):
        y = x + 1
        z = y.to("sim:1")
        w = z * 2
        assert not torch.accelerator.current_stream(1).query()
    assert w.tolist() == [4, 4, 4]


def test_a_copy_between_devices_runs_on_the_stream_of_the_source(sim):
    x = torch.ones(3, device="sim:0")
    out, into = torch.Stream("sim:0"), torch.Stream("sim:1")
    sim.synchronize()
    with sim.record() as ran:
        with out, into:
            x.to("sim:1")
    assert [(one.device, one.stream, one.operator) for one in ran] == [(0, out.stream_id, "aten::copy_")]


def test_a_copy_does_not_overwrite_what_the_target_still_reads(sim):
    source, target = torch.ones(3, device="sim:0"), torch.zeros(3, device="sim:1")
    sim.synchronize()
    with sim.held(torch.accelerator.current_stream(1)):
        before = target + 1
        target.copy_(source)
    assert (before.tolist(), target.tolist()) == ([1, 1, 1], [1, 1, 1])


# with the host, without waiting ---------------------------------------------------------------------------------------


def test_a_result_that_is_read_too_early_is_nan_and_an_error_that_names_the_copy(sim):
    x = torch.ones(3, device="sim:0")
    sim.synchronize()
    with sim.held():
        y = (x + 1).to("cpu", non_blocking=True)
        assert y.isnan().all()
        with pytest.raises(RuntimeError) as error:
            sim.check()
    assert str(error.value) == (
        "the host touched a tensor that aten::_to_copy on stream 0 of sim:0 has not written yet. The result of a copy "
        "with non_blocking=True must be waited for: torch.accelerator.synchronize()."
    )


def test_a_result_that_is_waited_for_is_right(sim):
    x = torch.ones(3, device="sim:0")
    y = (x + 1).to("cpu", non_blocking=True)
    torch.accelerator.synchronize(0)
    assert y.tolist() == [2, 2, 2]
    y.resize_(5)
    assert y[:3].tolist() == [2, 2, 2]


def test_a_target_of_the_host_is_nan_until_the_copy_has_run(sim):
    x, y = torch.ones(3, device="sim:0"), torch.zeros(3)
    sim.synchronize()
    with sim.held():
        y.copy_(x, non_blocking=True)
        assert y.isnan().all()
    torch.accelerator.synchronize(0)
    assert y.tolist() == [1, 1, 1]


def test_a_pinned_target_is_left_alone_until_the_copy_runs(sim):
    x, pinned, late = torch.ones(3, device="sim:0"), torch.zeros(3, pin_memory=True), torch.Stream("sim:0")
    assert (torch.zeros(3).is_pinned(), pinned.is_pinned(), pinned[1:].is_pinned()) == (False, True, True)
    sim.synchronize()
    with sim.held(late):
        with late:
            pinned.copy_(x, non_blocking=True)
        assert pinned.to("sim:0").tolist() == [0, 0, 0]  # who reads it meanwhile reads what is there
    late.synchronize()
    assert pinned.tolist() == [1, 1, 1]


def test_a_pinned_target_is_nan_while_the_copy_runs(sim):
    x, pinned, late = torch.ones(3, device="sim:0"), torch.zeros(3, pin_memory=True), torch.Stream("sim:0")
    sim.synchronize()
    with sim.durations(Rates(seconds_per_copy=0.5)):
        with late:
            pinned.copy_(x, non_blocking=True)
        while not pinned.isnan().all():
            assert not late.query()
    assert pinned.tolist() == [1, 1, 1]


def test_a_source_of_the_host_that_changes_before_the_copy_runs_is_copied_as_it_is_then(sim):
    x, kept = torch.ones(3), torch.ones(3)
    with sim.held():
        y, z = x.to("sim:0", non_blocking=True), kept.to("sim:0", non_blocking=True)
        x.fill_(5)
        del kept  # its memory lives until the copy has run
    assert (y.tolist(), z.tolist()) == ([5, 5, 5], [1, 1, 1])


def test_a_copy_that_waits_is_done_when_it_returns(sim):
    x = torch.ones(3)
    y = x.to("sim:0")
    x.fill_(5)
    assert y.tolist() == [1, 1, 1]


def test_memory_of_a_device_cannot_be_pinned(sim):
    with pytest.raises(RuntimeError, match="only memory of the host can be pinned"):
        torch.empty(3, device="sim:0", pin_memory=True)
