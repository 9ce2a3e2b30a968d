"""Operators: each runs the CPU's kernel, in the thread of a stream; its result has the CPU's bits."""
from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.device import Counts
from tests.helpers import assert_equal


def on(device, value):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


X = torch.linspace(-2, 2, 24).view(4, 6)
I = torch.tensor([2, 0, 3])  # noqa: E741  # indices

OPERATORS = {
    "two tensors": lambda d: on(d, X) * on(d, X) + on(d, X[0]),
    "a number": lambda d: 2 * on(d, X) - 1.5,
    "a tensor of one element, of the CPU": lambda d: on(d, X) * torch.tensor(2.0),
    "a result of another dtype": lambda d: (on(d, X) > 0, on(d, X).long(), on(d, X).abs(), on(d, X).logical_not()),
    "several results": lambda d: torch.topk(on(d, X), 2),
    "a list of results": lambda d: torch.split_with_sizes_copy(on(d, X), [1, 3]),
    "a list of arguments": lambda d: torch.cat([on(d, X), on(d, X)], 1),
    "a sum of whole numbers": lambda d: (on(d, X) > 0).sum(),
    "a matrix product": lambda d: on(d, X) @ on(d, X).t(),
    "in place": lambda d: on(d, X.clone()).add_(1).mul_(on(d, X)).relu_(),
    "in place, a part": lambda d: on(d, X.clone()).index_fill_(0, on(d, I), 7.0),
    "into what is given": lambda d: torch.add(on(d, X), 1, out=torch.empty(4, 6, device=d)),
    "into what is given and too small": lambda d: torch.exp(on(d, X), out=torch.empty(0, device=d)),
    "indices": lambda d: on(d, X)[on(d, I)],
    "indices of the CPU": lambda d: on(d, X)[I],
    "an assignment to indices": lambda d: on(d, X).index_put((on(d, I),), on(d, X[:3])),
    "views": lambda d: [on(d, X).t()[1:].unfold(1, 2, 1), torch.view_as_real(on(d, X).to(torch.complex64))],
    "a view of another dtype": lambda d: on(d, X).view(torch.int32),
    "made from nothing": lambda d: [torch.arange(5, device=d), torch.eye(3, device=d), torch.full((2,), 3.0, device=d)],
    "made from a list": lambda d: torch.tensor([1.0, 2.0], device=d),
    "cumulative": lambda d: [on(d, X).cumsum(0), on(d, X).cummax(1)],
    "sorted": lambda d: on(d, X).sort(1, descending=True),
    "norms": lambda d: [norm(on(d, X), (6,)) for norm in (nn.functional.layer_norm, nn.functional.rms_norm)],
    "softmax": lambda d: [on(d, X).softmax(1), on(d, X).log_softmax(1), on(d, X).logsumexp(1)],
    "a loss": lambda d: nn.functional.cross_entropy(on(d, X), on(d, torch.tensor([1, 2, 0, 5]))),
    "complex numbers": lambda d: on(d, torch.complex(X, X)).conj() * on(d, X),
    "half precision": lambda d: on(d, X.bfloat16()) @ on(d, X.bfloat16()).t(),
    "no elements": lambda d: on(d, X[:0]).exp().sum(0),
    "double precision": lambda d: on(d, X.double()).exp(),
    "convolutions": lambda d: [
        nn.functional.conv1d(on(d, X.view(1, 4, 6)), on(d, X.view(2, 4, 3))),
        nn.functional.conv2d(on(d, X.view(1, 2, 3, 4)), on(d, X.view(3, 2, 2, 2)), padding=1, stride=2),
        nn.functional.conv_transpose1d(on(d, X.view(1, 4, 6)), on(d, X.view(4, 2, 3))),
    ],
    "an average of bags": lambda d: nn.functional.embedding_bag(on(d, I), on(d, X), on(d, torch.tensor([0, 2]))),
    "whether tensors see the same bytes": lambda d: [torch.tensor(x.is_set_to(x[:])) for x in [on(d, X)]],
    "foreach": lambda d: torch._foreach_add([on(d, X), on(d, X)], 1.0),
}


@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS)
def test_results_are_the_cpus_and_nothing_waits(sim, call):
    expected = call("cpu")
    received = call("sim:1")
    assert sim.counts().synchronous == {}
    assert_equal(on("cpu", received), expected)


