"""Regions in regions, what is kept, selective contexts, hooks of others, and traces."""
from __future__ import annotations

import functools

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.graph import allow_mutation_on_saved_tensors, disable_saved_tensors_hooks, save_on_cpu
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torchckpt
from tests.helpers import Block, assert_program_transparent, assert_transparent, leaf, run
from tests.regions.autograd.test_saved_tensor_hooks import Recording
from tests.regions.moved.calls import by_default, moved, sizes
from torchckpt import graph
from torchckpt.errors import TransformError
from torchckpt.regions.moved.region import Moved
from torchckpt.regions.private import heeds_hooks
from torchckpt.testing import count_recomputes, saved_bytes

of_torch = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)


@pytest.fixture
def regions_made(monkeypatch):
    """All regions that move, in the order of their forwards."""
    made, init = [], Moved.__init__

    def noted(self, *args):
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Moved, "__init__", noted)
    return made


CHECKPOINTS = [torchckpt.checkpoint, of_torch]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=["ours", "torch's"])
def test_inside_of_a_checkpointed_region_nothing_is_saved_and_nothing_moves(device, checkpoint, regions_made):
    block = Block().to(device)

    def function(x):
        return by_default(block, x.exp()).sin()

    assert_transparent(checkpoint, function, leaf(3, 4, device=device), modules=[block])
    assert len(regions_made) == 1  # of the plain call


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=["ours", "torch's"])
def test_a_checkpointed_region_inside_moves_its_inputs(device, checkpoint):
    first, second = Block().to(device), Block().to(device)

    def function(x):
        return second(checkpoint(first, x.exp())).sin()

    with count_recomputes() as recomputes:
        assert_transparent(moved, function, leaf(3, 4, device=device), modules=[first, second])
    assert recomputes.total == (2 if checkpoint is torchckpt.checkpoint else 0)  # of the plain call, too
    region = Moved(1)
    loss = region.forward(lambda x: checkpoint(first, x.exp()).sum(), (leaf(3, 4, device=device),), {})
    assert sizes(region) == [48]  # the result of exp, which exp saves, too
    region.release()
    loss.backward()


def test_regions_three_deep(call, device):
    blocks = [Block().to(device) for _ in range(3)]

    def program(call, x):
        return call(lambda x: blocks[0](call(lambda x: blocks[1](call(blocks[2], x.sin())), x.exp())).exp(), x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=blocks)


def test_a_region_inside_of_one_that_moves_is_a_part_of_it(device, regions_made):
    block, x = Block().to(device), leaf(3, 4, device=device)
    by_default(lambda x: by_default(block, x), x).sum().backward()
    assert len(regions_made) == 1


def test_what_is_kept_in_a_region_inside_goes_with_the_rest(device):
    first, second = Block().to(device), Block().to(device)

    def function(x):
        return torchckpt.checkpoint(lambda x: second(torchckpt.keep(first, x)).exp(), x.sin())

    assert_transparent(moved, function, leaf(3, 4, device=device), modules=[first, second])
    region = Moved(1)
    x = leaf(3, 4, device=device)
    loss = region.forward(lambda x: torchckpt.checkpoint(lambda x: torchckpt.keep(torch.exp, x).sin(), x), (x * 2,), {})
    assert sizes(region) == [48, 48]  # the input, and the result of exp, which the region keeps
    loss.sum().backward()


def test_what_is_kept_is_read_by_the_replay_of_each_region_around_it(call, device):
    first, second = Block().to(device), Block().to(device)

    def function(x):
        return torchckpt.checkpoint(lambda x: torchckpt.checkpoint(inner, x).exp(), x.sin())

    def inner(x):
        return second(torchckpt.keep(first, x)).exp()

    assert_transparent(call, function, leaf(3, 4, device=device), modules=[first, second])


def test_keep_alone_is_the_plain_call(device):
    block = Block().to(device)
    assert_transparent(moved, lambda x: torchckpt.keep(block, x).sin(), leaf(3, 4, device=device), modules=[block])


def test_a_region_in_what_a_checkpointed_one_keeps_moves(device, regions_made):
    block, x = Block().to(device), leaf(3, 4, device=device)

    def function(x):
        return torchckpt.keep(lambda x: by_default(block, x), x).exp()

    expected = run(lambda x: block(x).exp(), x, modules=[block])
    received = run(functools.partial(torchckpt.checkpoint, function), x, modules=[block])
    assert all(map(torch.equal, received.parameters, expected.parameters))
    assert len(regions_made) == 1


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=["ours", "torch's"])
def test_selective_contexts_inside(device, checkpoint):
    block = Block().to(device)
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def function(x):
        return checkpoint(block, x.sin(), context_fn=contexts).exp()

    assert_transparent(moved, function, leaf(3, 4, device=device), modules=[block])


