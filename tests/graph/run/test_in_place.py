"""rematerialize_(): the module is what it was, and keeps less."""
from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

from tests.graph.allocations import measured_peak
from tests.helpers import assert_equal
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import ArgumentError, BudgetInfeasible, CaptureError
from torchckpt.regions.wrap.module import checkpoint_module


class Block(nn.Module):
    """With a dropout, a batch norm, a tied weight and a buffer."""

    def __init__(self, width=6):
        super().__init__()
        self.rise, self.fall = nn.Linear(width, width), nn.Linear(width, width)
        self.fall.weight = self.rise.weight
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            x = self.drop(self.fall(self.norm(self.rise(x)).tanh()).tanh()) * self.scale
        return x.sum()


class Holder(nn.Module):
    """As a LightningModule holds a model."""

    def __init__(self):
        super().__init__()
        self.model, self.head = Block(), nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.model(x, times=2).reshape(1, 1)).sum()


def built(cls=Holder):
    torch.manual_seed(0)
    return cls()


def inputs(rows=5):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


def stepped(model, *args, **kwargs):
    """Loss, gradients, buffers and random numbers of one step."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(*args, **kwargs)
    loss.backward()
    return [loss.detach(), [p.grad for p in model.parameters()], dict(model.named_buffers()), torch.get_rng_state()]


def test_a_part_of_a_module_keeps_its_keys_its_class_and_its_bits():
    model, twin = built(), built()
    keys, text, before = list(model.state_dict()), repr(model), type(model.model)
    handle = graph.rematerialize_(model.model, keep="memory")
    assert list(model.state_dict()) == keys
    assert repr(model) == text
    assert isinstance(model.model, Block)
    assert model.model.rise.weight is model.model.fall.weight
    assert inspect.signature(model.model.forward) == inspect.signature(twin.model.forward)
    for _ in range(2):
        assert_equal(stepped(model, inputs()), stepped(twin, inputs()))
    assert len(handle.plans) == 1
    assert handle.plan.recomputed
    handle.remove()
    assert type(model.model) is before
    assert_equal(stepped(model, inputs()), stepped(twin, inputs()))
    assert len(handle.plans) == 1
    handle.remove()


def test_peak_is_the_plans():
    model = built(Block)
    with graph.rematerialize_(model, inputs(200), budget="80%") as handle:
        model(inputs(200)).backward()
        model.zero_grad()
        x = inputs(200)
        assert measured_peak(lambda: model(x).backward()) <= handle.plan.budget_bytes
    assert type(model) is Block


def test_handle_tells_of_itself():
    model = built(Block)
    handle = graph.rematerialize_(model, keep="speed")
    assert repr(handle) == "<RematerializeHandle: Block, in place, no plan yet>"
    with pytest.raises(ArgumentError, match=r"no example, and no call yet\n  works:    graph.rematerialize_\("):
        handle.plan  # noqa: B018
    plan = handle.prepare(inputs(), times=2)
    handle.remove()
    assert repr(handle) == f"<RematerializeHandle: Block, removed, {repr(plan).strip('<>')}>"


def test_without_derivatives_the_module_itself_runs(traces):
    model = built(Block)
    handle = graph.rematerialize_(model, keep="speed")
    with torch.no_grad():
        model(inputs())
    assert traces == []
    model(inputs()).backward()
    assert len(handle.plans) == len(traces) == 1


@few(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_traces_with_what_it_holds(copied, traces):
    model = built(Block)
    handle = graph.rematerialize_(model, inputs(), keep="memory")
    twin = copied(model)
    if copied is not copy.copy:
        with torch.no_grad():
            twin.rise.weight.mul_(2.0)
            expected = built(Block)
            expected.rise.weight.mul_(2.0)
        assert_equal(stepped(twin, inputs()), stepped(expected, inputs()))
        assert twin.rise.weight is twin.fall.weight
        assert [p.grad for p in model.parameters()] == [None] * 5
    else:
        stepped(twin, inputs())
    assert len(traces) == 2
    assert len(handle.plans) == 1
    handle.remove()
    assert type(model) is Block
    assert type(twin) is not Block


def test_model_dies():
    model = built(Block)
    graph.rematerialize_(model, inputs())
    model(inputs()).backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_own_hooks_run_at_each_call_and_those_of_children_in_the_trace():
    model, ran = built(Block), []
    graph.rematerialize_(model, keep="speed")
    model.register_forward_pre_hook(lambda *_: ran.append("before"))
    model.register_forward_hook(lambda *_: ran.append("after"))
    model.rise.register_forward_hook(lambda *_: ran.append("child"))
    model(inputs()).backward()
    assert {*ran[1:-1]} == {"child"}
    del ran[:]
    model(inputs()).backward()
    assert ran == ["before", "after"]


def test_buffer_that_the_forward_replaces():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x.detach()
            return (self.weight * x - self.mean).square().sum()

    model, twin = Counting(), Counting()
    graph.rematerialize_(model)
    for _ in range(3):
        assert_equal(stepped(model, torch.ones(3)), stepped(twin, torch.ones(3)))
    assert_equal(model.mean, torch.full((3,), 1.75))


def test_attribute_of_the_module_itself_has_it_traced_anew(traces):
    class Scaled(nn.Linear):
        times = 1

        def forward(self, x):
            return super().forward(x).sum() * self.times

    model = Scaled(3, 3)
    graph.rematerialize_(model)
    first = model(torch.ones(3))
    model.times = 2
    assert torch.equal(model(torch.ones(3)), 2 * first)
    assert len(traces) == 2


def test_module_that_is_checkpointed():
    model, twin = built(), built()
    checkpoint_module(model.head)
    graph.rematerialize_(model, keep="speed")
    assert_equal(stepped(model, inputs()), stepped(twin, inputs()))


def test_nested_in_place_is_one_trace(traces):
    model, twin = built(), built()
    inner, outer = graph.rematerialize_(model.model), graph.rematerialize_(model, keep="speed")
    assert_equal(stepped(model, inputs()), stepped(twin, inputs()))
    assert (len(traces), len(inner.plans), len(outer.plans)) == (1, 0, 1)


def test_code_that_is_compiled_around_it_runs_it_as_it_is():
    model, twin = built(Block), built(Block)
    handle = graph.rematerialize_(model, keep="speed")
    compiled = torch.compile(model.eval(), backend="eager")
    assert_equal(stepped(compiled, inputs())[:2], stepped(twin.eval(), inputs())[:2])
    assert len(handle.plans) == 1
    with pytest.raises(ArgumentError, match=r"torch.compile cannot compile a rematerialized module"):
        model.compile()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: 3, "the first argument is not a module\n  received: 3"),
        (lambda: nn.Linear, "works:    graph.rematerialize_(Linear(...), inputs): the class is called first"),
        (lambda: [nn.Linear(2, 2)], "works:    graph.rematerialize_(nn.Sequential(*layers), inputs); or each layer by"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), "works:    for layer in layers: graph.rematerialize_(layer)"),
        (lambda: graph.rematerialize(nn.Linear(2, 2)), "received: what graph.rematerialize() returned"),
    ],
)
def test_what_cannot_be_changed_in_place(make, text):
    with pytest.raises(ArgumentError) as caught:
        graph.rematerialize_(make())
    assert text in str(caught.value)


def test_twice_is_refused_and_so_is_a_forward_on_the_instance():
    model = built(Block)
    graph.rematerialize_(model)
    with pytest.raises(ArgumentError, match=r"Block, rematerialized\n  works:    handle.remove"):
        graph.rematerialize_(model)
    other = nn.Linear(2, 2)
    other.forward = other.forward
    with pytest.raises(ArgumentError, match="Linear, whose forward is set on it"):
        graph.rematerialize_(other)


@few(1)
@pytest.mark.parametrize(
    ("example", "options", "error"),
    [((inputs(),), {"budget": 1}, BudgetInfeasible), (([1],), {}, ArgumentError), ((), {"budget": "x"}, ArgumentError),
     ((inputs(), object()), {}, CaptureError)],
)
def test_after_an_error_the_module_is_as_it_was(example, options, error):
    model = built(Block)
    with pytest.raises(error):
        graph.rematerialize_(model, *example, **options)
    assert type(model) is Block


@pytest.mark.slow
def test_inductor():
    model, twin = built().eval(), built().eval()
    handle = graph.rematerialize_(model.model, keep="speed", engine="inductor")
    torch.testing.assert_close(model(inputs()), twin(inputs()))
    assert len(handle.plans) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_in_a_lightning_module():
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Trained(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = built(Block), []

        def training_step(self, batch, _):
            loss = self.model(batch)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    losses = []
    for budget in (None, "90%"):
        trained = Trained()
        keys = list(trained.state_dict())
        if budget:
            graph.rematerialize_(trained.model, inputs(64), budget=budget)
        torch.manual_seed(2)
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
        batches = torch.utils.data.DataLoader([inputs(64), inputs(64) + 1], batch_size=None)
        trainer.fit(trained, batches)
        assert list(trained.state_dict()) == keys
        losses.append((trained.losses, {name: value.clone() for name, value in trained.state_dict().items()}))
    assert_equal(*losses)
