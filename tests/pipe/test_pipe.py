"""``Pipe``: the same numbers as the plain module, and errors that say what would work."""
from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import torchckpt
from torchckpt.errors import ArgumentError
from torchckpt.pipe.partition import Layer, Stage, placement_faults


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def all_equal(ours: list[Any], plain: list[Any]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(ours, plain))


def train(module: Any, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    module.zero_grad()
    torch.manual_seed(11)
    output = module(x)
    output.square().mean().backward()
    return output, gradients(module)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 3, 2]])
def test_with_one_chunk_it_is_the_plain_module_to_the_bit(
    balance: list[int], checkpoint: Any, device: torch.device
) -> None:
    x = torch.randn(5, 6, device=device)
    plain = layers().to(device)
    expected = train(plain, x)
    pipe = torchckpt.Pipe(copy.deepcopy(plain), balance, chunks=1, checkpoint=checkpoint)
    output, grads = train(pipe, x)
    assert torch.equal(output, expected[0])
    assert all_equal(grads, expected[1])


@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_recomputing_changes_no_bit(chunks: int, checkpoint: Any, lookahead: int) -> None:
    x = torch.randn(7, 6)
    never = torchckpt.Pipe(layers(), [3, 3], chunks=chunks, checkpoint="never")
    pipe = torchckpt.Pipe(layers(), [3, 3], chunks=chunks, checkpoint=checkpoint, lookahead=lookahead)
    expected, ours = train(never, x), train(pipe, x)
    assert torch.equal(ours[0], expected[0])
    assert all_equal(ours[1], expected[1])


def test_micro_batches_without_dropout_are_the_plain_module_by_parts() -> None:
    x = torch.randn(7, 6, requires_grad=True)
    pipe = torchckpt.Pipe(layers().eval(), [2, 2, 2], chunks=3)
    output = pipe(x)
    assert torch.equal(output, torch.cat([layers().eval()(part) for part in x.tensor_split(3)]))
    (grad,) = torch.autograd.grad(output.sum(), x)
    parts = [part.detach().requires_grad_() for part in x.tensor_split(3)]
    assert torch.equal(grad, torch.cat([torch.autograd.grad(layers().eval()(p).sum(), p)[0] for p in parts]))


@pytest.mark.parametrize(
    ("rows", "chunks", "checkpoint", "recomputes"),
    [
        (8, 4, "always", 4),
        (8, 4, "except_last", 3),
        (8, 4, "never", 0),
        (3, 4, "except_last", 2),  # three rows make three micro-batches, and the last of these is kept
        (5, 4, "except_last", 3),
        (1, 4, "except_last", 0),
        (1, 4, "always", 1),
    ],
)
def test_the_real_number_of_micro_batches_decides(rows: int, chunks: int, checkpoint: Any, recomputes: int) -> None:
    pipe = torchckpt.Pipe(layers(), [3, 3], chunks=chunks, checkpoint=checkpoint)
    with torchckpt.testing.count_recomputes() as counted:
        pipe(torch.randn(rows, 6)).sum().backward()
    assert counted.total == 2 * recomputes


def test_what_is_kept_is_the_boundaries_to_the_byte() -> None:
    pipe = torchckpt.Pipe(layers(), [3, 3], chunks=4, checkpoint="always")
    x = torch.randn(8, 6)
    with torchckpt.testing.saved_bytes() as saved:
        pipe(x)
    assert saved.total == x.nbytes + 8 * 8 * 4  # x, whose storage its parts share, and what is between the stages


def test_under_no_grad_nothing_is_recomputed_or_kept() -> None:
    pipe = torchckpt.Pipe(layers().eval(), [3, 3], chunks=4)
    x = torch.randn(8, 6)
    with torch.no_grad():
        output = pipe(x)
    assert not output.requires_grad
    assert torch.equal(output, torch.cat([layers().eval()(part) for part in x.tensor_split(4)]))


