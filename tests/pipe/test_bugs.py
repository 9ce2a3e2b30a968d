"""Bugs of pipelines that were found once, each with its history."""
from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from torchckpt.errors import ArgumentError, RecomputationError
from torchckpt.pipe import balance_by_bytes
from torchckpt.pipe.run import links
from torchckpt.pipe.skip import pop, stash

mse_loss = nn.functional.mse_loss


def penalty(copies: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Gradients of the square of a gradient, through two stages; with ``copies`` as on one GPU, where what goes from
    one to the other passes a Copy that copies nothing."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    pipe = torchckpt.Pipe(module, [2, 2], chunks=2)
    if copies:
        plain = torchckpt.pipe.run.pipeline.moved

        def moved(transfer, target):
            tensors = plain(transfer, target)
            return links.copy(transfer.place, None, target, None, tensors) if tensors else tensors

        monkeypatch.setattr(torchckpt.pipe.run.pipeline, "moved", moved)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    (gradient,) = torch.autograd.grad(pipe(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def test_double_backward_through_a_copy_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient was detached on its way between two stages on one GPU: silently wrong."""
    expected = penalty(False, monkeypatch)
    gradients = penalty(True, monkeypatch)
    assert all(torch.equal(gradient, other) for gradient, other in zip(expected, gradients) if gradient is not None)
    assert [gradient is None for gradient in expected] == [other is None for other in gradients]


class Scaled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def test_a_sequential_that_does_more_than_call_its_layers_is_an_error() -> None:
    """What it did of its own was dropped in silence."""
    text = "does more than call its layers\n  received: Scaled with a forward, parameters of its own"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        torchckpt.Pipe(Scaled())
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match="Sequential with hooks of its own"):
        torchckpt.Pipe(hooked)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), hooked), nn.Linear(2, 2))
    assert [layer.name for layer in torchckpt.Pipe(nested, split_nested=True).stages[0].layers] == ["0.0", "0.1", "1"]


class Tabled(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.arange(3.0)


def test_an_output_that_has_no_rows_is_an_error() -> None:
    """It was put together once for each micro-batch."""
    text = "no multiple of those of its micro-batch\n  received: shape (3,) of 2 rows, shape (3,) of 2"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2), Tabled()), chunks=2)(torch.ones(4, 2))
    flat = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Flatten(0, 1)), chunks=2)
    assert flat(torch.ones(5, 2)).shape == (10,)


def test_a_module_that_holds_a_pipe_does_not_move_it() -> None:
    """Only the pipeline's own methods were guarded."""
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2)))
    for move in (lambda: nn.ModuleList([pipe]).to("meta"), lambda: pipe.to_empty(device="meta")):
        with pytest.raises(ArgumentError, match="received: a move from cpu to meta"):
            move()
    assert next(nn.ModuleList([pipe]).double().parameters()).dtype == torch.float64


def apply_of_torch(parameter: Tensor) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # which not every build of torch can import

    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})


HOOKS = [lambda parameter: parameter.register_post_accumulate_grad_hook(lambda _: None), apply_of_torch]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("hook", HOOKS, ids=["hook", "torch"])
def test_a_step_refuses_hooks_that_would_run_once_a_micro_batch(hook: Any) -> None:
    """An optimizer in the backward changed parameters between a forward and its replay. torch's own was not seen: with
    one stage it stepped for each micro-batch, in silence."""
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2)), chunks=2)
    hook(pipe[0].weight)
    with pytest.raises(ArgumentError, match=re.escape("received: hooks on 0.weight\n")):
        pipe.step(torch.ones(4, 2), torch.ones(4, 2), loss_fn=mse_loss)


