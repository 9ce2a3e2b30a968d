"""Memory: bytes of each device, NaN in what is freed, and nobody but the streams may read it."""
from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest
import torch
from torch import nn


@pytest.fixture
def device(sim):
    """A device that holds nothing, its peak at nothing."""
    gc.collect()
    torch.accelerator.synchronize(3)
    before = torch.accelerator.memory_allocated(3)
    torch.accelerator.reset_peak_memory_stats(3)
    yield torch.device("sim:3")
    gc.collect()  # errors hold the tensors of the calls that they came from
    torch.accelerator.synchronize(3)
    assert torch.accelerator.memory_allocated(3) == before


def allocated():
    return torch.accelerator.memory_allocated(3)


def peak():
    return torch.accelerator.max_memory_allocated(3)


def bytes_at(address, count=4):
    return ctypes.string_at(address, count)


# bytes ----------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_asked_for(device):
    base, elsewhere = allocated(), torch.accelerator.memory_allocated(0)
    x = torch.empty(3, 5, device=device)
    assert allocated() - base == 60
    y = torch.empty(7, dtype=torch.bool, device=device)
    assert allocated() - base == 67
    assert torch.accelerator.memory_allocated(0) == elsewhere
    del x
    assert allocated() - base == 7
    del y
    assert (allocated() - base, peak() - base) == (0, 67)
    torch.accelerator.reset_peak_memory_stats(3)
    assert peak() == base


def test_views_share_bytes(device):
    base = allocated()
    x = torch.empty(4, 4, device=device)
    views = [x.t(), x[1:], x.view(16), x.unfold(0, 2, 1), x.detach(), x.expand(2, 4, 4)]
    assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views)
    assert allocated() - base == 64


def test_an_operator_takes_the_bytes_of_its_result_and_no_more(device):
    x = torch.ones(100, device=device)
    base = allocated()
    torch.accelerator.reset_peak_memory_stats(3)
    y = x.exp().sin().cos()
    assert (allocated() - base, peak() - base) == (400, 800)
    y += x
    assert (allocated() - base, peak() - base) == (400, 800)


def test_bytes_of_a_forward_and_a_backward(device):
    layer = nn.Linear(16, 16, bias=False, device=device)
    x = torch.ones(8, 16, device=device)
    base = allocated()
    loss = layer(x).tanh().sum()
    assert allocated() - base == 8 * 16 * 4 + 4  # the result of tanh, and the loss
    loss.backward()
    del loss
    assert allocated() - base == 16 * 16 * 4  # the gradient


def test_bytes_are_counted_when_the_host_frees_whatever_the_streams_do(sim, device):
    base = allocated()
    with sim.held(torch.accelerator.current_stream(3)):
        x = torch.empty(10, device=device)
        x.fill_(1)
        del x
        assert allocated() == base


def test_a_storage_that_grows_keeps_what_it_holds(device):
    base = allocated()
    x = torch.arange(3.0, device=device)
    x.untyped_storage().resize_(40)
    assert allocated() - base == 40
    assert x.tolist() == [0, 1, 2]
    x.untyped_storage().resize_(0)
    assert allocated() == base


def test_memory_info_and_statistics(device):
    free, total = torch.accelerator.get_memory_info(3)
    x = torch.empty(256, device=device)
    assert torch.accelerator.get_memory_info(3) == (free - x.nbytes, total)
    assert torch.accelerator.memory_stats(3)["allocated_bytes.all.current"] == allocated()
    assert torch.sim.memory_allocated("sim:3") == allocated()


def test_more_than_a_device_has_is_an_error(device):
    with pytest.raises(torch.OutOfMemoryError, match="sim: a device has 64 GiB"):
        torch.empty(1 << 37, device=device)


# what is freed --------------------------------------------------------------------------------------------------------


def test_fresh_memory_is_nan(device):
    assert torch.empty(1000, device=device).isnan().all()


def ones_on(stream):
    """Ones that are there, in memory that the stream made."""
    with stream:
        x = torch.ones(3, device=stream.device)
    stream.synchronize()
    return x


def test_what_is_freed_is_nan_for_who_still_reads_it(sim, device):
    first, second = torch.Stream(device), torch.Stream(device)
    x = ones_on(first)
    with sim.held(second), second:
        y = x + 1
        del x
    second.synchronize()
    assert y.isnan().all()


def test_a_recorded_stream_is_waited_for_before_the_memory_is_freed(sim, device):
    first, second = torch.Stream(device), torch.Stream(device)
    x = ones_on(first)
    with sim.held(second), second:
        y = x + 1
        x.record_stream(second)
        del x
        first.synchronize()  # the first stream waits for nobody
    second.synchronize()
    assert y.tolist() == [2, 2, 2]