SYNCHRONOUS = {
    "aten::_local_scalar_dense": lambda d: on(d, X)[0, 0].item(),
    "aten::equal": lambda d: torch.equal(on(d, X), on(d, X)),
    "aten::nonzero": lambda d: on(d, X).nonzero(),
    "aten::masked_select": lambda d: on(d, X).masked_select(on(d, X) > 0),
    "aten::_unique2": lambda d: on(d, X).unique(),
    "aten::bincount": lambda d: on(d, I).bincount(),
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_depends_on_values_is_waited_for_and_counted_by_name(sim, name):
    call = SYNCHRONOUS[name]
    received = call("sim:1")
    assert sim.counts().synchronous == {name: 1}
    assert_equal(on("cpu", received), call("cpu"))


def test_counts(sim):
    x = torch.ones(3, device="sim:0")  # empty, and fill_
    sim.reset_counts()
    (x + 1).exp().view(3, 1)
    assert sim.counts() == Counts(queued=2, synchronous={}, waits=0, pins=0)


def test_each_wait_of_the_host_counts(sim):
    x = torch.ones(3, device="sim:0")
    event = torch.accelerator.current_stream(0).record_event()
    waits = [x.cpu, x[0].item, event.synchronize, torch.accelerator.current_stream(0).synchronize]
    for wait in waits:
        sim.reset_counts()
        wait()
        assert sim.counts().waits == 1, wait
    sim.reset_counts()
    torch.accelerator.synchronize(0)
    x.to("cpu", non_blocking=True)
    assert sim.counts().waits == 1


def test_each_allocation_of_pinned_memory_counts(sim):
    sim.reset_counts()
    pinned = torch.empty(3, pin_memory=True)
    pinned[1:].fill_(1)
    assert sim.counts().pins == 1


def test_strides_are_the_cpus(sim):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    weight = torch.randn(6, 3, 3, 3)
    for call in (
        lambda x, w: nn.functional.conv2d(x, w),
        lambda x, w: x.relu().permute(3, 1, 0, 2),
        lambda x, w: nn.functional.max_pool2d(x, 2),
        lambda x, w: torch.empty_like(x),
        lambda x, w: x.sum(0),
    ):
        assert call(x.to("sim:0"), weight.to("sim:0")).stride() == call(x, weight).stride()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_cells(sim, cell):
    # PyTorch splits them otherwise on accelerators: the last bits differ from the CPU's.
    torch.manual_seed(0)
    layer, x = cell(4, 8, 2), torch.randn(5, 3, 4)
    there = cell(4, 8, 2).to("sim:1")
    there.load_state_dict(layer.state_dict())
    for module, input in ((layer, x), (there, x.to("sim:1"))):
        output, _ = module(input)
        output.square().sum().backward()
    assert sim.counts().synchronous == {}
    for ours, theirs in zip(there.parameters(), layer.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


# errors ---------------------------------------------------------------------------------------------------------------


def test_a_wrong_call_fails_at_once_as_on_the_cpu(sim):
    for call in (
        lambda d: on(d, X) @ on(d, X),
        lambda d: on(d, X) + on(d, X.t()),
        lambda d: torch.cat([on(d, X), on(d, X.t())]),
        lambda d: nn.functional.conv2d(on(d, X.view(1, 2, 3, 4)), on(d, X.view(2, 3, 2, 2))),
    ):
        with pytest.raises(RuntimeError):
            call("cpu")
        with pytest.raises(RuntimeError):
            call("sim:0")
    assert sim.counts().synchronous == {}


def test_a_wrong_value_fails_in_the_stream_and_is_told_later(sim):
    x, index = on("sim:1", X), on("sim:1", torch.tensor([9]))
    with sim.held(torch.accelerator.current_stream(1)):
        x[index]  # nobody knows yet
    with pytest.raises(RuntimeError, match="sim:1 stream 0: aten::index: index 9 is out of bounds"):
        torch.accelerator.synchronize(1)
    assert torch.equal((x + 1).cpu(), X + 1)  # told once


def test_tensors_on_two_devices_are_an_error(sim):
    with pytest.raises(RuntimeError, match=r"aten::add got some on sim:0 and some on sim:1! Move them: tensor.to"):
        on("sim:0", X) + on("sim:1", X)
    with pytest.raises(RuntimeError, match=r"aten::add got some on sim:0 and one of shape \[4, 6\] on cpu! Move it"):
        on("sim:0", X) + X


def test_an_operator_that_the_cpu_has_no_kernel_for_is_an_error(sim):
    with pytest.raises(NotImplementedError, match="_fused_dropout has no kernel for the CPU, and so none for sim"):
        torch._fused_dropout(on("sim:0", X), 0.5)


def test_layouts_that_are_not_strided_are_an_error(sim):
    with pytest.raises(NotImplementedError, match="with arguments from the 'Sparsesim' backend"):
        torch.empty(3, layout=torch.sparse_coo, device="sim:0")


def defined(schema, cpu, meta):
    """An operator of that schema with kernels in Python, and the library that must live as long."""
    library = torch.library.Library("sim_test", "FRAGMENT")
    library.define(f"operator{schema}")
    library.impl("operator", cpu, "CPU")
    library.impl("operator", meta, "Meta")
    return library


def test_kernels_in_python_run_in_the_stream_too(sim):
    threads = []

    def plus_one(x):
        threads.append(threading.current_thread())
        return x + 1

    library = defined("(Tensor x) -> Tensor", plus_one, torch.empty_like)
    x = on("sim:0", X[0])
    with sim.held():
        received = torch.ops.sim_test.operator(x)
        assert threads == []
    assert torch.equal(received.cpu(), X[0] + 1)
    assert threads != [threading.current_thread()]
    library._destroy()


def test_an_operator_that_takes_the_place_of_another_is_known_as_itself(sim):
    def add_one(x):
        x.add_(1)

    for _ in range(10):  # the second schema may be where the first was
        library = defined("(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
        assert torch.equal(torch.ops.sim_test.operator(on("sim:0", X)).cpu(), X + 1)
        library._destroy()
        library = defined("(Tensor(a!) x) -> ()", add_one, lambda x: None)
        x = on("sim:0", X)
        assert torch.ops.sim_test.operator(x) is None
        assert torch.equal(x.cpu(), X + 1)
        library._destroy()
