"""The partition: which layers make a stage, where each stage is, and what stays as in the plain Sequential."""
from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.pipe.skips import Stash
from torchckpt.errors import ArgumentError
from torchckpt.pipe import WithDevice
from torchckpt.pipe.partition import (
    Layer,
    balance_by_device,
    even_balance,
    layers_of,
    partition,
    placement_faults,
)

CPU, META = torch.device("cpu"), torch.device("meta")


def on(device: torch.device) -> nn.Module:
    return nn.Linear(2, 2, device=device)


def layered(*modules: nn.Module) -> list[Layer]:
    return layers_of(nn.Sequential(*modules), nested=False)


def placed(layers: list[Layer]) -> list[tuple[str, int]]:
    """Device and number of layers of each stage."""
    balance = balance_by_device(layers)
    return [(str(s.device), len(s.layers)) for s in partition(layers, balance, [None] * len(balance), {})]


# by device ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "stages"),
    [
        (lambda: [on(CPU), nn.ReLU(), on(META), nn.ReLU()], [("cpu", 2), ("meta", 2)]),
        (lambda: [nn.ReLU(), on(META), on(CPU), on(CPU), on(META)], [("meta", 2), ("cpu", 2), ("meta", 1)]),
        (lambda: [nn.ReLU(), nn.Tanh()], [("cpu", 2)]),
        (lambda: [on(CPU), WithDevice(nn.ReLU(), "meta"), on(META)], [("cpu", 1), ("meta", 2)]),
        (lambda: [WithDevice(nn.ReLU(), "meta"), nn.ReLU(), on(CPU)], [("meta", 2), ("cpu", 1)]),
        (lambda: [on(CPU), WithDevice(nn.ReLU(), "meta"), on(CPU)], [("cpu", 1), ("meta", 1), ("cpu", 1)]),
    ],
)
def test_a_stage_ends_where_the_next_layer_is_elsewhere(make: Callable[[], list[nn.Module]], stages: list[Any]) -> None:
    modules = make()
    assert placed(layered(*modules)) == stages
    pipe = torchckpt.Pipe(nn.Sequential(*modules))
    assert pipe.balance == [count for _, count in stages]
    assert [str(stage.device) for stage in pipe.stages] == [device for device, _ in stages]


def test_a_balance_without_devices_leaves_the_layers_where_they_are() -> None:
    pipe = torchckpt.Pipe(nn.Sequential(on(CPU), nn.ReLU(), on(META)), [2, 1])
    assert [str(stage.device) for stage in pipe.stages] == ["cpu", "meta"]
    assert [str(parameter.device) for parameter in pipe.parameters()] == ["cpu", "cpu", "meta", "meta"]


def test_with_device_leaves_the_layer_what_it_is() -> None:
    layer = nn.BatchNorm1d(2)
    assert WithDevice(layer, "cpu") is layer
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2), WithDevice(nn.Dropout(0.5), "cpu"), layer), [1, 2]).eval()
    assert not any(module.training for module in pipe.modules())
    assert list(pipe.state_dict()) == list(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)).state_dict())
    for again in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert [str(stage.device) for stage in again.stages] == ["cpu", "cpu"]


def test_a_layer_on_two_devices_is_an_error() -> None:
    layer = WithDevice(nn.ReLU(), "cpu")
    assert WithDevice(layer, "cpu") is layer
    with pytest.raises(ArgumentError) as raised:
        WithDevice(layer, "meta")
    assert str(raised.value) == (
        "WithDevice: the layer has another device already\n  received: ReLU on cpu, and on meta\n"
        "  works:    WithDevice(ReLU(), 'meta'), a layer of its own"
    )


def test_parameters_elsewhere_than_with_device_says_are_an_error() -> None:
    module = nn.Sequential(on(CPU), WithDevice(on(CPU), "meta"))
    with pytest.raises(ArgumentError, match=r"layers of a stage are on several devices\n.*stage 1.*on cpu, meta\n"):
        torchckpt.Pipe(module, [1, 1])


def test_every_fault_of_placement_is_named() -> None:
    shared = on(CPU)
    layers = [Layer("0", shared), Layer("1", on(META)), Layer("2", shared)]
    stages = partition(layers, [2, 1], [CPU, META], {})
    assert [fault.wrong for fault in placement_faults(stages)] == [
        "the layers of a stage are on several devices",
        "a parameter is shared by stages on two devices",
        "a parameter is shared by stages on two devices",
    ]


