"""DDP, FSDP2 and FSDP1 on two ranks, with gloo: as the same wrapper without checkpointing, to the bit."""
from __future__ import annotations

import functools
import traceback
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.ranks import on_ranks
from tests.distributed.stages import equal
from tests.helpers import plain
from tests.settings import with_gloo
from torchckpt import checkpoint, checkpoint_module, keep
from torchckpt.errors import RecomputationError
from torchckpt.testing import count_recomputes

RANKS, STEPS = 2, 2

pytestmark = with_gloo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.uses_all, self.kept = True, plain

    def mixed(self, x):
        return self.second(nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.2))

    def forward(self, x):
        h = x + nn.functional.dropout(self.kept(self.mixed, self.norm(x)), 0.2)
        return self.unused(h).tanh() if self.uses_all else h.tanh()


class Forgetful(Block):
    """Counts its calls, and does not say that the replay is none."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x * self.calls)


class Averages(nn.Module):
    """Has an average that it uses, and a BatchNorm: DDP sends their buffers from rank 0 to the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0))
        return self.norm(self.linear(x) * self.average.clone()).tanh()


class Told(Averages):
    """An average whose step, and the mode of whose norm, the loop sets behind a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 1

    def forward(self, x):
        return super().forward(x * self.step)


def told(use_orig_params, call):
    """What two forwards leave before their backward, of layers that FSDP1 wraps one by one."""
    model = nn.Sequential(*(flat(Told(), use_orig_params) for _ in range(2)))
    left = []
    for _ in range(STEPS):
        losses = []
        for step in (1, 3):
            torch.manual_seed(step)
            x = torch.randn(4, 8, requires_grad=True)
            losses.append(call(model, x).sum())
            for layer in model:
                layer.module.step, layer.module.training = step + 1, step == 3
            left.append(x)
        sum(losses).backward()
        for layer in model:
            layer.module.training = True
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*(x.grad for x in left), *grads, *model.buffers()]


class Model(nn.Module):
    """Three blocks; ``call`` is how they are called."""

    def __init__(self, uses_all: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.call = nn.ModuleList(Block() for _ in range(3)), None
        self.head = nn.Linear(8, 1)
        for block in self.blocks:
            block.uses_all = uses_all

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return self.head(x)


# what runs on each rank -----------------------------------------------------------------------------------------------


def ddp(model, **options):
    return nn.parallel.DistributedDataParallel(model, **options)


def fsdp2(model, reshard=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def flat(module, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp1(model, use_orig_params):
    model.blocks = nn.ModuleList(flat(block, use_orig_params) for block in model.blocks)
    return flat(model, use_orig_params)


def by_module(model, **options):
    for block in model.blocks:
        checkpoint_module(block, **options)


def by_call(model, **options):
    model.call = functools.partial(checkpoint, **options)


def closing_over_a_block(model):
    model.call = lambda block, x: checkpoint(lambda x: block(x), x)


def closing_over_the_model(model):
    model.call = lambda block, x: checkpoint(lambda x: next(each for each in model.blocks if each is block)(x), x)


def with_a_kept_part(model):
    for block in model.blocks:
        block.kept = keep
        checkpoint_module(block)


def whole(model, **options):
    checkpoint_module(model, **options)


def train(model, wrap, prepare):
    """Losses and gradients of a few steps, how often each gradient hook fired, and how often regions were replayed."""
    prepare(model)
    wrapped = wrap(model)
    fired: Counter[str] = Counter()
    for name, parameter in wrapped.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    seen = []
    with count_recomputes() as recomputes:
        for step in range(STEPS):
            torch.manual_seed(100 * step + dist.get_rank())
            loss = wrapped(torch.randn(4, 8)).square().mean()
            loss.backward()
            gradients = [parameter.grad for parameter in wrapped.parameters()]
            seen += [loss.detach(), *(local(gradient) for gradient in gradients if gradient is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return [tensor.clone() for tensor in seen], fired, recomputes.total


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def accumulate(early_stop):
    """Losses, gradients and buffers of a DDP that is inside of a region, or of none. Each second step is sent."""
    model = ddp(Averages())
    if early_stop is not None:
        checkpoint_module(model, early_stop=early_stop)
    seen = []
    for step in range(5):
        torch.manual_seed(100 * step + dist.get_rank())
        with nullcontext() if step % 2 else model.no_sync():
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(x.grad.clone() for x in model.parameters()), *(b.clone() for b in model.buffers())]
    return seen


CASES = {
    "ddp": (ddp, True),
    "ddp find_unused_parameters": (functools.partial(ddp, find_unused_parameters=True), False),
    "ddp static_graph": (functools.partial(ddp, static_graph=True), True),
    "ddp gradient_as_bucket_view": (functools.partial(ddp, gradient_as_bucket_view=True), True),
    "fsdp2": (fsdp2, True),
    "fsdp2 without resharding": (functools.partial(fsdp2, reshard=False), True),
}
WAYS = {
    "checkpoint_module": (by_module, 3),
    "checkpoint_module values": (functools.partial(by_module, determinism_check="values"), 3),
    "checkpoint": (by_call, 3),
    "checkpoint values": (functools.partial(by_call, determinism_check="values"), 3),
    "whole model": (whole, 1),
    "with a kept part": (with_a_kept_part, 3),
    "no early stop": (functools.partial(by_module, early_stop=False), 3),
}


def reports():
    """For each case and way: what is different from the wrapper without checkpointing."""
    found = {}
    for case, (wrap, uses_all) in CASES.items():
        expected, hooks, _ = train(Model(uses_all), wrap, lambda model: None)
        for way, (prepare, regions) in WAYS.items():
            try:
                tensors, fired, recomputes = train(Model(uses_all), wrap, prepare)
            except Exception:
                found[case, way] = traceback.format_exc()
                continue
            equal = len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))
            found[case, way] = {
                "equal": equal,
                "hooks fired": fired == hooks and set(fired.values()) == {STEPS},
                "recomputes per step and region": recomputes / STEPS / regions,
            }
    return found


def error_of_a_forgetful_block():
    """What is raised under FSDP2 where a replay has other values than its forward."""
    model = Model()
    model.blocks[1] = Forgetful()
    try:
        train(model, fsdp2, functools.partial(by_module, determinism_check="values"))
    except RecomputationError as error:
        return str(error)
    return "nothing"


FLAT_WAYS = {"a block": closing_over_a_block, "the model": closing_over_the_model, "checkpoint": by_call}


def flat_reports():
    """For each way under FSDP1, with views of the parameters and with parameters: whether all is equal."""
    found = {}
    for use_orig_params in (False, True):
        wrap = functools.partial(fsdp1, use_orig_params=use_orig_params)
        expected, _, _ = train(Model(), wrap, lambda model: None)
        for way, prepare in FLAT_WAYS.items():
            try:
                tensors, _, recomputes = train(Model(), wrap, prepare)
            except Exception:
                found[way, use_orig_params] = traceback.format_exc()
                continue
            equal = len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))
            found[way, use_orig_params] = equal, recomputes / STEPS / 3
        expected = told(use_orig_params, plain)
        found["buffers", use_orig_params] = all(map(torch.equal, told(use_orig_params, checkpoint), expected))
    return found


def work(rank: int):
    sent = [accumulate(early_stop) for early_stop in (None, True, False)]
    return {**reports(), "sent": sent, "fsdp1": flat_reports(), "forgetful": error_of_a_forgetful_block()}


# what is held of it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The reports of all ranks."""
    return on_ranks(work, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_wrapper_with_checkpointing_is_the_wrapper_without(reported, case, way):
    for report in reported:
        assert report[case, way] == {"equal": True, "hooks fired": True, "recomputes per step and region": 1}


def test_replays_send_what_their_forwards_have_sent_and_prepare_no_reduction(reported):
    for expected, *others in (report["sent"] for report in reported):
        assert all(map(equal, others, [expected] * 2))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", FLAT_WAYS)
def test_fsdp1_with_checkpointing_is_fsdp1_without(reported, way, use_orig_params):
    for report in reported:
        assert report["fsdp1"][way, use_orig_params] == (True, 1)
        assert report["fsdp1"]["buffers", use_orig_params]  # and settings


def test_values_are_compared_under_fsdp2_too(reported):
    for report in reported:
        assert "the replay of region 'FSDPForgetful.forward' did not save what its forward saved" in report["forgetful"]
        assert "float32 (4, 8) on cpu, with other values" in report["forgetful"]
