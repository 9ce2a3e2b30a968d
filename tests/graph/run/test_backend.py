"""Under torch.compile: the same schedule, Dynamo's graph, and kernels that stay within the plan."""
from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.graph.allocations import measured_peak
from tests.graph.eager import assert_same, step
from tests.graph.whole.test_models import SIZES
from tests.helpers import assert_equal, leaf
from tests.models import MODELS
from tests.slow import few, slow
from torchckpt import graph
from torchckpt.errors import ArgumentError, BudgetInfeasible, CaptureError
from torchckpt.graph.annotations import mark_of, module_of, regions_of
from torchckpt.graph.planner import GraphPlanner
from torchckpt.graph.run.backend import Backend, backend
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import simulate
from torchckpt.planning.remat.search.planner import fit

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # Inductor's own

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor makes C++")


class Planner(GraphPlanner):
    """Plans by a function of the dataflow, and remembers the joint graph."""

    def __init__(self, schedule):
        super().__init__(None, None, "roofline", "keep", False, {})
        self._of = schedule

    def __call__(self, joint):
        super().__call__(joint)
        self.joint, schedule = joint, tuple(self._of(joint.flow))
        self.planned_bytes = simulate(joint.flow, schedule).peak_bytes
        return schedule


SCHEDULES = {
    "eager": lambda flow: flow.eager,
    "all dropped": lambda flow: late(flow, frozenset()),
    "half": lambda flow: fit(flow, simulate(flow, flow.eager).peak_bytes * 6 // 10).schedule,
}


@pytest.fixture(autouse=True)
def dynamo(monkeypatch):
    """Each test compiles anew; what was compiled from C++ stays for the next run."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "torchckpt-tests-inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, compiler, **options):
    return torch.compile(model, backend=compiler, **{"fullgraph": True, "dynamic": False, **options})


def planned(model, schedule, inner):
    """The compiled model, and what has planned it."""
    planners = []

    def planner():
        planners.append(Planner(SCHEDULES[schedule]))
        return planners[-1]

    return compiled(model, Backend(planner, inner)), planners


# inner="eager" --------------------------------------------------------------------------------------------------------


SMALL = ["mlp24", "sparse_embedding", "moe", *slow(["gpt6", "unet", "llama_hf"])]


@few(1)
@pytest.mark.parametrize("name", SMALL)
def test_operators_give_the_bits_of_eager(name):
    case = MODELS[name](**SIZES[name])
    call, _ = planned(case.model, "all dropped", "eager")
    assert_same(step(case.model, case.inputs, case.loss, call=call), step(case.model, case.inputs, case.loss))


def test_parameters_of_an_output_that_no_loss_reads_have_no_gradient():
    case = MODELS["nested_outputs"]()
    call, _ = planned(case.model, "all dropped", "eager")
    received, expected = (step(case.model, case.inputs, case.loss, call=function) for function in (call, case.model))
    assert expected.gradients["spare.weight"] is None
    assert_same(received, expected)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        h = self.body(x).tanh()
        return self.first(h), self.second(h).relu().sqrt()


def test_a_graph_is_retained_from_one_output_to_the_next():
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(2, 3)
    received, expected = compiled(model, backend(inner="eager"))(x), model(x)
    for place in (0, 1, 0):
        assert_equal(*(
            torch.autograd.grad(outputs[place].sum(), list(model.parameters()), retain_graph=True, allow_unused=True)
            for outputs in (received, expected)
        ))


def test_a_backward_is_not_differentiated():
    outputs = compiled(Heads(), backend(inner="eager"))(leaf(2, 3))
    with pytest.raises(CaptureError, match="the backward of a traced call cannot be differentiated"):
        outputs[0].sum().backward(create_graph=True)


def test_predicted_bytes_of_operators_are_the_measured_ones():
    model, x = Perceptron(p=0.0), torch.randn(300, 32)
    call, planners = planned(model, "all dropped", "eager")
    call(x).backward()
    assert measured_peak(lambda: call(x).backward()) == pytest.approx(planners[-1].planned_bytes, abs=64)


def test_budget_holds_and_its_plan_can_be_read():
    model, x = Perceptron(p=0.0), torch.randn(300, 32)
    compiler = backend(budget="80%", inner="eager")
    call = compiled(model, compiler)
    call(x).backward()
    (plan,) = compiler.plans
    model.zero_grad()
    assert measured_peak(lambda: call(x).backward()) <= 0.8 * plan.eager_peak_bytes


def test_each_shape_has_its_plan():
    compiler = backend(inner="eager")
    call = compiled(Perceptron(), compiler)
    for batch in (3, 5, 3):
        call(torch.randn(batch, 32)).backward()
    assert len(compiler.plans) == 2


def test_without_gradients_nothing_is_planned():
    compiler = backend(inner="eager")
    model, x = Perceptron(p=0.0), torch.randn(3, 32)
    with torch.no_grad():
        assert torch.equal(compiled(model, compiler)(x), model(x))
    assert compiler.plans == []


# marks, regions, modules ----------------------------------------------------------------------------------------------


@graph.region
def twice(x):
    return x.sin().cos()


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = graph.mark(self.layers[0](x), "h")
        with graph.region("outer"):
            x = x.exp()
            with graph.region("inner"):
                x = self.layers[1](x)
            x = graph.region(self.layers[2])(x)
        x = twice(twice(x))
        x = graph.sequential([torch.sin, torch.cos, torch.sin], 2, x)
        return graph.mark({"x": x, "n": 3}, "out")["x"].sum()


@pytest.fixture
def nodes():
    call, planners = planned(Marked(), "eager", "eager")
    call(torch.randn(3, 4)).backward()
    return [node for node in planners[-1].joint.nodes if node is not None]


def test_regions_reach_the_graph_and_each_has_a_number_of_its_own(nodes):
    paths = list(dict.fromkeys(regions_of(node) for node in nodes))
    names = [tuple(region.partition("#")[0] for region in path) for path in paths]
    assert names[:7] == [
        (), ("outer",), ("outer", "inner"), ("outer", "Sequential"), ("twice",), ("twice",), ("segment 0",),
    ]
    assert len({region for path in paths for region in path}) == 6


def test_modules_reach_the_graph(nodes):
    modules = [module_of(node) for node in nodes if "addmm" in node.name or "tanh" in node.name]
    assert modules[:6] == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1", "layers.2.0", "layers.2.1"]


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_marks_reach_the_graph(inner):
    call, planners = planned(Marked(), "eager", inner)
    call(torch.randn(3, 4)).backward()
    marks = [mark_of(node) for node in planners[-1].joint.views]
    assert sorted(filter(None, marks)) == ["h", "out"]


def test_marked_values_are_kept_by_name():
    compiler = backend(keep=["h"], inner="eager")
    compiled(Marked(), compiler)(torch.randn(3, 4)).backward()
    assert "h" in compiler.plans[0].names


# what cannot be planned -----------------------------------------------------------------------------------------------


def branching(x):
    x = (x * 2).tanh()
    return (x + 1).sum() if x.sum() > 0 else x.sum()


def printing(x):
    print("here")
    return twice(x).sum()


def looping(x):
    for _ in range(2):
        x = plain(x)
        print("here")
    return x.sum()


def plain(x):
    return x.sin().cos()


@pytest.mark.parametrize(
    ("function", "where"),
    [(branching, "if x.sum() > 0"), (printing, 'print("here")'), (looping, "x = plain(x)")],
)
def test_a_graph_that_breaks_is_refused_and_the_line_told(function, where):
    call = compiled(function, backend(inner="eager"), fullgraph=False)
    with pytest.raises(CaptureError, match="Dynamo has broken the graph") as raised:
        call(torch.ones(3, requires_grad=True))
    assert where in str(raised.value)
    assert "test_backend.py" in str(raised.value)


def test_a_break_with_fullgraph_is_told_by_torch():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent branching"):
        compiled(branching, backend(inner="eager"))(torch.ones(3, requires_grad=True))


def test_unknown_sizes_are_refused():
    call = compiled(Perceptron(), backend(inner="eager"), dynamic=True)
    with pytest.raises(CaptureError, match="dynamic=False"):
        call(torch.randn(3, 32))


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_budget_that_cannot_be_held_is_an_error_of_its_own(inner):
    call = compiled(Perceptron(), backend(budget=1000, inner=inner))
    for _ in range(2):
        with pytest.raises(BudgetInfeasible, match="the least found"):
            call(torch.randn(300, 32))


def test_arguments_are_checked_at_once():
    with pytest.raises(ArgumentError, match='inner is neither "inductor" nor "eager"'):
        backend(inner="aot")
    with pytest.raises(ArgumentError, match=r"backend\(\)"):
        backend(keep="fast")


# inner="inductor" -----------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self, p=0.3):
        super().__init__()
        parts = [part for _ in range(2) for part in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(p))]
        self.body = nn.Sequential(*parts, nn.Linear(32, 5))

    def forward(self, x):
        return self.body(x).square().mean()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        parts = [part for _ in range(2) for part in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())]
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        return self.body(x).square().mean()


def result(model, x, call):
    return step(model, (x,), lambda loss: loss, call=call)


@pytest.mark.slow
@needs_compiler
def test_masks_that_are_drawn_again_are_those_of_the_forward():
    model, x = Perceptron(), torch.randn(100, 32)
    received, expected = (result(model, x, planned(model, name, "inductor")[0]) for name in ("all dropped", "eager"))
    assert_equal(received.rng_states, expected.rng_states)
    torch.testing.assert_close(received[:3], expected[:3])


@pytest.mark.slow
@needs_compiler
def test_masks_are_those_of_eager_where_inductor_draws_as_it_does():
    model, x = Perceptron(), torch.randn(100, 32)
    with torch._inductor.config.patch(fallback_random=True):
        received = result(model, x, planned(model, "all dropped", "inductor")[0])
    torch.testing.assert_close(received[:3], result(model, x, model)[:3])


@pytest.mark.slow
@needs_compiler
def test_batch_norms_count_once():
    model, x = Convolutions(), torch.randn(2, 3, 8, 8)
    received = result(model, x, planned(model, "all dropped", "inductor")[0])
    torch.testing.assert_close(received[:3], result(model, x, model)[:3])


class Remembering(nn.Module):
    """Its forward and its backward read a buffer that it then changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("before", torch.arange(8.0))

    def forward(self, x):
        y = (self.layer(x) * self.before.sin()).tanh()
        self.before.add_(1)
        return y.sum()


@pytest.mark.slow
@needs_compiler
def test_a_buffer_that_changes_is_read_in_the_backward_as_it_was_before():
    model, x = Remembering(), torch.randn(5, 8)
    with torch.no_grad():
        sine = model.before.sin()
    expected = result(model, x, lambda x: (model.layer(x) * sine).tanh().sum())
    received = result(model, x, planned(model, "all dropped", "inductor")[0])
    torch.testing.assert_close(received[:2], expected[:2])
    assert torch.equal(received.buffers["before"], torch.arange(8.0) + 1)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("budget", "near"), [(None, 1.1), ("90%", 1.3)])