# nested Sequentials ---------------------------------------------------------------------------------------------------


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)))
    return nn.Sequential(OrderedDict(stem=nn.Linear(3, 3), blocks=inner, head=nn.Linear(3, 2)))


class Own(nn.Sequential):
    """A Sequential with a forward of its own: a layer like any other."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


def test_nested_sequentials_are_one_layer_unless_they_are_to_be_split() -> None:
    assert [layer.name for layer in layers_of(nested(), nested=False)] == ["stem", "blocks", "head"]
    names = ["stem", "blocks.0", "blocks.1.0", "blocks.1.1", "head"]
    assert [layer.name for layer in layers_of(nested(), nested=True)] == names
    assert [str(layer) for layer in layers_of(nn.Sequential(Own(nn.Linear(3, 3))), nested=True)] == ["layer 0 (Own)"]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_split_sequential_is_the_plain_one(checkpoint: Any) -> None:
    module, x = nested(), torch.randn(4, 3)
    pipe = torchckpt.Pipe(module, [2, 1, 2], chunks=2, checkpoint=checkpoint, split_nested=True)
    assert torch.equal(pipe(x), torch.cat([module(part) for part in x.tensor_split(2)]))
    assert list(pipe.state_dict()) == list(nested().state_dict())
    assert (len(pipe), pipe[1]) == (3, module.blocks)
    again = copy.deepcopy(pipe)
    assert [stage.__qualname__ for stage in again.stages] == [stage.__qualname__ for stage in pipe.stages]
    assert torch.equal(again(x), pipe(x))


def test_the_count_of_layers_is_that_of_split_ones() -> None:
    with pytest.raises(ArgumentError, match="balance does not add up to the number of layers, 5"):
        torchckpt.Pipe(nested(), [1, 2], split_nested=True)
    with pytest.raises(ArgumentError, match="balance does not add up to the number of layers, 3"):
        torchckpt.Pipe(nested(), [2, 3])


def test_an_even_balance() -> None:
    assert [even_balance(layers, 3) for layers in (3, 4, 8)] == [[1, 1, 1], [2, 1, 1], [3, 3, 2]]


# as the plain Sequential ----------------------------------------------------------------------------------------------


def test_length_index_and_iteration_are_those_of_the_sequential() -> None:
    module = nested()
    pipe = torchckpt.Pipe(module, [1, 2])
    assert (len(pipe), list(pipe), pipe[0], pipe[-1]) == (3, list(module), module[0], module[-1])
    part = pipe[1:]
    assert isinstance(part, nn.Sequential)
    assert list(part.state_dict()) == list(module[1:].state_dict())
    assert list(part) == list(module[1:])
    with pytest.raises(IndexError):
        pipe[3]


def test_parameters_are_the_very_same() -> None:
    module = nested()
    pipe = torchckpt.Pipe(module, [1, 2])
    for (name, ours), (plain_name, plain) in zip(pipe.named_parameters(), module.named_parameters()):
        assert name == plain_name
        assert ours is plain


def test_layers_may_have_the_names_of_the_pipe_s_own_attributes() -> None:
    names = ["stages", "chunks", "reduce", "balance", "checkpoint", "devices", "lookahead"]
    module = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    pipe = torchckpt.Pipe(module, [3, 4], chunks=2, reduce="mean")
    x = torch.randn(4, 2)
    assert torch.equal(pipe(x), torch.cat([module(part) for part in x.tensor_split(2)]))
    assert list(pipe.state_dict()) == list(module.state_dict())


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (lambda pipe: pipe.to("cpu"), ".to('cpu')"),
        (lambda pipe: pipe.to(device=torch.device("cpu")), ".to(device(type='cpu'))"),
        (lambda pipe: pipe.to(0), ".to(0)"),
        (lambda pipe: pipe.to("cpu", torch.float64), ".to('cpu', torch.float64)"),
        (lambda pipe: pipe.cuda(), ".cuda()"),
        (lambda pipe: pipe.cuda(1), ".cuda()"),
        (lambda pipe: pipe.cpu(), ".cpu()"),
        (lambda pipe: pipe.xpu(), ".xpu()"),
    ],
)
def test_a_pipe_is_not_moved_and_says_what_to_do_instead(call: Any, shown: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        call(torchckpt.Pipe(nested(), [1, 2]))
    assert str(raised.value) == (
        f"Pipe: the layers of a Pipe cannot leave the devices of their stages\n  received: {shown}\n"
        "  works:    Pipe(module, balance, devices=['cuda:0', 'cuda:1']); or .to(dtype), .half(), .bfloat16()"
    )


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda pipe: pipe.half(), torch.float16),
        (lambda pipe: pipe.bfloat16(), torch.bfloat16),
        (lambda pipe: pipe.double(), torch.float64),
        (lambda pipe: pipe.to(torch.bfloat16), torch.bfloat16),
        (lambda pipe: pipe.to(dtype=torch.float64, non_blocking=True), torch.float64),
        (lambda pipe: pipe.to(memory_format=torch.channels_last), torch.float32),
    ],
)
def test_dtypes_change_as_ever(call: Any, dtype: torch.dtype) -> None:
    pipe = torchckpt.Pipe(nested(), [1, 2], chunks=2)
    assert call(pipe) is pipe
    assert {parameter.dtype for parameter in pipe.parameters()} == {dtype}
    assert pipe(torch.randn(4, 3, dtype=dtype)).dtype == dtype


def test_train_eval_and_requires_grad_return_the_pipe() -> None:
    pipe = torchckpt.Pipe(nested(), [1, 2])
    assert pipe.eval() is pipe.train() is pipe.requires_grad_(False) is pipe
    assert pipe.training
    assert not any(parameter.requires_grad for parameter in pipe.parameters())
    assert not pipe(torch.randn(2, 3)).requires_grad


def test_a_pipe_of_an_evaluated_module_is_evaluated() -> None:
    assert not torchckpt.Pipe(nested().eval(), [1, 2]).training


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_is_made_after_a_step_too(again: Any) -> None:
    pipe = torchckpt.Pipe(nested(), [1, 2], chunks=2)
    x, target = torch.randn(4, 3), torch.randn(4, 2)
    pipe.step(x, target, loss_fn=nn.functional.mse_loss)
    other = again(pipe)
    assert torch.equal(other(x), pipe(x))
    with pytest.raises(ArgumentError, match="no step has run yet"):
        other.timeline()
    assert pipe.timeline().events


def test_two_pipes_over_one_module() -> None:
    module, x = nested(), torch.randn(6, 3)
    first = torchckpt.Pipe(module, [1, 2], chunks=2, checkpoint="always")
    second = torchckpt.Pipe(module, [2, 1], chunks=3)
    a, b = first(x), second(x)  # both forwards before the backwards
    (a.sum() + b.sum()).backward()
    ours = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    (2 * module(x).sum()).backward()
    for grad, parameter in zip(ours, module.parameters()):
        torch.testing.assert_close(grad, parameter.grad)


def test_repr_shows_stages_devices_parameters_and_bytes() -> None:
    module = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Sequential(nn.ReLU(), Stash()), on(META))
    pipe = torchckpt.Pipe(module, [2, 1, 1], chunks=4)
    assert repr(pipe) == "\n".join(
        [
            "Pipe(chunks=4, checkpoint='except_last', lookahead=1",
            "  stage 0 on cpu: 1,051,648 parameters, 4.0 MiB",
            "    (0): Linear(in_features=1024, out_features=1024, bias=True)",
            f"    (1): {nn.BatchNorm1d(1024)!r}",
            "  stage 1 on cpu: 0 parameters, 0.0 MiB",
            "    (2): Sequential(",
            "      (0): ReLU()",
            "      (1): Stash()",
            "    )",
            "  stage 2 on meta: 6 parameters, 0.0 MiB",
            "    (3): Linear(in_features=2, out_features=2, bias=True)",
            ")",
        ]
    )


def test_a_shared_parameter_counts_once() -> None:
    shared = nn.Linear(2, 2)
    assert "stage 0 on cpu: 6 parameters" in repr(torchckpt.Pipe(nn.Sequential(shared, nn.Tanh(), shared)))
