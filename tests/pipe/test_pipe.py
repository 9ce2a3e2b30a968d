"""``Pipe``: the same numbers as the plain module, and errors that say what would work."""
from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import torchckpt
from tests.pipe.skips import Pop, Stash
from tests.pipe.stages import gradients, run, stages_of
from tests.settings import without_collector
from tests.slow import few, slow
from torchckpt.errors import ArgumentError
from torchckpt.pipe import NoChunk
from torchckpt.pipe.partition import Layer, partition, placement_faults
from torchckpt.pipe.skip import Skips, StageSkips
from torchckpt.regions.core.frame import Frame


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


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
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run outside compiled graphs, and so are"):
        torch.compile(lambda x: pipe(x) + 1, backend="eager", fullgraph=True)(x)


def test_inside_a_transform_it_is_an_error_that_says_what_works() -> None:
    pipe = torchckpt.Pipe(layers().eval(), [3, 3], chunks=2)
    with pytest.raises(torchckpt.errors.TransformError, match="a region cannot be entered under vmap, jvp"):
        torch.func.grad(lambda x: pipe(x).sum())(torch.randn(4, 6))
    with pytest.raises(torchckpt.errors.TransformError, match="a region cannot be entered under vmap, jvp"):
        torch.vmap(lambda x: pipe.step(x, x[:, :3], loss_fn=nn.functional.mse_loss))(torch.randn(2, 4, 6))


@pytest.mark.parametrize("balance", [[6], [3, 3]])
def test_inside_a_transform_without_gradients_it_is_the_module(balance: list[int]) -> None:
    """It asked for the storage of a transform's tensor, which has none."""
    module = layers().eval()
    pipe, x = torchckpt.Pipe(module, balance, chunks=2), torch.randn(2, 4, 6)
    several = {name: torch.stack([weight, 2 * weight]) for name, weight in module.named_parameters()}

    def found(called: nn.Module) -> list[Any]:
        of_each = torch.vmap(lambda weights: torch.func.functional_call(called, weights, (x[0],)))(several)
        return [torch.vmap(called)(x), *torch.func.jvp(called, (x[0],), (x[1],)), of_each]

    with torch.no_grad():
        assert all_equal(found(pipe), found(module))


# arguments and outputs ------------------------------------------------------------------------------------------------