def test_kernels_stay_within_the_plan_and_near_it(budget, near, monkeypatch):
    # Inductor compiles a program for each kind of vectors to see what runs here. No byte depends on it.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    model, x = Perceptron(), torch.randn(2000, 32)
    compiler = graph.backend(budget=budget)
    call = compiled(model, compiler)
    call(x).backward()
    model.zero_grad()
    measured = measured_peak(lambda: call(x).backward())
    assert measured <= compiler.plans[0].peak_bytes <= near * measured


class Reduced(nn.Module):
    """On a CPU, loops that Inductor does not fuse run in one C++ function, which frees at its end."""

    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Tanh()) for _ in range(3))
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        y = self.layers(x)
        return (y * 0.7).square().sum() + y.sum() * 0.1


class Sorted(nn.Module):
    """Nothing reads the places that an operator returns beside the values."""

    def forward(self, x):
        return x.exp().detach().sort(-1).values.sum() * x.sum()


class Ranked(nn.Module):
    """A kernel that is called, as a product or a cumsum, frees at once what it has read."""

    def __init__(self):
        super().__init__()
        self.wide, self.same = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x):
        best = self.wide(x).topk(3, -1).values.softmax(-1).sum()
        return best + self.same(x).cumsum(0).max(0).values.sum() + self.same(x).median(-1).values.sum()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget"), [(Reduced, "80%"), (Sorted, None), (Ranked, None)])