def test_a_target_may_be_named() -> None:
    """As for a schedule of torch: it was handed to the first layer, and the input taken for the target."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2)), chunks=2, reduce="sum")
    assert torch.equal(pipe.step(x, target=y, loss_fn=mse_loss), pipe.step(x, y, loss_fn=mse_loss))
    assert torch.allclose(pipe.step(x, y, loss_fn=mse_loss), 2 * pipe.step(x, y, loss_fn=mse_loss, reduce="mean"))


class Stash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        stash("a", x.exp())
        return x.tanh()


class Pop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.exp() + pop("a")).sin()


def test_a_layer_that_pops_cannot_be_a_region_by_itself() -> None:
    """Its replay was told to stash in a layer before, which it did. A whole model with skips can be one."""
    whole = nn.Sequential(nn.Linear(2, 2), Stash(), nn.Linear(2, 2), Pop(), nn.Linear(2, 2))
    torchckpt.testing.assert_transparent(whole, torch.randn(3, 2))
    torchckpt.checkpoint_module(whole[3])
    with pytest.raises(RecomputationError, match="a layer that pops a skip is a region by itself"):
        whole(torch.randn(3, 2)).sum().backward()


def test_a_balance_of_nested_layers_is_one_of_a_pipe_that_splits_them() -> None:
    """It was one of the outer layers only."""
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))
    balance = balance_by_bytes(2, nested, torch.randn(2, 4), split_nested=True)
    assert len(balance.costs) == 4
    assert balance.names == ["Linear", "ReLU", "Linear", "Linear"]
    assert torchckpt.Pipe(nested, balance, split_nested=True)(torch.randn(2, 4)).shape == (2, 2)


def test_a_pipe_of_lazy_layers_is_shown_and_trained() -> None:
    """Its repr raised, and a replay drew other numbers than the forward, which had made the weights."""
    def make() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyLinear(4), nn.Sigmoid())

    x, outputs = torch.randn(4, 3), []
    for mode in "never", "always":
        pipe = torchckpt.Pipe(make(), [2, 2], chunks=2, checkpoint=mode)  # type: ignore[arg-type]  # one of three
        assert "0 parameters, 0.0 MiB, 2 tensors without a shape yet" in repr(pipe)
        torch.manual_seed(0)
        pipe(x).sum().backward()
        assert "16 parameters, 0.0 MiB\n" in repr(pipe)
        outputs.append([parameter.grad for parameter in pipe.parameters()])
    assert all(map(torch.equal, *outputs))


def test_a_budget_for_lazy_layers_is_an_error_that_names_one() -> None:
    """Its first step raised torch's error of a tensor without a shape."""
    module = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(4))
    with pytest.raises(ArgumentError, match=r"Pipe: a parameter has no shape yet\n  received: 1.weight has none yet\n"):
        torchckpt.Pipe(module, [1, 1], budget="100%")
    module(torch.randn(2, 3))  # what the error says
    pipe = torchckpt.Pipe(module, [1, 1], budget="100%")
    for _ in range(3):
        pipe.step(torch.randn(2, 3), torch.randn(2, 4), loss_fn=mse_loss)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_step_on_the_meta_device(checkpoint: str) -> None:
    """Its clock wanted events."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = torchckpt.Pipe(module.to("meta"), [2, 1], chunks=2, checkpoint=checkpoint)  # type: ignore[arg-type]
    x = torch.empty(4, 4, device="meta")
    loss = pipe.step(x, x, loss_fn=mse_loss)
    assert (loss.device.type, loss.shape) == ("meta", ())
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_step_that_raises_leaves_no_gradient_where_there_was_none() -> None:
    class Fails(nn.Tanh):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 4:
                raise ZeroDivisionError
            return super().forward(x)

    module, x = nn.Sequential(nn.Linear(2, 2), Fails(), nn.Linear(2, 2)), torch.randn(8, 2)
    frozen = module[2].bias
    frozen.grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError):
        torchckpt.Pipe(module, [2, 1], chunks=4).step(x, x, loss_fn=mse_loss)
    assert [name for name, parameter in module.named_parameters() if parameter.grad is not None] == ["2.bias"]


class Hidden:
    """Has a tensor, and is no pytree."""

    def __init__(self, tensor: Tensor) -> None:
        self.inside = [tensor]


class Hides(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), Hidden(x)


class Finds(nn.Module):
    def forward(self, pair: Any) -> Any:
        return pair[0] + pair[1].inside[0]


def test_an_object_with_tensors_between_stages() -> None:
    """A step said that it went through the graph a second time. A forward works: nothing is cut there."""
    module, x = nn.Sequential(nn.Linear(2, 2), Hides(2, 2), Finds()), torch.randn(4, 2)
    pipe = torchckpt.Pipe(module, [2, 1], chunks=2)
    assert torch.equal(pipe(x), torch.cat([module(part) for part in x.chunk(2)]))
    with pytest.raises(ArgumentError) as raised:
        pipe.step(x, x, loss_fn=mse_loss)
    assert str(raised.value) == (
        "Pipe.step(): a stage returns tensors in a container that torch's pytree does not know, "
        "unlike list, tuple and dict\n"
        "  received: a Hidden that has tensors, from Pipe stage 0 (layers 0 to 1)\n"
        "  works:    a layer that returns a dict; or torch.utils._pytree.register_pytree_node for that class"
    )


class Batch(dict):  # type: ignore[type-arg]
    """As tokenizers return it."""


@pytest.mark.parametrize("make", [Batch, lambda x: Hidden(x["x"]), lambda x: {"inside": Batch(x)}])
def test_a_container_that_is_not_looked_into_is_no_input(make: Any) -> None:
    """It went whole to every micro-batch, in silence."""
    pipe, x = torchckpt.Pipe(nn.Sequential(nn.Identity()), chunks=2), torch.randn(4, 2)
    with pytest.raises(ArgumentError, match="in a container that torch's pytree does not know") as raised:
        pipe(x, make({"x": x}))
    assert "received: input 1" in str(raised.value)
    assert str(raised.value).endswith("NoChunk(batch) if it must not be split")


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_micro_batch_of_one_keeps_its_strides(checkpoint: Any) -> None:
    """A replay got other strides than the forward, where a dimension has size one. A convolution reads from them
    whether its output is channels last, and dropout draws in the output's order."""

    def gradients(mode: Any) -> list[Tensor | None]:
        torch.manual_seed(1)
        stages = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.5)) for _ in range(3)]
        pipe = torchckpt.Pipe(nn.Sequential(*stages), [1, 1, 1], chunks=3, checkpoint=mode)
        pipe(torch.randn(3, 3, 4, 4).contiguous(memory_format=torch.channels_last)).sin().sum().backward()
        return [parameter.grad for parameter in pipe.parameters()]

    received, expected = gradients(checkpoint), gradients("never")
    assert all(torch.equal(gradient, other) for gradient, other in zip(received, expected) if gradient is not None)