def test_memory_is_freed_in_the_order_of_its_own_stream(sim, device):
    x = torch.ones(3, device=device)
    with sim.held(torch.accelerator.current_stream(3)):
        y = x + 1
        del x
    assert y.tolist() == [2, 2, 2]


def address_of_three(stream):
    """Where ``stream`` gets memory for three numbers, which are then freed."""
    with stream:
        return torch.empty(3, device=stream.device).data_ptr()


def test_memory_is_handed_out_again_at_once_to_its_own_stream(sim, device):
    first, second = torch.Stream(device), torch.Stream(device)
    with sim.held(first):
        address = address_of_three(first)  # the stream has not come to the end of it, which is no matter
        assert address_of_three(first) == address
        assert address_of_three(second) != address
    first.synchronize()
    assert address_of_three(second) != address


def test_memory_that_was_recorded_on_a_stream_is_handed_out_when_that_has_passed(sim, device):
    first, second = torch.Stream(device), torch.Stream(device)
    x = ones_on(first)
    address = x.data_ptr()
    with sim.held(second):
        x.record_stream(second)
        del x
        assert address_of_three(first) != address
    second.synchronize()
    assert address_of_three(first) == address


def test_who_reads_what_is_freed_too_late_may_see_the_next_tensor(sim, device):
    first, second = torch.Stream(device), torch.Stream(device)
    x = ones_on(first)
    with sim.held(second):
        with second:
            y = x + 1
            del x
        with first:
            z = torch.full((3,), 5.0, device=device)
        first.synchronize()
    second.synchronize()
    assert (y.tolist(), z.tolist()) == ([6, 6, 6], [5, 5, 5])


def test_a_record_of_the_stream_that_made_it_changes_nothing(device):
    x = torch.ones(3, device=device)
    x.record_stream(torch.accelerator.current_stream(3))
    assert x.tolist() == [1, 1, 1]


def test_temporaries_of_an_expression_survive_the_host(sim, device):
    x = torch.ones(100, device=device)
    with sim.held(torch.accelerator.current_stream(3)):
        for _ in range(50):
            x = x * 2 / 2
    assert torch.equal(x.cpu(), torch.ones(100))


# the host reads -------------------------------------------------------------------------------------------------------


def test_the_host_that_reads_memory_of_a_device_gets_nan_and_an_error_that_names_the_operator(sim, device):
    x = torch.ones(3, device=device)
    sim.synchronize()
    y = torch.mm(x.expand(3, 3), x.expand(3, 3))
    sim.synchronize()
    assert bytes_at(y.data_ptr()) == b"\xff" * 4
    with pytest.raises(RuntimeError) as error:
        sim.check()
    assert str(error.value) == (
        "the host touched memory of sim:3 (written by aten::mm, which was queued on stream 0 of sim:3 and has run). "
        "Only the streams of a device read its memory: copy the tensor first, as tensor.cpu() does."
    )
    assert y.tolist() == [[3, 3, 3]] * 3  # what it holds is as it was


def test_the_host_that_reads_before_the_operator_ran_is_told_so(sim, device):
    x = torch.ones(3, device=device)
    with sim.held(torch.accelerator.current_stream(3)):
        y = x.exp()
        bytes_at(y.data_ptr())
        with pytest.raises(RuntimeError, match=r"written by aten::exp, which .* and has not run"):
            y + 1


def test_the_host_that_writes_memory_of_a_device_is_told_so(sim, device):
    x = torch.ones(3, device=device)
    ctypes.memset(x.data_ptr(), 0, 12)
    with pytest.raises(RuntimeError, match="the host touched memory of sim:3"):
        sim.check()
    assert x.tolist() == [1, 1, 1]


def test_a_kernel_of_the_cpu_on_memory_of_a_device_is_told_so(sim, device):
    x = torch.ones(3, 3, device=device)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    torch.ops.aten.tril_.default.redispatch(keys, x, 0)
    with pytest.raises(RuntimeError, match="the host touched memory of sim:3"):
        torch.accelerator.synchronize(3)


def test_freed_memory_is_closed_too(sim, device):
    x = torch.ones(3, device=device)
    address = x.data_ptr()
    sim.synchronize()
    del x
    bytes_at(address)
    with pytest.raises(RuntimeError, match=r"the host touched memory of sim:3 \(freed\)"):
        sim.check()


def test_a_fault_that_is_no_devices_ends_the_process_as_ever():
    load = "import ctypes, torch; from tests.device import load; load(); torch.ones(1, device='sim')"
    program = f"{load}; ctypes.string_at(16, 4)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -11