def test_what_kernels_take_together_is_in_the_plan(kind, budget):
    model, x = kind(), torch.randn(40 if kind is Ranked else 48, 32, requires_grad=kind is Sorted)
    compiler = graph.backend(budget=budget)
    call = compiled(model, compiler)
    call(x).backward()
    model.zero_grad()
    x.grad = None
    measured = measured_peak(lambda: call(x).backward())
    assert measured <= compiler.plans[0].peak_bytes <= 1.02 * measured


class Quarters(torch.autograd.Function):
    """A product that saves its factors in eight bits."""

    @staticmethod
    def forward(ctx, x, weight):
        x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient.to(torch.float8_e5m2).float()
        return gradient @ weight.float(), gradient.t() @ x.float()


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back = (nn.Parameter(torch.randn(*shape) / 4) for shape in ((32, 16), (16, 32)))

    def forward(self, x):
        return F.dropout(Quarters.apply(F.gelu(Quarters.apply(x, self.wide)), self.back), 0.3) + x


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_every_budget_above_the_least_that_is_named_will_do():
    """Fusion adds bytes to a plan for more, and there was no room for them: it was refused."""
    x = torch.randn(8, 16, requires_grad=True)

    def peak(budget):
        torch._dynamo.reset()
        compiler = graph.backend(budget=budget)
        compiled(nn.Sequential(*(Narrow() for _ in range(4))), compiler)(x).sum().backward()
        return compiler.plans[0].peak_bytes

    with pytest.raises(BudgetInfeasible) as caught:
        peak("30%")
    least = re.search(r'budget="([\d.]+)kB" or more', str(caught.value))
    for more in (0, 0.1, 0.3, 0.6, 1, 1.5):
        budget = float(least[1]) + more
        assert peak(f"{budget:.2f}kB") <= 1000 * budget


