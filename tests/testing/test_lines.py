"""What autograd keeps, by module, operation and line: to the byte, each storage once, at the moment when it is most."""
from __future__ import annotations

import copy
import sys
import threading
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torchckpt
from tests.helpers import Block, assert_equal, in_thread, in_threads, leaf, run
from torchckpt import ArgumentError, checkpoint, keep
from torchckpt.testing import SavedByLine, SavedLine, saved_by_line, saved_bytes

BATCH, WIDTH, FLOAT = 8, 16, 4
BYTES = BATCH * WIDTH * FLOAT


def by_operation(kept: SavedByLine) -> dict[str, int]:
    """The bytes of each module's operations."""
    return {f"{row.module} {row.operation}".strip(): row.bytes for row in kept.rows}


def counted(function) -> int:
    """The bytes of all storages that hooks see, but for those of parameters."""
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        outputs = function()
    del outputs
    others = [x for x in saved if not isinstance(x if x._base is None else x._base, nn.Parameter)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in others}.values())


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("mask", torch.ones(BATCH, BATCH).tril() == 0)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.T).masked_fill(self.mask, -1e9)
        return scores.softmax(-1) @ v


# by hand --------------------------------------------------------------------------------------------------------------

CONV = 2 * 4 * 5 * 5 * FLOAT
MATRIX, IMAGE = (BATCH, WIDTH), (2, 3, 5, 5)


@pytest.fixture
def x():
    """An input from before the step."""
    return torch.randn(MATRIX)


def unfrozen(model):
    """A copy: the garbage collector does not tell of what is frozen (``gc.freeze``), as test files are."""
    return copy.deepcopy(model)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Linear(WIDTH, WIDTH), MATRIX, {}),  # the input was there before, and the weight
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), MATRIX, {"1 Relu": BYTES}),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)), MATRIX, {"1 Relu": BYTES}),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), MATRIX, {"1 Addmm": BYTES}),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), MATRIX, {"1 Mul": BYTES}),  # the mask, in floats
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Sigmoid()), IMAGE, {"1 Sigmoid": CONV}),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            IMAGE,
            {"1 NativeBatchNorm": CONV + 2 * 4 * FLOAT, "2 Relu": CONV},  # of the batch, mean and deviation
        ),
        (
            Attention(),
            MATRIX,
            {"Attention Mm": 3 * BYTES, "Attention Softmax": BATCH * BATCH * FLOAT},  # qkv is one storage
        ),
    ],
    ids=["linear", "relu", "two layers", "linear layers", "dropout", "convolution", "batch norm", "attention"],
)
def test_bytes_of_a_model_by_hand(model, shape, expected):
    model, inputs = unfrozen(model), torch.randn(shape)
    assert by_operation(saved_by_line(lambda: model(inputs))) == expected
    assert by_operation(saved_by_line(lambda: model(inputs).sum().backward())) == expected


def test_module_operation_line_bytes_and_storages_of_a_row(x):
    model = Net()
    kept = saved_by_line(lambda: model(x))
    (row,) = kept.rows
    assert (row.module, row.operation, row.bytes, row.storages) == ("Net", "Relu", 2 * BYTES, 2)
    assert row.place == f"{Path(__file__).relative_to(Path.cwd())}:{line_of('x = layer(x).relu()')}"
    assert kept.before_bytes == x.nbytes


def line_of(text: str) -> int:
    return 1 + next(number for number, line in enumerate(Path(__file__).read_text().split("\n")) if text in line)


@pytest.mark.parametrize("model", [Net(), Attention(), Block(WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 32)])
def test_the_sum_is_that_of_hooks(model, x):
    model = unfrozen(model)

    def step():
        return model(x * 1).square().mean()

    kept = saved_by_line(step)
    with saved_bytes() as saved:
        step()
    assert kept.before_bytes == sum(buffer.nbytes for buffer in model.buffers())
    assert kept.total + kept.before_bytes == counted(step) == saved.total


def test_the_sum_is_the_same_on_an_accelerator(device, x):
    model, inputs = Net().to(device), x.to(device)
    assert saved_by_line(lambda: model(inputs).sum().backward()).total == 2 * BYTES


# what counts ----------------------------------------------------------------------------------------------------------


def test_a_storage_counts_once_for_what_saves_it_first():
    def step():
        y = leaf(BATCH, WIDTH) * 1
        return y.sin(), y.cos(), y[:2].exp().sum(), y.view(-1).sin()

    assert by_operation(saved_by_line(step)) == {"Sin": BYTES, "Exp": 2 * WIDTH * FLOAT}


def test_a_view_counts_as_its_whole_storage():
    parts = leaf(4, WIDTH)
    assert saved_by_line(lambda: (parts * 1)[0].sin()).total == 4 * WIDTH * FLOAT


