"""Bytes, to the byte, as the device's allocator counts them: at each boundary, after a forward, and left over."""
from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from tests.accelerator import block_bytes
from tests.helpers import leaf
from tests.models import MODELS
from tests.models.image import Basic
from tests.models.sequence import Block
from torchckpt import offload, offload_layers
from torchckpt.regions.flags import local
from torchckpt.regions.moved.copies import copies_of
from torchckpt.regions.private import storage_key

pytestmark = pytest.mark.accelerator

LEAST = 64


class Dropping(Basic):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


def gpt(device):
    return MODELS["gpt6"](device=device, width=16), Block


def resnet(device):
    case = MODELS["resnet20"](device=device)
    for block in case.model.modules():
        if isinstance(block, Basic):
            block.__class__ = Dropping
    return case, Dropping


CASES = [gpt, resnet]


def allocated():
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


@pytest.fixture(autouse=True)
def fresh_order():
    """No region of another test is there."""
    gc.collect()
    local.thread.order = None
    yield
    local.thread.order = None


def forward(case):
    inputs = case.inputs  # which are drawn the first time
    torch.manual_seed(1)
    return case.loss(case.model(*inputs))


def let_go():
    """Let go of the last two regions, too."""
    for region in list(local.thread.order._regions.values()):
        region.release()


class Saved:
    """What the plain model saves, inside of its blocks and outside, by storage."""

    def __init__(self, model, of):
        self.inside, self.outside, self.now = {}, {}, None
        self.handles = [
            handle
            for block in model.modules() if isinstance(block, of)
            for handle in (
                block.register_forward_pre_hook(lambda *_: setattr(self, "now", self.inside)),
                block.register_forward_hook(lambda *_: setattr(self, "now", self.outside)),
            )
        ]
        self.now = self.outside

    def pack(self, tensor):
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, nn.Parameter):
            self.now[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    def moving(self, buffers):
        """The bytes of the storages that blocks alone have saved, each; all that nobody holds but the graph."""
        stay = {storage_key(buffer) for buffer in buffers} | self.outside.keys()
        return [size for key, size in self.inside.items() if key not in stay and size >= LEAST]


@pytest.mark.parametrize(("make", "of_caller"), [(gpt, 2 * 6 * 16 * 4), (resnet, 0)])
def test_what_is_on_the_device_after_a_forward_is_what_stays(accelerator, make, of_caller):
    """``of_caller``: the bytes of the first block's input, which GPT's forward holds while its blocks run."""
    case, of = make(accelerator)
    forward(case)  # memory that libraries take once
    before = allocated()
    saved = Saved(case.model, of)
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = forward(case)
    kept = allocated() - before
    for handle in saved.handles:
        handle.remove()
    moving = saved.moving(case.model.buffers())
    del loss
    assert allocated() == before
    with offload_layers(case.model, of, min_bytes=LEAST):
        loss = forward(case)
        let_go()
        regions = list(local.thread.order._regions.values())
        assert sum(sum(region.away_bytes.values()) for region in regions) == sum(moving) - of_caller
        assert allocated() - before == kept - sum(map(block_bytes, moving)) + block_bytes(of_caller)
        assert sum(moving) > kept / 2
        del loss, regions
    assert allocated() == before


@pytest.mark.parametrize("make", CASES)
def test_gradients_are_those_of_the_plain_model_and_nothing_is_left(accelerator, make):
    case, of = make(accelerator)

    def step():
        forward(case).backward()
        gradients = [parameter.grad.clone() for parameter in case.model.parameters()]
        case.model.zero_grad(set_to_none=True)
        return [*gradients, *(buffer.clone() for buffer in case.model.buffers())]

    state = {name: value.clone() for name, value in case.model.state_dict().items()}
    expected = [step() for _ in range(3)]
    case.model.load_state_dict(state)
    with offload_layers(case.model, of, min_bytes=1):
        for step_expected in expected:
            assert all(map(torch.equal, step(), step_expected))
    before = allocated()
    with offload_layers(case.model, of, min_bytes=1):
        step()
    assert allocated() == before
    torch.accelerator.synchronize()
    arena = copies_of(torch.device(accelerator)).arena
    arena._settle()
    assert arena.used_bytes == 0


# boundary by boundary -------------------------------------------------------------------------------------------------

A = 1 << 20  # bytes of an activation


class Layer(nn.Module):
    """Saves two activations: what tanh returns, and what exp returns."""

    def forward(self, x):
        return x.tanh().exp()


def levels(calls, x, backward):
    """Bytes, in activations, before each call of a chain, after the last one, and when each backward begins."""
    before, seen = allocated(), []

    def look(*_):
        seen.append(round((allocated() - before) / A, 2))  # beside single numbers

    for call in calls:
        look()
        x = call(x)
        x.register_hook(look)
    look()
    if backward:
        x.sum().backward()
    return seen


def test_at_each_boundary(accelerator):
    x = leaf(A // 4, device=accelerator)
    keep_all = levels([Layer()] * 5, x, backward=False)
    assert keep_all == [0, 2, 4, 6, 8, 10]
    seen = levels([lambda x: offload(Layer(), x, min_bytes=1)] * 5, x, backward=True)
    # what the last two have saved, the input of the next one among it
    assert seen[:6] == [0, 2, 4, 4, 4, 4]
    # the last two regions; then one, its gradient, and the one before, of a node that is just done
    assert seen[6:] == [4] * 5


def test_bytes_do_not_depend_on_how_slow_the_copies_are(accelerator, request):
    if accelerator.type != "sim":
        pytest.skip("of the simulated device")
    sim, x = request.getfixturevalue("sim"), leaf(A // 4, device=accelerator)
    calls = [lambda x: offload(Layer(), x, min_bytes=1)] * 6
    expected = levels(calls, x, backward=True)
    from tests.device import Rates

    for seconds in (0.002, 0.01):
        with sim.durations(Rates(seconds_per_copy=seconds)):
            assert levels(calls, x, backward=True) == expected