# what torch's own backends do not notice ------------------------------------------------------------------------------


def compiled_by_operators(model):
    return torch.compile(model, backend=backend(inner="eager"), fullgraph=True, dynamic=False)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.BatchNorm1d(4), nn.Parameter(torch.ones(4))

    def forward(self, h, x):
        return self.norm(self.norm(h * self.weight) + x).sin().sum()


def test_backward_inside_of_autocast_is_that_of_the_forward():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    results = []
    for call in (model, compiled_by_operators(model)):
        model.zero_grad()
        loss = call(x).sin().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=call is not model):
            loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert_equal(*results)


def test_random_numbers_that_nothing_reads_are_drawn():
    class Net(nn.Linear):
        def forward(self, x):
            torch.rand(3)
            torch.rand_like(x)
            return torch.dropout(super().forward(x), 0.5, True)

    net, x = Net(8, 8), torch.randn(4, 8)
    results = []
    for call in (net, compiled_by_operators(net)):
        torch.manual_seed(0)
        results.append((call(x), torch.get_rng_state()))
    assert_equal(*results)


def test_argument_that_lies_in_a_buffer_that_changes():
    """In all calls of a compiled graph, or in none: Dynamo has no guard for that."""
    h, other = torch.randn(6, 4), torch.randn(4)
    for first, later in ((True, False), (False, True)):
        torch._dynamo.reset()
        net, plain = Normed(), Normed()
        call = compiled_by_operators(net)
        for _ in range(2):
            received, expected = (m(h, owner.norm.running_mean[:] if first else other)
                                  for m, owner in ((call, net), (plain, plain)))
            assert_equal(received, expected)
            assert_equal(list(net.buffers()), list(plain.buffers()))
        if later:
            with pytest.raises(CaptureError, match="an input lies in a buffer that the call changes in some calls"):
                call(h, net.norm.running_mean[:])
            assert_equal(list(net.buffers()), list(plain.buffers()))


@few(1)
@pytest.mark.parametrize("part", [lambda b: b[::2], lambda b: b[5:], lambda b: b.as_strided((4,), (0,))])
def test_view_of_an_argument_that_is_a_part_of_a_buffer_that_changes(part):
    """AOTAutograd makes that view of the whole buffer: other numbers. A view of the whole is right."""
    def viewed(lies, net):
        return [(net(lies(net.steps)), net.steps.clone()) for _ in range(2)]

    torch._dynamo.reset()
    net, plain = Counting(), Counting()
    assert_equal(viewed(lambda b: b[:], compiled_by_operators(net)), viewed(lambda b: b[:], plain))
    torch._dynamo.reset()
    with pytest.raises(CaptureError, match=r"(?s)returns a view of an input.*x = x\.clone\(\)"):
        viewed(part, compiled_by_operators(Counting()))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.arange(16.0))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = x.sum() * self.scale
        self.steps.mul_(0.5)
        return y, x[1:3]