@pytest.mark.skipif(not heeds_hooks, reason="torch has it from 2.15 on")
def test_what_selective_contexts_keep_goes_if_they_heed_hooks(device):
    block = Block().to(device)

    def moved_bytes(**options):
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default])
        region, x = Moved(1), leaf(3, 4, device=device)
        checkpoint = functools.partial(torchckpt.checkpoint, block, context_fn=contexts, **options)
        output = region.forward(checkpoint, (x * 2,), {})
        return sum(sizes(region)), output

    assert moved_bytes(respect_saved_tensors_hooks=True)[0] == moved_bytes()[0] + 48


# hooks around ---------------------------------------------------------------------------------------------------------


def test_hooks_around_see_what_stays_once_and_unpack_it(device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    mask = torch.rand(3, 4, device=device)
    with (hooks := Recording()):
        output = by_default(lambda x, mask: block(x) * mask, x, mask)
    seen = {tensor.data_ptr() for tensor in (x, mask, block.first.weight, block.second.weight)}
    assert set(hooks.packed) <= seen | {block.first.bias.data_ptr(), block.second.bias.data_ptr()}
    assert {x.data_ptr(), mask.data_ptr(), block.second.weight.data_ptr()} <= set(hooks.packed)
    output.sum().backward()
    assert sorted(hooks.unpacked) == sorted(hooks.packed)


def test_saved_bytes_are_those_that_stay(device):
    block, mask = Block().to(device), torch.rand(3, 4, device=device)
    x = leaf(3, 4, device=device)
    with saved_bytes() as of_plain:
        block(x) * mask
    with saved_bytes() as of_region:
        by_default(lambda x: block(x) * mask, x)
    assert of_plain.total > of_region.total == 2 * 48  # the input and the mask


def test_save_on_cpu_around(call, device):
    block = Block().to(device)

    def program(call, x):
        with save_on_cpu():
            return call(block, x.exp()).sin()

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


def test_where_changes_of_saved_tensors_are_allowed_nothing_moves(device, regions_made):
    x = leaf(3, 4, device=device)
    with allow_mutation_on_saved_tensors():
        y = x * 2
        loss = by_default(torch.sin, y).sum()
        with torch.no_grad():
            y.zero_()
        loss.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
    assert regions_made == []


def test_where_hooks_are_forbidden_a_region_is_an_error(device):
    with disable_saved_tensors_hooks("no hooks here"), pytest.raises(RuntimeError, match="no hooks here"):
        by_default(torch.exp, leaf(3, device=device))
    by_default(torch.exp, leaf(3, device=device)).sum().backward()


# traces and transforms ------------------------------------------------------------------------------------------------


def test_a_traced_call_is_the_plain_one(regions_made):
    block, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.randn(3, 4)
    torchckpt.offload_module(block, min_bytes=1)
    step = graph.rematerialize(torch.nn.Sequential(block, torch.nn.Linear(4, 4)), x, budget="100%")
    step(x).sum().backward()
    assert regions_made == []


def test_an_exported_model_has_no_regions():
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    expected = torch.export.export(block, (torch.randn(3, 4),)).graph_module.code
    torchckpt.offload_module(block, min_bytes=1)
    assert torch.export.export(block, (torch.randn(3, 4),)).graph_module.code == expected


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transforms_are_refused(device, transform):
    with pytest.raises(TransformError, match="a region cannot be entered under vmap"):
        transform(lambda x: by_default(torch.exp, x).sum())(torch.ones(3, 2, device=device))


def test_a_stage_of_a_pipe_may_have_regions_that_move(device, regions_made):
    def losses(wrap):
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Dropout(0.2)) for _ in range(4)]
        for block in blocks if wrap else ():
            torchckpt.offload_module(block, min_bytes=1)
        pipe = torchckpt.Pipe(torch.nn.Sequential(*blocks), [2, 2], [device, device], chunks=3, checkpoint="never")
        torch.manual_seed(1)
        x = torch.randn(6, 4).to(device)
        loss = pipe.step(x, x, loss_fn=torch.nn.functional.mse_loss)
        return [loss, *(parameter.grad for parameter in pipe.parameters())]

    assert all(map(torch.equal, losses(True), losses(False)))
    assert len(regions_made) == 12
