"""Tensors that consist of others: what is inside goes, and the wrapper is made again."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import assert_equal, leaf, parameters_of
from tests.regions.moved.calls import let_cpu_move, moved, sizes
from tests.settings import with_gloo
from torchckpt import offload_module
from torchckpt.errors import RecomputationError
from torchckpt.regions.moved.region import Moved


class Pair(torch.Tensor):
    """Two tensors in one, which operators work on one by one."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device, strides=a.stride())

    def __init__(self, a, b):
        self.a, self.b, self.kind = a, b, "pair"

    def __repr__(self):
        return f"Pair({self.a}, {self.b})"

    def __tensor_flatten__(self):
        return ["a", "b", "kind"], {"of": "test"}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        assert (context, inner["kind"]) == ({"of": "test"}, "pair")
        return cls(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def of(name):
            tree = torch.utils._pytree.tree_map_only(Pair, lambda pair: getattr(pair, name), (args, kwargs or {}))
            return func(*tree[0], **tree[1])

        a, b = of("a"), of("b")
        return torch.utils._pytree.tree_map(
            lambda one, other: Pair(one, other) if isinstance(one, torch.Tensor) else one, a, b
        )


def pair(device):
    return Pair(torch.rand(4, 8, device=device), torch.rand(4, 8, device=device)).requires_grad_()


def through(call, x):
    output = call(lambda x: (x.exp() * 2).sin(), x)
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output))
    return gradient


def test_both_tensors_of_a_wrapper_go_and_it_is_made_again(device):
    x = pair(device)
    expected, received = through(lambda f, x: f(x), x), through(moved, x)
    assert type(received) is Pair
    assert torch.equal(received.a, expected.a)
    assert torch.equal(received.b, expected.b)
    region = Moved(1)
    output = region.forward(lambda x: (x.exp() * 2).sin(), (x,), {})
    assert sizes(region) == [128] * 4
    region.release()
    assert all(storage.is_away for storage in region._moving())
    torch.autograd.grad(output, x, torch.ones_like(output))


def test_a_wrapper_in_a_wrapper(device):
    x = Pair(pair(device).detach(), pair(device).detach()).requires_grad_()
    expected, received = through(lambda f, x: f(x), x), through(moved, x)
    assert torch.equal(received.a.b, expected.a.b)
    assert torch.equal(received.b.a, expected.b.a)


def test_a_wrapper_that_is_changed_in_place_is_an_error(device):
    x, region = pair(device), Moved(1)
    output = region.forward(torch.exp, (x,), {})
    with torch.no_grad():
        output.add_(1)
    loss = output * 1
    del output
    region.release()
    with pytest.raises(RecomputationError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x, torch.ones_like(loss))


@pytest.fixture
def cpu_moves(monkeypatch):
    let_cpu_move(monkeypatch)


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.usefixtures("cpu_moves")
def test_a_jagged_tensor_keeps_its_offsets():
    def gradients(call):
        torch.manual_seed(0)
        linear, rows = nn.Linear(4, 4), [leaf(3, 4), leaf(2, 4)]
        jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        output = call(lambda x: (linear(x).sin() * x).tanh(), jagged)
        output.values().sum().backward()
        return [*(row.grad for row in rows), linear.weight.grad, linear.bias.grad]

    assert_equal(gradients(moved), gradients(lambda f, x: f(x)))
    region = Moved(1)
    jagged = torch.nested.as_nested_tensor([leaf(3, 4), leaf(2, 4)], layout=torch.jagged)
    output = region.forward(lambda x: x.sin().cos(), (jagged,), {})
    assert sizes(region) == [80] * 2
    del output


# over ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.__version__ < "2.12", reason="this torch flattens no sharded dimension")
@with_gloo
@pytest.mark.usefixtures("cpu_moves")
def test_a_dtensor_that_flattens_a_sharded_dimension(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    def gradient(call):
        x = distribute_tensor(torch.arange(24.0).view(2, 3, 4), mesh, [Shard(1)]).requires_grad_()
        out = call(lambda x: (x * 2).flatten(0, 1).sin().tanh(), x)
        out.sum().backward()
        return [x.grad.full_tensor(), out.full_tensor()]

    assert_equal(gradient(moved), gradient(lambda f, x: f(x)))


@with_gloo
@pytest.mark.usefixtures("cpu_moves")
def test_dtensors(mesh):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def gradients(call):
        torch.manual_seed(0)
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]).requires_grad_()
        weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()
        call(lambda x: ((x * 2).sin() @ weight).tanh().exp(), x).sum().backward()
        return [x.grad, weight.grad]

    received, expected = gradients(moved), gradients(lambda f, x: f(x))
    assert all(isinstance(gradient, DTensor) for gradient in received)
    assert all(torch.equal(*pair) for pair in zip(map(local, received), map(local, expected)))
    region = Moved(1)
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]).requires_grad_()
    output = region.forward(lambda x: (x * 2).sin().exp(), (x,), {})
    assert sizes(region) == [128] * 2
    del output


def local(tensor):
    return tensor.to_local()


@with_gloo
@pytest.mark.usefixtures("cpu_moves")
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_what_fsdp_gathers_stays(mesh, monkeypatch, inside, reshards):
    """With fully_shard around the regions, or inside of them."""
    from torch.distributed.fsdp import fully_shard

    found, send = [], Moved.send

    def noted(self):
        found.append(sorted(storage.size for storage in self._moving()))
        send(self)

    def gradients(moves):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        for block in blocks:
            if moves:
                offload_module(block, min_bytes=1)
            fully_shard(block[0] if inside else block, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        x = leaf(4, 8)
        model(x * 1).sum().backward()
        return [x.grad, *(local(parameter.grad) for parameter in parameters_of([model]))]

    expected = gradients(False)
    monkeypatch.setattr(Moved, "send", noted)
    assert_equal(gradients(True), expected)
    # the input, what GELU takes, the mask, and what is left of it; no weight, of 512 bytes
    assert found[0] == [128, 256, 256, 256]
