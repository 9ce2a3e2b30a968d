"""Saved-tensor hooks around a region see its boundary, once, and nothing of what is inside."""
from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.nn.functional import dropout

from tests.helpers import Block, assert_equal, assert_program_transparent, by_hand, leaf, plain, run
from tests.slow import few
from torchckpt import checkpoint
from torchckpt.testing import saved_bytes


class Recording(saved_tensors_hooks):
    """Hooks that write down the storages they pack and unpack, and change nothing."""

    def __init__(self) -> None:
        self.packed: list[int] = []
        self.unpacked: list[int] = []
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor):
        self.packed.append(tensor.untyped_storage().data_ptr())
        return tensor.detach()

    def _unpack(self, tensor):
        self.unpacked.append(tensor.untyped_storage().data_ptr())
        return tensor


def storages(*tensors):
    return sorted(tensor.untyped_storage().data_ptr() for tensor in tensors)


@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
def test_boundary_is_packed_once_and_unpacked_once(call, device):
    block, x, y = Block().to(device), leaf(3, 4, device=device), torch.randn(4, device=device)
    with (hooks := Recording()):
        output = call(lambda x, others: block(x) * others["y"] * others["scale"], x, {"y": y, "scale": 2})
    assert sorted(hooks.packed) == storages(x, y)
    output.sum().backward()
    assert sorted(hooks.unpacked) == storages(x, y)
    assert len(hooks.packed) == 2


def test_plain_call_packs_more_than_the_boundary(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    with (hooks := Recording()):
        plain(block, x)
    assert len(hooks.packed) > 1


def test_nested_regions_pack_the_outer_boundary(device):
    inner, outer, x = Block().to(device), Block().to(device), leaf(3, 4, device=device)
    with (hooks := Recording()):
        output = checkpoint(lambda x: outer(checkpoint(inner, x.exp())), x)
    output.sum().backward()
    assert hooks.packed == hooks.unpacked == storages(x)


def test_chain_of_regions_packs_each_boundary(device):
    blocks, x = [Block().to(device) for _ in range(3)], leaf(3, 4, device=device)
    hidden = [x]
    with (hooks := Recording()):
        for block in blocks:
            hidden.append(checkpoint(block, hidden[-1]))
    assert hooks.packed == [tensor.untyped_storage().data_ptr() for tensor in hidden[:-1]]


def test_hooks_inside_the_function_are_its_own_business(device):
    block, x = Block().to(device), leaf(3, 4, device=device)

    def program(call, x):
        def function(x):
            with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
                return block(x)

        return call(lambda x: function(x).exp(), x)

    assert_program_transparent(checkpoint, program, x, modules=[block])


def test_hooks_that_change_what_they_keep(call, device):
    block = Block().to(device)

    def pack(tensor):
        return tensor.dtype, tensor.double().cpu()  # a dropout on CUDA saves a mask, in bool

    def unpack(kept):
        return kept[1].to(device, kept[0])

    def program(call, x):
        with saved_tensors_hooks(pack, unpack):
            return call(block, x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


def test_save_on_cpu(call, device):
    block = Block().to(device)

    def program(call, x):
        with save_on_cpu():
            return call(block, x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


@pytest.mark.accelerator
def test_save_in_pinned_memory(call, accelerator):
    block, x = Block().to(accelerator), leaf(3, 4, device=accelerator)

    def program(x):
        with save_on_cpu(pin_memory=True, device_type=accelerator.type):
            return call(block, x)

    # Without the hooks: they make a transposed weight contiguous, and its product may round otherwise.
    assert_equal(run(program, x, modules=[block]), run(block, x, modules=[block]))


def test_save_on_cpu_of_nested_regions(device):
    inner, outer = Block().to(device), Block().to(device)

    def program(call, x):
        with save_on_cpu():
            return call(lambda x: outer(call(inner, x.exp())).exp(), x)

    assert_program_transparent(checkpoint, program, leaf(3, 4, device=device), modules=[inner, outer])


def test_double_backward_under_hooks(device):
    block, x = Block().to(device), leaf(3, 4, device=device)

    def second(call):
        torch.manual_seed(1)
        with save_on_cpu():
            (first,) = torch.autograd.grad(call(block, x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), [x, block.first.weight])

    assert_equal(second(checkpoint), second(plain))


def test_hooks_disabled_around_the_region_are_the_error_of_torch():
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        with pytest.raises(RuntimeError, match="no hooks here"):
            checkpoint(torch.exp, leaf(3))
    assert checkpoint(torch.exp, leaf(3)).requires_grad


@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
def test_saved_bytes_are_those_of_the_boundary(call, device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    for boundary in (x, x * 2):
        with saved_bytes() as saved:
            call(block, boundary)
        assert saved.total == x.nbytes


def changes_what_it_saved(h):
    saved = h * 1
    y = saved.sin()
    saved.mul_(2)
    return y * saved.exp()


def changes_its_input(h):
    y = h.sin()
    h.mul_(2)
    return y * h.exp()


def changes_its_output(h):
    y = dropout(h.exp(), 0.5)
    z = y.sin()
    y.mul_(h).sin_()
    return z * y


AFTERWARDS = {
    "nothing": lambda h, y: None,
    "the input": lambda h, y: h.mul_(3),
    "the output": lambda h, y: y.mul_(3),
    "a leaf": lambda h, y: None,
}


@few(8)
@pytest.mark.parametrize("afterwards", AFTERWARDS)
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("function", [changes_what_it_saved, changes_its_input, changes_its_output])
def test_mutation_of_saved_tensors_where_torch_allows_it(function, afterwards, is_dropped, call, device):
    def program(call, x):
        h = x.sin() if afterwards != "a leaf" else x.detach() * 1
        y = call(lambda h: call(function, h * 1.5).cos(), h) * call(function, h) * x
        z = y.exp()
        AFTERWARDS[afterwards](h, y)
        if is_dropped:
            del h
        return z.sin()

    def gradient(call):
        torch.manual_seed(1)
        x = leaf(6, device=device)
        with allow_mutation_on_saved_tensors():
            program(call, x).sum().backward()
        return x.grad

    assert torch.equal(twice_the_same(lambda: gradient(call)), twice_the_same(lambda: gradient(plain)))


def twice_the_same(result):
    """On a loaded machine one plain program of a hundred is wrong on the simulated device, which gives freed memory out
    at once: torch tells saved tensors apart by their addresses (``_MutationContext``)."""
    first = result()
    while not torch.equal(first, again := result()):
        first = again
    return first


def test_a_region_that_runs_a_backward_itself_where_mutation_is_allowed():
    """The replay inside of the forward saves copies, whose versions a second replay compared with those of weights."""
    layer, x = torch.nn.Linear(4, 4), leaf(3, 4)
    with torch.no_grad():
        layer.weight.mul_(2)

    def function(x):
        y = layer(x).sin()
        return y * torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    with allow_mutation_on_saved_tensors():
        assert_program_transparent(checkpoint, lambda call, x: call(function, x), x, modules=[layer])