def test_what_is_changed_in_place_counts_once(x):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 2))
    assert by_operation(saved_by_line(lambda: model(x).sum().backward())) == {"1 Relu": BYTES}


def test_results_of_before_do_not_count_and_what_is_made_of_them_does():
    hidden = leaf(WIDTH) * 1
    kept = saved_by_line(lambda: (hidden.sin(), (hidden + 1).sin()))
    assert (kept.total, kept.before_bytes) == (WIDTH * FLOAT, WIDTH * FLOAT)


def test_without_a_backward_the_graph_that_is_returned_tells_the_names():
    kept = []
    assert by_operation(saved_by_line(lambda: leaf(WIDTH).mul(2).sin())) == {"Sin": WIDTH * FLOAT}
    assert by_operation(saved_by_line(lambda: kept.append(leaf(WIDTH).mul(2).sin()))) == {"?": WIDTH * FLOAT}


def test_a_step_that_saves_nothing(x):
    kept = saved_by_line(lambda: x + 1)
    assert (kept.rows, kept.total) == ((), 0)
    assert str(kept) == "autograd keeps 0 B, and 0 B that were there before"
    assert kept.draw().startswith("<svg")


# when it is most ------------------------------------------------------------------------------------------------------


def test_of_several_micro_batches_one_counts():
    model = Net()

    def step():
        for size in (2, 8, 4):
            model(torch.randn(size, WIDTH)).sum().backward()

    kept = saved_by_line(step)
    assert by_operation(kept) == {"Net Relu": 2 * BYTES, "layers.0 Addmm": BYTES}


def test_forwards_before_one_backward_count_together(x):
    model = Net()
    assert saved_by_line(lambda: sum(model(x).sum() for _ in range(3)).backward()).total == 3 * 2 * BYTES


def test_a_graph_that_is_retained_is_kept(x):
    model, losses = Net(), []

    def step(retain):
        for _ in range(2):
            losses.append(model(x).sum())
            losses[-1].backward(retain_graph=retain)

    assert saved_by_line(partial(step, False)).total == 2 * BYTES
    assert saved_by_line(partial(step, True)).total == 4 * BYTES


def test_a_graph_that_is_dropped_is_not_kept():
    def step():
        for _ in range(3):
            leaf(WIDTH).mul(2).sin()

    assert saved_by_line(step).total == WIDTH * FLOAT