def test_tuples_pass_from_stage_to_stage_and_unused_ones_get_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.left(pair[0]).tanh(), self.right(pair[1]).tanh()

    pipe = torchckpt.Pipe(nn.Sequential(Two(), Two()), [1, 1], chunks=2, checkpoint="always")
    left, right = pipe((torch.randn(4, 4), torch.randn(4, 4)))
    right.sum().backward()
    used = [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]
    assert left.requires_grad
    assert used == ["0.right.weight", "0.right.bias", "1.right.weight", "1.right.bias"]


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_stages_and_stages_without_parameters(frozen: int) -> None:
    def pipe(checkpoint: Any) -> torchckpt.Pipe:
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
        pipe = torchckpt.Pipe(module, [1, 1, 1, 1], chunks=3, checkpoint=checkpoint)
        list(pipe.children())[frozen].requires_grad_(False)
        return pipe

    torch.manual_seed(0)
    never = pipe("never")
    torch.manual_seed(0)
    always = pipe("always")
    x = torch.randn(6, 6)
    expected, ours = train(never, x), train(always, x)
    assert all_equal(ours[1], expected[1])


def test_a_parameter_shared_by_stages_on_one_device_gets_both_gradients() -> None:
    shared = nn.Linear(4, 4)
    pipe = torchckpt.Pipe(nn.Sequential(shared, nn.Tanh(), shared), [1, 2], chunks=2, checkpoint="always")
    x = torch.randn(4, 4)
    pipe(x).sum().backward()
    ours, shared.weight.grad = shared.weight.grad, None
    sum(shared(torch.tanh(shared(part))).sum() for part in x.tensor_split(2)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(ours, shared.weight.grad)  # a sum of four terms, in another order


def test_train_and_eval_reach_the_layers() -> None:
    pipe = torchckpt.Pipe(layers(), [3, 3])
    assert pipe.eval() is pipe
    assert not any(module.training for module in pipe.modules())


def test_state_dict_is_that_of_the_plain_sequential() -> None:
    plain = layers()
    pipe = torchckpt.Pipe(layers(), [3, 3])
    assert list(pipe.state_dict()) == list(plain.state_dict())
    pipe.load_state_dict(plain.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_the_layers_are_used_and_not_copied() -> None:
    plain = layers()
    assert list(torchckpt.Pipe(plain, [3, 3]).children()) == list(plain.children())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_uses_its_own_weights(again: Any) -> None:
    pipe = torchckpt.Pipe(layers(), [3, 3], chunks=2)
    other = again(pipe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(other(torch.randn(4, 6)), torch.zeros(4, 3))


def test_balance_defaults() -> None:
    assert torchckpt.Pipe(layers()).balance == [6]
    assert torchckpt.Pipe(layers(), devices=["cpu"] * 4).balance == [2, 2, 1, 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
def test_inside_compiled_code_it_runs_outside_the_graph() -> None:
    torch._dynamo.reset()
    pipe = torchckpt.Pipe(layers().eval(), [3, 3], chunks=2)
    x = torch.randn(4, 6)
    assert torch.equal(torch.compile(lambda x: pipe(x) + 1, backend="eager")(x), pipe(x) + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a torchckpt region is run outside compiled graphs"):
        torch.compile(lambda x: pipe(x) + 1, backend="eager", fullgraph=True)(x)


def test_inside_a_transform_it_is_an_error_that_says_what_works() -> None:
    pipe = torchckpt.Pipe(layers().eval(), [3, 3], chunks=2)
    with pytest.raises(torchckpt.errors.TransformError, match="a region cannot be entered under vmap, jvp"):
        torch.func.grad(lambda x: pipe(x).sum())(torch.randn(4, 6))


# wrong calls --------------------------------------------------------------------------------------------------------


def fault(call: Any) -> str:
    with pytest.raises(ArgumentError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"module": nn.Linear(2, 2)},
            "Pipe: the module must be an nn.Sequential of at least one layer\n  received: Linear\n"
            "  works:    Pipe(nn.Sequential(embedding, *blocks, head), balance=[4, 4])",
        ),
        (
            {"module": nn.Sequential()},
            "Pipe: the module must be an nn.Sequential of at least one layer\n  received: an empty Sequential\n"
            "  works:    Pipe(nn.Sequential(embedding, *blocks, head), balance=[4, 4])",
        ),
        (
            {"balance": [2, 3]},
            "Pipe: balance must add up to the number of layers, 6\n  received: balance=[2, 3], which adds up to 5\n"
            "  works:    balance=[3, 3]",
        ),
        (
            {"balance": [6, 0]},
            "Pipe: balance must be a list of positive layer counts, one a stage\n  received: balance=[6, 0]\n"
            "  works:    balance=[3, 3]",
        ),
        (
            {"balance": 2},
            "Pipe: balance must be a list of positive layer counts, one a stage\n  received: balance=2\n"
            "  works:    balance=[3, 3]",
        ),
        ({"chunks": 0}, "Pipe: chunks must be a positive int\n  received: chunks=0\n  works:    chunks=8"),
        ({"chunks": 2.0}, "Pipe: chunks must be a positive int\n  received: chunks=2.0\n  works:    chunks=8"),
        ({"lookahead": 0}, "Pipe: lookahead must be a positive int\n  received: lookahead=0\n  works:    lookahead=1"),
        ({"lookahead": True}, "Pipe: lookahead must be a positive int\n  received: lookahead=True\n  works:"),
        (
            {"checkpoint": "last"},
            "Pipe: checkpoint must be one of ('except_last', 'always', 'never')\n  received: checkpoint='last'\n"
            "  works:    checkpoint=\"except_last\"",
        ),
        ({"devices": "cpu"}, "Pipe: devices must be a list of devices, one a stage\n  received: devices='cpu'\n"),
        ({"devices": ["cpu"], "balance": [3, 3]}, "devices and balance must be equally long\n  received: 1 devices, 2"),
        ({"devices": ["cpu"] * 7}, "there must be a layer for every stage\n  received: 7 devices, 6 layers\n"),
        ({"devices": ["tpu:9"]}, "every device must exist on this machine\n  received: 'tpu:9': "),
        ({"devices": ["cuda:99"]}, "every device must exist on this machine\n  received: 'cuda:99': this machine has "),
        ({"devices": [None]}, "every device must exist on this machine\n  received: None: "),
    ],
)
def test_a_wrong_call_says_the_rule_what_was_received_and_what_works(arguments: dict[str, Any], text: str) -> None:
    assert text in fault(lambda: torchckpt.Pipe(**{"module": layers(), **arguments}))


def test_all_faults_are_reported_at_once() -> None:
    wrong: Any = {"module": nn.Linear(2, 2), "chunks": 0, "lookahead": 0, "checkpoint": "no"}
    text = fault(lambda: torchckpt.Pipe(**wrong))
    assert text.startswith("Pipe: 4 faults\nthe module must be an nn.Sequential")
    assert re.findall(r"received: .*", text) == [
        "received: Linear",
        "received: chunks=0",
        "received: lookahead=0",
        "received: checkpoint='no'",
    ]


def test_a_stage_that_is_spread_over_devices_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    text = "the parameters of a stage must be on one device\n  received: Pipe stage 0 (layers 0 to 1) on cpu, meta\n"
    assert text in fault(lambda: torchckpt.Pipe(module, balance=[2]))


def test_a_parameter_on_two_devices_is_an_error_that_names_both_stages() -> None:
    shared = nn.Linear(2, 2, bias=False)
    layers = Layer("0", shared), Layer("1", shared)
    stages = [Stage(0, 0, layers[:1], torch.device("cpu")), Stage(1, 1, layers[1:], torch.device("meta"))]
    assert [str(fault) for fault in placement_faults(stages)] == [
        "a parameter cannot be shared by stages on two devices\n"
        "  received: 1.weight, in Pipe stage 0 (layers 0 to 0) on cpu "
        "and in Pipe stage 1 (layers 1 to 1) on meta\n"
        "  works:    a balance that puts both layers into one stage, or both stages on one device"
    ]


def test_a_stage_that_returns_no_tensor_is_an_error_that_names_it() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            pass

    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2), Nothing(), nn.Identity()), [2, 1])
    text = (
        "a stage must return a tensor, or something that holds one\n"
        "  received: NoneType, from Pipe stage 0 (layers 0 to 1)\n"
    )
    assert text in fault(lambda: pipe(torch.ones(2, 2)))


def test_a_replay_that_differs_names_the_stage() -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.exp() if self.calls == 1 else x.sum(1).exp()

    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2), Counts()), [1, 1], checkpoint="always")
    loss = pipe(torch.ones(2, 2)).sum()
    with pytest.raises(torchckpt.errors.RecomputationError, match=r"region 'Pipe stage 1 \(layers 1 to 1\)'"):
        loss.backward()
