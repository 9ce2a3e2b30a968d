"""Workspaces, by running each kind of operation once."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import fx, nn

from tests.graph.eager import measured_peak
from tests.graph.traced import joint_of
from tests.helpers import leaf
from tests.slow import few
from torchckpt import graph
from torchckpt.graph.step import costs
from torchckpt.graph.step.costs import Cost, Measure

aten = torch.ops.aten


def node_of(target, *args, **kwargs):
    """Tensors among the arguments become nodes with them as values."""
    drawn = fx.Graph()

    def placed(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = drawn.placeholder("x")
        node.meta["val"] = value
        return node

    call = drawn.call_function(target, tuple(map(placed, args)), kwargs)
    call.meta["val"] = torch.empty(1)
    return call


def test_product_of_a_matrix_with_gaps_copies_it():
    gaps, dense = torch.empty(500, 1000)[:, ::2], torch.empty(500, 500)
    assert Measure().of(node_of(aten.mm.default, gaps, dense)).workspace_bytes == 500 * 500 * 4
    assert Measure().of(node_of(aten.mm.default, dense, dense)).workspace_bytes == 0
    assert Measure().of(node_of(aten.sin.default, gaps)).workspace_bytes == 0


def test_product_of_a_conjugate_or_negative_view_copies_it():
    measure, z, x = Measure(), torch.empty(500, 500, dtype=torch.complex64), torch.empty(500, 500)
    assert [measure.of(node_of(aten.mm.default, z, y)).workspace_bytes for y in (z, z.conj())] == [0, 500 * 500 * 8]
    negative = torch._neg_view(x)
    assert [measure.of(node_of(aten.mm.default, x, y)).workspace_bytes for y in (x, negative)] == [0, 500 * 500 * 4]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_operation_that_reads_fp8_which_torch_draws_no_numbers_of(dtype):
    fp8 = torch.empty(50, 40, dtype=dtype)
    assert Measure().of(node_of(aten._to_copy.default, fp8, dtype=torch.float32)).workspace_bytes == 0


@pytest.mark.filterwarnings("error")
def test_an_operation_that_reads_fp4_which_torch_cannot_fill():
    fp4 = torch.empty(50, 40, dtype=torch.float4_e2m1fn_x2)
    assert Measure().of(node_of(aten.clone.default, fp4)).workspace_bytes == 0


def test_kinds_are_shapes_strides_dtypes_and_constants(monkeypatch):
    runs, run = [], Measure._run
    monkeypatch.setattr(Measure, "_run", lambda self, node: runs.append(node) or run(self, node))
    measure, x = Measure(), torch.empty(4, 4)
    same = [node_of(aten.add.Tensor, torch.empty(4, 4), 1) for _ in range(2)]
    others = [
        node_of(aten.add.Tensor, x, 2), node_of(aten.add.Tensor, x.t(), 1), node_of(aten.add.Tensor, x.double(), 1),
        node_of(aten.add.Tensor, x[:2], 1), node_of(aten.sub.Tensor, x, 1), node_of(aten.add.Tensor, x, 1, alpha=2),
    ]
    for node in [*same, *others, *same]:
        measure.of(node)
    assert runs == [same[0], *others]


@pytest.mark.accelerator
def test_checks_are_not_run_on_made_up_numbers(accelerator):
    """One that fails on a GPU fails all that comes after it."""
    for check, *rest in ((aten._assert_async.default,), (aten._assert_async.msg, "is wrong")):
        assert Measure().of(node_of(check, torch.tensor(True, device=accelerator), *rest)) == Cost()
    torch.accelerator.synchronize()
    assert torch.ones(2, device=accelerator).tolist() == [1, 1]


def test_seconds_are_taken_where_there_are_rounds():
    node = node_of(aten.mm.default, torch.empty(50, 50), torch.empty(50, 50))
    assert Measure().of(node).seconds == 0.0
    assert 0 < Measure(rounds=2).of(node).seconds < 1


@pytest.mark.parametrize(
    "node",
    [
        node_of(aten.embedding.default, torch.empty(0, 3), torch.empty(2, dtype=torch.int64)),
        node_of(aten.view.default, torch.empty(4), [3]),
    ],
    ids=["of no rows", "of another size"],
)
def test_what_refuses_made_up_numbers_counts_as_a_copy_of_all_and_a_warning_says_so(node):
    measure = Measure(rounds=1)
    with pytest.warns(UserWarning, match=r"aten\.\w+\.default cannot be measured: on made-up numbers it raises \w+E"):
        assert measure.of(node) == Cost(workspace_bytes=4 * 4 + 4)
    assert measure.of(node) == Cost(workspace_bytes=4 * 4 + 4)


def test_what_writes_to_its_input_is_not_run():
    assert Measure().of(node_of(aten.add_.Tensor, torch.empty(4), 1)) == Cost()


def test_integers_are_ones_too_where_that_is_a_place():
    def of(x, n):
        seen.append(n.tolist())
        return x.new_empty(len(x) if n.all() else 0), n.tolist()[0] or 1 / 0

    seen = []
    n = torch.empty(2, dtype=torch.int64)
    assert Measure().of(node_of(of, torch.empty(5), n)).made_bytes == (20,)
    assert seen == [[0, 0], [1, 1]]
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        Measure().of(node_of(of, torch.empty(1), n))
    assert seen == [[0, 0], [1, 1], [0, 0]]


@few(1)
@pytest.mark.parametrize(
    ("mode", "sparse"), [("sum", False), ("sum", True), ("mean", False), ("mean", True), ("max", False)]
)
def test_bags_take_no_more_than_planned(mode, sparse):
    """A trace tells of no places of words in bags, and of no indices and values of a sparse gradient."""
    words, starts = torch.randint(500, (120,)), torch.tensor([0, 0, 5, 20, 60, 61, 100])
    net = Bags(nn.EmbeddingBag(500, 16, mode=mode, sparse=sparse))
    step = graph.rematerialize(net, words, starts)
    measured = measured_peak(lambda: step(words, starts).backward())
    assert measured - 16 <= step.plan.peak_bytes <= 1.1 * measured


class Bags(nn.Module):
    def __init__(self, bags):
        super().__init__()
        self.bags, self.mix = bags, nn.Linear(16, 16)

    def forward(self, words, starts):
        return self.mix(self.bags(words, starts)).sin().mean()


def test_random_numbers_are_those_of_before():
    before = torch.get_rng_state()
    Measure().of(node_of(aten.bernoulli.default, torch.empty(100)))
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_are_drawn_or_zeros_and_die_at_once():
    seen = []

    def look(x, y, n):
        seen.append(weakref.ref(x))
        assert x is not y
        assert x.any()
        assert not n.any()
        return x

    measure = Measure()
    measure.of(node_of(look, torch.zeros(3), torch.zeros(3), torch.ones(3, dtype=torch.int64)))
    gc.collect()
    assert seen[0]() is None


def test_storages_of_outputs_are_seen_and_those_of_inputs_are_not():
    x = torch.empty(100, 10)
    assert Measure().of(node_of(aten.mse_loss.default, x, x)).made_bytes == (4000,)  # a scalar in what it has reduced
    assert Measure().of(node_of(lambda x: (x.sum(), x.view(-1), x + 1), x)).made_bytes == (4, 0, 4000)


def test_operator_that_draws_and_does_not_say_so():
    assert Measure().of(node_of(lambda x: torch.rand_like(x), torch.empty(3))).draws
    assert not Measure().of(node_of(aten.sin.default, torch.empty(3))).draws


def test_inputs_lie_in_memory_as_they_do_in_the_trace():
    seen = []
    gaps = torch.empty(6, 8)[:, ::2]
    Measure().of(node_of(lambda x: seen.append((x.shape, x.stride(), x.untyped_storage().nbytes())), gaps))
    assert seen == [((6, 4), (8, 2), 6 * 8 * 4)]


def test_nothing_is_traced_or_differentiated_while_it_runs():
    seen = []

    def look(x):
        seen.append((type(x), torch.is_grad_enabled(), x.requires_grad))
        return x

    node = node_of(look, torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        Measure().of(node)
    assert seen == [(torch.Tensor, False, False)]


def test_workspaces_are_in_the_dataflow():
    """The product with a transposed slice copies it."""
    flow = joint_of(lambda x, w: (x[:, ::2] @ w).sum(), torch.randn(6, 8), leaf(4, 3)).flow
    assert flow.operations[0].workspace_bytes == 6 * 4 * 4


def test_any_accelerator_is_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(len(ran)))
    ran = []
    costs._timed(lambda: ran.append("operation"))
    assert waits == [1]