def test_what_a_backward_saves_counts():
    def step():
        y = leaf(WIDTH) * 1
        (grad,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return grad.sum()

    assert by_operation(saved_by_line(step)) == {"Sin": WIDTH * FLOAT, "Mul": FLOAT}  # and a gradient, one number


# regions --------------------------------------------------------------------------------------------------------------


class InRegions(nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(Block(WIDTH) for _ in range(3)), call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


@pytest.mark.parametrize("call", [checkpoint, partial(torchs, use_reentrant=False)], ids=["ours", "torch's"])
def test_of_a_region_the_inputs_count(call, x):
    model = InRegions(call)
    kept = saved_by_line(lambda: model(x).sum().backward())
    assert by_operation(kept) == {"InRegions checkpoint": 2 * BYTES}
    assert kept.rows[0].line == line_of("x = self.call(block, x)")
    assert kept.before_bytes == x.nbytes


@pytest.mark.parametrize("call", [checkpoint, partial(torchs, use_reentrant=False)], ids=["ours", "torch's"])
def test_what_a_selective_policy_keeps_counts(call, x):
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    kept = saved_by_line(lambda: InRegions(partial(call, context_fn=contexts))(x).sum().backward())
    assert by_operation(kept) == {
        "InRegions checkpoint": 2 * BYTES,
        **{f"blocks.{block}.{linear} Addmm": BYTES for block in range(3) for linear in ("first", "second")},
    }


def test_what_keep_keeps_counts():
    def block(x):
        return keep(torch.sigmoid, x * 1).sin()

    kept = saved_by_line(lambda: checkpoint(block, leaf(WIDTH)).sum().backward())
    assert kept.total == 2 * WIDTH * FLOAT


def test_a_replay_of_a_reentrant_region_counts_while_it_is_there():
    model = InRegions(partial(torchs, use_reentrant=True))
    inputs = leaf(BATCH, WIDTH)
    kept = by_operation(saved_by_line(lambda: model(inputs).sum().backward()))
    assert kept["InRegions checkpoint"] == 2 * BYTES
    assert {"Block Sigmoid", "Block Tanh"} & {name.replace("blocks.2", "Block") for name in kept}


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_is_one_operation(x):
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        kept = saved_by_line(lambda: compiled(x).sum().backward())
        assert {(row.module, row.operation) for row in kept.rows} == {("_orig_mod", "CompiledFunction")}
        assert kept.total == 2 * BYTES


def test_other_threads_do_not_count(x):
    model = Net()
    assert saved_by_line(lambda: in_thread(model, x)).total == 0


# nothing changes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda block, x: block(x), checkpoint], ids=["plain", "region"])
def test_gradients_are_those_without_counting(call):
    def counted(block, x):
        outputs = []
        saved_by_line(lambda: outputs.append(call(block, x)))
        return outputs[0]

    block, inputs = Block(), leaf(3, 4)
    assert_equal(run(counted, block, inputs, modules=[block]), run(call, block, inputs, modules=[block]))


def test_counting_holds_nothing():
    hidden = []

    def step():
        y = leaf(WIDTH) * 1
        hidden.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
        return y.sin()

    kept = saved_by_line(step)
    assert hidden[0].expired()
    assert kept.total == WIDTH * FLOAT


def test_hooks_and_policies_are_as_before():
    wrapper = torch.utils.checkpoint._VersionWrapper.__init__
    with pytest.raises(ValueError, match="the pump is off"):
        saved_by_line(failing)
    assert torch.utils.checkpoint._VersionWrapper.__init__ is wrapper
    assert torchckpt.regions.private.hooks_in_force(False) is None


def failing():
    leaf(WIDTH).mul(2).sin()
    raise ValueError("the pump is off")


# where there is no memory ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_an_error_for_want_of_memory_shows_what_was_kept_until_then():
    def step():
        hidden = leaf(WIDTH).mul(2).sin()
        raise torch.OutOfMemoryError(f"no room beside {hidden.nbytes} bytes")

    with pytest.raises(torch.OutOfMemoryError, match="no room beside 64 bytes") as caught:
        saved_by_line(step)
    assert "autograd keeps 64 B, and" in caught.value.__notes__[0]


def test_a_step_that_is_not_callable(x):
    with pytest.raises(ArgumentError) as caught:
        saved_by_line(x)
    assert str(caught.value).splitlines() == [
        "saved_by_line(): the step is not callable",
        "  received: Tensor",
        "  works:    saved_by_line(lambda: model(x).sum().backward())",
    ]


# table and picture ----------------------------------------------------------------------------------------------------


def rows(*sizes: int) -> SavedByLine:
    lines = (SavedLine(f"layers.{i}.up", "Addmm", "/a/gpt.py", 7, size, 1) for i, size in enumerate(sizes))
    return SavedByLine(tuple(lines), 500)


def test_rows_of_like_modules_are_one_in_the_table():
    kept = SavedByLine((*rows(3000, 2000).rows, SavedLine("", "Sin", "/a/gpt.py", 9, 1000, 2)), 500)
    assert str(kept).split("\n") == [
        "autograd keeps 6 kB, and 0.5 kB that were there before",
        "",
        "module       operation        line  storages  bytes   share",
        "layers.*.up      Addmm  a/gpt.py:7         2   5 kB  83.3 %",
        "                   Sin  a/gpt.py:9         2   1 kB  16.7 %",
    ]


def test_a_single_row_keeps_its_number():
    assert "layers.0.up" in str(rows(3000))


def test_the_picture_has_a_bar_for_each_row(tmp_path):
    kept = rows(3000, 2000)
    text = kept.draw(tmp_path / "memory.svg")
    assert text == (tmp_path / "memory.svg").read_text() == kept._repr_svg_()
    words = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert words == [
        "What autograd keeps for the backward",
        "autograd keeps 5 kB, and 0.5 kB that were there before",
        "layers.*.up Addmm a/gpt.py:7",
        "5 kB",
    ]


keeping_sines = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])


def test_what_policies_of_other_threads_keep_does_not_count():
    """Nor is the policy of torch watched when all have ended, in whichever order."""
    init, entered, left = torch.utils.checkpoint._VersionWrapper.__init__, threading.Barrier(2), threading.Event()

    def step(x, wait):
        entered.wait(30)
        checkpoint(lambda x: x.sin().exp(), x, context_fn=keeping_sines).sum().backward()
        entered.wait(30)
        wait()

    def count(size, wait):
        return saved_by_line(lambda: step(leaf(size), wait)).total

    def first():
        total = count(10, lambda: None)
        left.set()
        return total

    assert in_threads(first, lambda: count(1000, lambda: left.wait(30))) == [80, 8000]
    assert torch.utils.checkpoint._VersionWrapper.__init__ is init


def test_what_is_changed_in_place_is_an_error_as_without_it():
    """Torch compares no versions of what saved-tensor hooks have."""

    def step():
        y = leaf(4, 4).exp()
        loss = y.sum()
        with torch.no_grad():
            y.add_(1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved_by_line(step)