class Takes(nn.Module):
    """Takes pytrees and keyword arguments, and returns a pytree."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tree: dict[str, Any], table: Tensor, *, mask: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = self.linear(tree["x"]) * mask[:, None] * scale + table.sum(0)
        return {"x": x, "same": x, "ids": tree["ids"], "name": tree["name"], "none": None}


class Gives(nn.Module):
    def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, "x": tree["x"].sin() * tree["same"], "mean": tree["x"].mean(), "rows": len(tree["x"]) and 1}


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_pytrees_keyword_arguments_and_what_is_not_split(checkpoint: Any) -> None:
    module = nn.Sequential(Takes(), Gives(), nn.Identity())
    x, ids, mask = torch.randn(5, 4), torch.arange(5), torch.rand(5)
    table = torch.randn(7, 4, requires_grad=True)
    pipe = torchckpt.Pipe(module, [1, 1, 1], chunks=2, checkpoint=checkpoint, reduce="mean")
    output = pipe({"x": x, "ids": ids, "name": "tree"}, NoChunk(table), mask=mask, scale=2.0)
    (grad,) = torch.autograd.grad(output["x"].sum(), table)
    parts = []
    for rows in (slice(0, 3), slice(3, 5)):
        tree = {"x": x[rows], "ids": ids[rows], "name": "tree"}
        parts.append(module[1](module[0](tree, table, mask=mask[rows], scale=2.0)))
    (expected,) = torch.autograd.grad([part["x"] for part in parts], table, [torch.ones(3, 4), torch.ones(2, 4)])
    assert torch.equal(grad, expected)
    for name in ("x", "same", "ids"):
        assert torch.equal(output[name], torch.cat([part[name] for part in parts]))
    assert (output["name"], output["none"], output["rows"]) == ("tree", None, 1)
    assert torch.equal(output["mean"], parts[0]["mean"] * (3 / 5) + parts[1]["mean"] * (2 / 5))


@pytest.mark.parametrize(("reduce", "weights"), [("mean", (3 / 7, 2 / 7, 2 / 7)), ("sum", (1, 1, 1))])
def test_a_scalar_output_is_reduced_by_the_rule_and_goes_backward(reduce: str, weights: tuple[float, ...]) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    module, x = nn.Sequential(*layers().eval(), Loss()), torch.randn(7, 6)
    loss = torchckpt.Pipe(module, [3, 4], chunks=3, reduce=reduce)(x)
    loss.backward()
    ours = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    expected = torch.stack([module(part) * weight for part, weight in zip(x.tensor_split(3), weights)]).sum()
    expected.backward()
    assert torch.equal(loss, expected)
    assert all_equal(ours, gradients(module))


def test_rows_in_another_dimension() -> None:
    pipe, x = torchckpt.Pipe(layers().eval(), [3, 3], chunks=2, batch_dim=1), torch.randn(2, 5, 6)
    assert torch.equal(pipe(x), torch.cat([layers().eval()(part) for part in x.tensor_split(2, 1)], 1))


def test_a_mini_batch_of_fewer_rows_than_chunks_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pipe = torchckpt.Pipe(layers().eval(), [3, 3], chunks=8)
    assert pipe(torch.randn(3, 6)).shape == (3, 3)
    pipe.step(torch.randn(3, 6), torch.randn(3, 3), loss_fn=nn.functional.mse_loss)
    text = "Pipe: chunks=8, but a mini-batch has fewer rows; micro-batches made: 3"
    pipe(torch.randn(8, 6))
    with torch.no_grad():
        pipe(torch.randn(2, 6))
    assert caplog.record_tuples == [("torchckpt.pipe.module", logging.WARNING, text)]


@pytest.mark.parametrize("threads", [False, True], ids=["caller", "threads"])
def test_a_tensor_that_an_output_holds_twice_is_one_for_the_next_stage(threads: bool) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x, [x])

    class ChangedInputs(nn.Module):
        def forward(self, tree: Any) -> Tensor:
            tree[0].mul_(3)
            return tree[0] + tree[1][0]  # type: ignore[no-any-return]

    x = torch.randn(4, 2, requires_grad=True)
    output = run(stages_of([nn.Tanhshrink(), Twice(), ChangedInputs()]), x, 2, 0, 1, threads)
    expected = 6 * nn.functional.tanhshrink(x)
    assert torch.equal(output, expected)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (output, expected)))


@pytest.mark.parametrize("rows", [4, 5, 7])
def test_running_statistics_are_those_of_the_mini_batch_whatever_its_micro_batches(rows: int) -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Tanh())

    plain, x = module(), torch.randn(rows, 3)
    plain(x)
    pipe = torchckpt.Pipe(module(), [1, 1, 1], chunks=2, checkpoint="always", deferred_batch_norm=True)
    pipe(x).sum().backward()
    torch.testing.assert_close(pipe[0].running_mean, plain[0].running_mean)
    torch.testing.assert_close(pipe[0].running_var, plain[0].running_var)
    assert pipe[0].num_batches_tracked == 1


def test_running_statistics_of_a_mini_batch_that_failed_are_forgotten() -> None:
    class Fails(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("why")
            return x

    fails = Fails()
    pipe = torchckpt.Pipe(nn.Sequential(nn.BatchNorm1d(3), fails), [1, 1], chunks=2, deferred_batch_norm=True)
    with pytest.raises(ValueError, match="why"):
        pipe(torch.randn(4, 3))
    assert pipe[0].num_batches_tracked == 0
    fails.fails = False
    x, plain = torch.randn(4, 3), nn.BatchNorm1d(3)
    pipe(x), plain(x)
    torch.testing.assert_close(pipe[0].running_mean, plain.running_mean)


def test_outputs_that_cannot_be_gathered_leave_running_statistics() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    pipe = torchckpt.Pipe(nn.Sequential(nn.BatchNorm1d(3), Mean()), [1, 1], chunks=2, deferred_batch_norm=True)
    with pytest.raises(ArgumentError, match="Pipe: the last layer returns a scalar for each micro-batch, and"):
        pipe(torch.randn(4, 3))
    assert pipe[0].num_batches_tracked == 0


# what stays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_nothing_is_left_of_a_mini_batch(checkpoint: Any, backward: bool) -> None:
    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            for tensor in (x, hidden):
                refs.append(weakref.ref(tensor.untyped_storage()))
            return hidden.sin()

    refs: list[Any] = []
    module = nn.Sequential(nn.Linear(4, 4), Watched(), Stash(), Watched(), Pop())
    pipe = torchckpt.Pipe(module, [1, 2, 1, 1], chunks=3, checkpoint=checkpoint)
    x = torch.randn(6, 4)
    with without_collector():
        output = pipe(x)
        if backward:
            output.sum().backward()
        x = x[:0].clone()
        del output
        assert [ref() for ref in refs if ref() is not None] == []
        assert len(refs) >= 12


@few(1)
@pytest.mark.parametrize("forwards", [200, *slow([1000])])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_forwards_leave_no_tensor_and_no_frame_behind(checkpoint: Any, forwards: int) -> None:
    def alive() -> int:
        return sum(type(value) in (Tensor, Frame, StageSkips, Skips) for value in gc.get_objects())

    module = nn.Sequential(nn.Linear(2, 2), Stash(), nn.Tanh(), Pop())
    pipe = torchckpt.Pipe(module, [2, 1, 1], chunks=2, checkpoint=checkpoint)
    x = torch.randn(2, 2)
    pipe(x)
    with without_collector():
        before = alive()
        for _ in range(forwards):
            pipe(x)
        assert alive() == before


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
            "Pipe: the module is not an nn.Sequential of at least one layer\n  received: Linear\n"
            "  works:    Pipe(nn.Sequential(embedding, *blocks, head), balance=[4, 4])",
        ),
        (
            {"module": nn.Sequential()},
            "Pipe: the module is not an nn.Sequential of at least one layer\n  received: an empty Sequential\n"
            "  works:    Pipe(nn.Sequential(embedding, *blocks, head), balance=[4, 4])",
        ),
        (
            {"balance": [2, 3]},
            "Pipe: balance does not add up to the number of layers, 6\n  received: balance=[2, 3], which adds up to 5\n"
            "  works:    balance=[3, 3]",
        ),
        (
            {"balance": [6, 0]},
            "Pipe: balance is not a list of positive layer counts, one per stage\n  received: balance=[6, 0]\n"
            "  works:    balance=[3, 3]",
        ),
        (
            {"balance": 2},
            "Pipe: balance is not a list of positive layer counts, one per stage\n  received: balance=2\n"
            "  works:    balance=[3, 3]",
        ),
        ({"chunks": 0}, "Pipe: chunks is not a positive int\n  received: chunks=0\n  works:    chunks=8"),
        ({"chunks": 2.0}, "Pipe: chunks is not a positive int\n  received: chunks=2.0\n  works:    chunks=8"),
        ({"lookahead": 0}, "Pipe: lookahead is not a positive int\n  received: lookahead=0\n  works:    lookahead=1"),
        ({"lookahead": True}, "Pipe: lookahead is not a positive int\n  received: lookahead=True\n  works:"),
        (
            {"checkpoint": "last"},
            "Pipe: checkpoint is not one of ('except_last', 'always', 'never')\n  received: checkpoint='last'\n"
            "  works:    checkpoint=\"except_last\"",
        ),
        ({"batch_dim": -1}, "Pipe: batch_dim is not an int from 0\n  received: batch_dim=-1\n  works:    batch_dim=0"),
        (
            {"reduce": "max"},
            "Pipe: reduce is not one of ('mean', 'sum'), or None\n  received: reduce='max'\n  works:    reduce=",
        ),
        ({"devices": "cpu"}, "devices is not a list of devices, one per stage\n  received: devices='cpu'\n"),
        ({"devices": ["cpu"], "balance": [3, 3]}, "devices and balance differ in length\n  received: 1 devices, 2"),
        ({"devices": ["cpu"] * 7}, "there are fewer layers than stages\n  received: 7 devices, 6 layers\n"),
        ({"devices": ["tpu:9"]}, "a device does not exist on this machine\n  received: 'tpu:9': "),
        ({"devices": ["cuda:99"]}, "a device does not exist on this machine\n  received: 'cuda:99': this machine has "),
        ({"devices": [None]}, "a device does not exist on this machine\n  received: None: "),
    ],
)
def test_a_wrong_call_says_the_rule_what_was_received_and_what_works(arguments: dict[str, Any], text: str) -> None:
    assert text in fault(lambda: torchckpt.Pipe(**{"module": layers(), **arguments}))


def test_all_faults_are_reported_at_once() -> None:
    wrong: Any = {"module": nn.Linear(2, 2), "chunks": 0, "lookahead": 0, "checkpoint": "no", "devices": ["tpu:9"]}
    wrong = {**wrong, "batch_dim": -1, "reduce": 3}
    text = fault(lambda: torchckpt.Pipe(**wrong))
    assert text.startswith("Pipe: 7 faults\nthe module is not an nn.Sequential")
    assert re.findall(r"received: .*", text) == [
        "received: Linear",
        next(line for line in re.findall(r"received: .*", text) if line.startswith("received: 'tpu:9': ")),
        "received: chunks=0",
        "received: lookahead=0",
        "received: checkpoint='no'",
        "received: batch_dim=-1",
        "received: reduce=3",
    ]


def test_a_stage_that_is_spread_over_devices_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    text = "the layers of a stage are on several devices\n  received: Pipe stage 0 (layers 0 to 1) on cpu, meta\n"
    assert text in fault(lambda: torchckpt.Pipe(module, balance=[2]))


def test_a_parameter_on_two_devices_is_an_error_that_names_both_stages() -> None:
    shared = nn.Linear(2, 2, bias=False)
    layers = Layer("0", shared), Layer("1", shared)
    devices = [torch.device("cpu"), torch.device("meta")]
    stages = partition(layers, [1, 1], devices, {})
    assert [str(fault) for fault in placement_faults(stages)] == [
        "a parameter is shared by stages on two devices\n"
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
        "a stage returns no tensor, and nothing that holds one\n"
        "  received: NoneType, from Pipe stage 0 (layers 0 to 1)\n"
    )
    assert text in fault(lambda: pipe(torch.ones(2, 2)))


def test_a_stage_whose_output_is_elsewhere_is_an_error_that_names_both_devices() -> None:
    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, [torch.ones(2, device="meta")]

    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 2), Elsewhere(), nn.Identity()), [2, 1])
    assert fault(lambda: pipe(torch.ones(2, 2))) == (
        "Pipe: the output of a stage is not on its device\n"
        "  received: a tensor on meta, from Pipe stage 0 (layers 0 to 1) on cpu\n"
        "  works:    a layer that makes its tensors on the device of its input: torch.zeros(n, device=x.device)"
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((torch.ones(4, 6), torch.ones(3)), {}, "received: input 0 of shape (4, 6), input 1 of shape (3,)\n"),
        ((torch.ones(4, 6),), {"mask": torch.ones(3)}, "received: input 0 of shape (4, 6), mask= of shape (3,)\n"),
        ((NoChunk(torch.ones(4, 6)),), {}, "to be split along its rows\n  received: no tensor\n"),
    ],
)
def test_a_wrong_mini_batch_is_an_error_that_shows_it(args: Any, kwargs: Any, text: str) -> None:
    assert text in fault(lambda: torchckpt.Pipe(layers(), [3, 3], chunks=2)(*args, **kwargs))


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
