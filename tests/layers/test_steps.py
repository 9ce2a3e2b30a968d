"""Steps that nobody announces: what is kept in each, and that no bit differs from the plain model's."""
from __future__ import annotations

import copy
import gc
import re
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import torchckpt
from tests.helpers import Probe
from tests.layers.models import Attention, Model, Wide, gradients, plain_gradients, random_model
from tests.slow import few, slow
from torchckpt.regions.live import LiveStorages
from torchckpt.testing import count_recomputes, peak_bytes


def assert_equal(found, expected):
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def recomputes(model, *inputs):
    """How many calls a step recomputes, which gives the gradients of the plain model."""
    expected = plain_gradients(model, *inputs)
    with count_recomputes() as counted:
        assert_equal(gradients(model, *inputs), expected)
    return counted.total


def peak_of(step):
    live = LiveStorages(torch.device("cpu"))
    with live:
        live.begin()
        step()
        return live.highest()


def test_the_first_step_recomputes_everything_and_the_others_what_they_must(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        counts = [recomputes(model, x) for _ in range(4)]
        assert counts[0] == 6
        assert 0 < counts[1] < 6
        assert counts[1:] == [6 - len(handle.plan.kept)] * 3
    assert recomputes(model, x) == 0


@few(1)
@pytest.mark.parametrize("seed", [*range(3), *slow(range(3, 6))])
@pytest.mark.parametrize("share", [80, 92])
def test_the_peak_is_the_planned_one(seed, share):
    model, x = random_model(seed), torch.randn(8, 256, 16)
    with torchckpt.checkpoint_layers(model, "layers.*", budget=f"{share}%") as handle:
        for _ in range(4):
            gradients(model, x)
        taken = peak_of(lambda: model(x).square().mean().backward())
        plan = handle.plan
    assert taken <= plan.budget_bytes
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
    assert taken == pytest.approx(plan.peak_bytes, rel=0.02)


@few(1)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_weights_that_autocast_casts_count_once(order):
    """It holds what it casts until the forward is done, and then each kept call holds it."""
    model, x = Model([Wide(32, 128 * width) for width in (2, 1, 3, 2)], 32), torch.randn(8, 16, 32)
    model.layers = nn.ModuleList([model.layers[at] for at in order])

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    plain = peak_of(partial(step, copy.deepcopy(model)))
    with torchckpt.checkpoint_layers(model, "layers.*", budget="100%") as handle:
        for _ in range(3):
            model.zero_grad()
            taken = peak_of(partial(step, model))
        plan = handle.plan
    assert plan.everything_kept_bytes == pytest.approx(plain, rel=0.01)
    assert taken == pytest.approx(plan.peak_bytes, rel=0.01)
    assert len(plan.kept) == 4


def test_outputs_that_a_replay_makes_again_count_once(x):
    class Two(Wide):
        def forward(self, x):
            h = self.norm(x).tanh()
            return x + self.parts(h), h

    class First(Model):
        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return self.head(x)

    model = First([Two(16, 16) for _ in range(3)], head=4)
    plain = peak_of(lambda: copy.deepcopy(model)(x).square().mean().backward())
    with torchckpt.checkpoint_layers(model, "layers.*", budget="100%") as handle:
        for _ in range(2):
            gradients(model, x)
        assert handle.plan.peak_bytes == pytest.approx(plain, rel=0.02)


def test_a_call_that_no_backward_reaches_says_nothing_of_others(model, x):
    class Unread(Model):
        def forward(self, x):
            for layer in [*self.layers][:-1]:
                x = layer(x)
            self.layers[-1](x)
            return x

    model = Unread([Wide(16, 32) for _ in range(4)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="100%") as handle:
        assert [recomputes(model, x) for _ in range(3)] == [3, 0, 0]
        assert [call.replay_seconds > 0 for call in handle.plan.took.calls] == [True] * 3 + [False]


def test_like_calls_take_the_seconds_of_the_one_that_was_disturbed_least(x, monkeypatch):
    """As the first one is, whose kernels are loaded."""
    now = [0.0]

    class Slow(Wide):
        def forward(self, x):
            now[0] += 100.0 if now[0] == 0 else 1.0
            return super().forward(Probe.apply(x, later))

    def later():
        now[0] += 50.0 if now[0] < 105 else 2.0

    clock = mock.Mock(stamp=lambda: now[0], reader=lambda: float)
    monkeypatch.setattr("torchckpt.layers.count.Clock", lambda device: clock)
    model = Model([Slow(16, 32) for _ in range(4)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="60%") as handle:
        for _ in range(2):
            model(x).sum().backward()
        assert [call[1:4] for call in handle.plan.took.calls] == [(1.0, 1.0, 2.0)] * 4


def test_where_everything_fits_no_region_is_made(model, x):
    copied = copy.deepcopy(model)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB") as handle:
        recomputes(model, x)
        assert recomputes(model, x) == 0
        assert handle.plan.kept == frozenset(range(6))
        assert "everything fits" in str(handle.report())
        plain = peak_of(lambda: copied(x).square().mean().backward())
        assert handle.plan.peak_bytes == pytest.approx(plain, rel=0.02)


def test_several_forwards_before_one_backward(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="60%") as handle:
        counts = [recomputes(model, x, x + 1) for _ in range(3)]
        assert counts[0] == 12
        assert len(handle.plan.took.calls) == 12
        assert counts[1] == counts[2] == 12 - len(handle.plan.kept)


def test_backwards_one_by_one_after_several_forwards(model, x):
    def step(model):
        torch.manual_seed(1)
        losses = [model(x + at).square().mean() for at in range(2)]
        for loss in losses:
            loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    expected = step(copy.deepcopy(model))
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        for _ in range(4):
            assert_equal(step(model), expected)
        assert handle.plan.measured_peak_bytes <= handle.plan.budget_bytes
        assert 0 < len(handle.plan.kept) < 12


def together(model, x):
    sum(model(x + at).square().mean() for at in range(2)).backward()


def one_by_one(model, x):
    for loss in [model(x + at).square().mean() for at in range(2)]:
        loss.backward()


@few(1)
@pytest.mark.parametrize("steps", [(together, one_by_one), (one_by_one, together)])
def test_backwards_in_another_order_are_counted_when_they_come_again(steps):
    """The forwards are alike, and what they take is not."""
    model, x = Model([Wide(16, 16 * width, 2) for width in (8, 1, 1, 2)]), torch.randn(8, 64, 16)
    first, second = steps
    least = max(peak_of(partial(step, copy.deepcopy(model), x)) for step in steps)
    budget = int(0.82 * least)
    peaks = []
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget) as handle:
        for step in [first] * 4 + [second] * 2 + [first, second] * 4:
            model.zero_grad()
            peaks.append(peak_of(partial(step, model, x)))
        assert max(peaks[5:]) <= budget
        assert 0 < len(handle.plan.kept) < 8


def test_a_backward_that_comes_now_and_then_is_counted(model, x):
    """All is recomputed until it comes again, and then both follow one plan."""
    counts = []
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for at in range(1, 40):
            loss = model(x).square().mean()
            with count_recomputes() as counted:
                if at % 10 == 0:
                    loss.backward(retain_graph=True)
                loss.backward()
            counts.append(counted.total)
    assert counts == [6] + [0] * 9 + [6] * 10 + [0] * 19


def test_gradients_that_are_accumulated_and_evaluation_between(model, x):
    plain = copy.deepcopy(model)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        for step in range(4):
            torch.manual_seed(step)
            for own in (plain, model):
                torch.manual_seed(step)
                own(x).square().mean().backward()
            model.eval()
            with torch.no_grad(), count_recomputes() as counted:
                model(x)
            model.train()
        assert counted.total == 0
        assert len(handle.plan.took.calls) == 6
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_gradients_without_the_models_own_call(model, x):
    """A loop that calls the layers by itself."""
    def step():
        torch.manual_seed(1)
        y = x
        for layer in model.layers:
            y = layer(y)
        y.square().mean().backward()

    with torchckpt.checkpoint_layers(model, "layers.*", budget="60%") as handle, count_recomputes() as counted:
        for _ in range(3):
            step()
        assert counted.total == 6 + 2 * (6 - len(handle.plan.kept))


def test_a_layer_that_is_called_several_times_and_shared(x):
    shared = Wide(16, 48)
    model = Model([shared, Wide(16, 32), shared])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="80%") as handle:
        assert recomputes(model, x) == 3
        recomputes(model, x)
        assert len(handle.names) == 2
        assert [call.layer for call in handle.plan.took.calls] == [0, 1, 0]


def test_outputs_that_the_loop_holds_and_the_loss_does_not_need(x):
    class Routed(Wide):
        def forward(self, x):
            return {"logits": self.norm(x).sum(-1), "x": super().forward(x)}

    class Router(Model):
        def forward(self, x):
            logits = []
            for layer in self.layers:
                found = layer(x)
                x = found["x"]
                logits.append(found["logits"])
            return x, logits

    model = Router([Routed(16, 16 * (1 + at)) for at in range(4)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB") as handle:
        for _ in range(3):
            outputs, logits = model(x)
            outputs.square().mean().backward()
        assert len(logits) == 4
        assert len(handle.plan.kept) == 4


@dataclass
class Box:
    """An object whose tensor torch's pytree does not see."""

    x: torch.Tensor


class Boxed(Wide):
    def forward(self, box):
        return Box(super().forward(box.x))


def test_layers_that_hide_their_tensors_are_recomputed(x):
    class Boxes(Model):
        def forward(self, x):
            box = Box(self.first(x))
            for layer in self.layers:
                box = layer(box)
            return self.head(box.x)

    model = Boxes([Boxed(16, 16 * (1 + at)) for at in range(4)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        assert recomputes(model, x, x) == 8
        with pytest.warns(UserWarning, match="objects whose tensors are not seen, so every call is recomputed"):
            assert recomputes(model, x, x) == 8
        assert recomputes(model, torch.cat([x, x])) == 4


def test_a_layer_that_calls_another(x):
    class Linked(Wide):
        def forward(self, x):
            return self.then[0](super().forward(x)) if self.then else super().forward(x)

    layers = [Linked(16, 16 * (1 + at)) for at in range(4)]
    model = Model(layers)
    for layer, then in zip(layers, ([layers[1]], [], [layers[3]], [])):
        layer.then = then
    model.forward = lambda x: layers[2](layers[0](x))
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB") as handle, count_recomputes() as counted:
        for _ in range(3):
            model(x).square().mean().backward()
        assert counted.total == 4  # of the first step, where the inner ones are regions as well
        assert len(handle.plan.kept) == 2


def test_a_region_around_a_layer_recomputes_it(x):
    model = Model([nn.Sequential(Wide(16, 32), Wide(16, 64)) for _ in range(2)])
    with torchckpt.checkpoint_layers(model, "layers.*.*", budget="70%") as handle:
        with torchckpt.checkpoint_layers(model, "layers.0"):
            for _ in range(3):
                recomputes(model, x)
        assert {call.layer for call in handle.plan.took.calls} == {2, 3}


def test_a_layer_that_is_left_out_at_random(model, x):
    """What is not as it was recomputes."""
    layers = list(model.layers)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="60%"):
        for count in (6, 6, 4, 5, 6, 4, 3):
            model.layers = nn.ModuleList(layers[:count])
            recomputes(model, x)


def test_a_layer_that_is_called_a_different_number_of_times_in_each_step(x):
    """Each number has its plan, from the second time on that it comes."""
    class Repeated(Model):
        times = 1

        def forward(self, x):
            x = self.first(x)
            for _ in range(self.times):
                x = self.layers[0](x)
            return self.head(x)

    model = Repeated([Wide(16, 32)])
    with torchckpt.checkpoint_layers(model, "layers.0", budget="1GiB"):
        for times in (2, 3, 4, 3, 2, 4, 2, 3):
            model.times = times
            recomputes(model, x)
        counts = []
        for times in (2, 3, 4):
            model.times = times
            counts.append(recomputes(model, x))
        assert counts == [0, 0, 0]


def test_a_model_that_is_never_trained_holds_nothing(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="60%") as handle:
        outputs = [weakref.ref(model(x)) for _ in range(3)]
        gc.collect()
        assert [output() for output in outputs] == [None] * 3
        assert handle.plan is None


def test_a_graph_that_is_held_for_ever(model, x, monkeypatch):
    for module in ("follow", "step"):
        monkeypatch.setattr(f"torchckpt.layers.{module}.MOST_CALLS", 20)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB") as handle:
        held = model(x)
        counts = [recomputes(model, x) for _ in range(6)]
        assert held.requires_grad
        assert counts == [6, 6, 6, 6, 0, 0]
        assert len(handle.plan.kept) == 6


def test_an_error_that_is_held_with_its_graph(model, x):
    def fail(*_):
        raise ZeroDivisionError

    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        with model.layers[4].parts.register_forward_pre_hook(fail), pytest.raises(ZeroDivisionError) as held:
            model(x)
        assert [recomputes(model, x) for _ in range(3)] == [6, 0, 0]
        assert held.traceback


@pytest.mark.filterwarnings("ignore:checkpoint_layers. no call of a chosen layer was seen")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_of_torch_around_a_layer(x, use_reentrant):
    class Regions(Model):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)
            return self.head(x)

    model = Regions([Wide(16, 16 * (1 + at)) for at in range(4)])
    expected = plain_gradients(model, x)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for _ in range(4):
            assert_equal(gradients(model, x), expected)


def test_removed_in_the_middle_of_a_step(model, x):
    expected = plain_gradients(model, x)
    handle = torchckpt.checkpoint_layers(model, "layers.*", budget="60%")
    for removed in range(3):
        torch.manual_seed(1)
        loss = model(x).square().mean()
        if removed == 2:
            handle.remove()
        loss.backward()
        assert_equal([p.grad for p in model.parameters()], expected)
        model.zero_grad()
    assert recomputes(model, x) == 0


def test_frozen_layers_in_front(model, x):
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    model.first.requires_grad_(False)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="80%") as handle:
        counts = [recomputes(model, x) for _ in range(3)]
        assert counts[0] == 3
        assert counts[1:] == [6 - len(handle.plan.kept) - 3] * 2
        assert [call.layer for call in handle.plan.took.calls] == [0, 1, 2, 3, 4, 5]
        assert handle.plan.kept <= {3, 4, 5}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks(model, x):
    for layer in model.layers:
        layer.compile(backend="eager")
    expected = gradients(model, x)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="90%") as handle, count_recomputes() as counted:
        for _ in range(3):
            assert_equal(gradients(model, x), expected)
        assert counted.total == 6 + 2 * (6 - len(handle.plan.kept))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_a_compiled_loss_is_compiled_in_the_step_that_is_counted(model, x):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda outputs: outputs.square().mean(), backend=backend)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        for _ in range(3):
            compiled(model(x)).backward()
        assert handle.plan is not None
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_a_model_that_is_compiled_as_a_whole_afterwards(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        model.compile(backend="aot_eager")
        for _ in range(2):
            model(x).square().mean().backward()
        with pytest.warns(UserWarning, match="no call of a chosen layer was seen"):
            model(x)
        assert handle.plan is None


def test_what_is_shown(model, x, tmp_path):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        with pytest.raises(torchckpt.CheckpointError, match="there is no plan"):
            handle.report()
        for _ in range(4):
            gradients(model, x)
        table = str(handle.report())
        assert [name for name in handle.names if f"\n{name} " not in table] == []
        assert "measured peak" in table
        assert handle.plan.timeline.peak_bytes == (handle.plan.peak_bytes,)
        assert len(handle.plan.timeline.events) == 12 + 6 - len(handle.plan.kept)
        text = handle.draw(tmp_path / "plan.svg")
    assert text == (tmp_path / "plan.svg").read_text()
    assert re.search(r"Peak memory [^(]+ \(measured [^)]+\) in place of", text)
    assert ">device<" in text
    assert any(f">{name}<" in text for name in handle.names)  # where a box is wide enough
    assert "rank" not in text
    share = handle.plan.recompute_seconds / handle.plan.plain_seconds
    assert f"{len(handle.plan.kept)} of 6 calls are kept; recomputing the others adds {share:.1%}"[:-1] in table
    assert " % to the time of all" in table


# other shapes ---------------------------------------------------------------------------------------------------------


def test_another_shape_is_counted_first_and_both_are_remembered(model):
    long, short = torch.randn(8, 64, 16), torch.randn(8, 48, 16)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%"):
        assert [recomputes(model, short) == 6 for _ in range(2)] == [True, False]
        assert [recomputes(model, long) == 6 for _ in range(2)] == [True, False]
        assert recomputes(model, short) < 6


@few(1)
@pytest.mark.parametrize("third", [24, 40, 64])
def test_a_third_size_is_foretold_where_bytes_are_linear(model, third):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        for length in (16, 32):
            for _ in range(2):
                recomputes(model, torch.randn(8, length, 16))
        counted = []
        for _ in range(3):
            counted.append(recomputes(model, torch.randn(8, third, 16)))
        assert counted[0] < 6
        assert handle.plan.measured_peak_bytes == pytest.approx(handle.plan.peak_bytes, rel=0.02)
        assert handle.plan.measured_peak_bytes <= handle.plan.budget_bytes


def test_a_third_size_is_counted_where_bytes_are_not_linear():
    model = Model([Attention(16) for _ in range(4)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        assert [recomputes(model, torch.randn(2, length, 16)) for length in (64, 64, 128, 128)] == [4, 0, 4, 0]
        assert recomputes(model, torch.randn(2, 256, 16)) == 4


@few(1)
@pytest.mark.parametrize("lengths", [(1, 64, 128), (4, 128, 256), (16, 32, 64)])
def test_a_parabola_is_no_line_however_near_the_origin_one_size_is(lengths):
    model = Model([Attention(48) for _ in range(4)], size=48)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for length in lengths[:2]:
            for _ in range(2):
                recomputes(model, torch.randn(2, length, 48))
        assert recomputes(model, torch.randn(2, lengths[2], 48)) == 4


@few(1)
@pytest.mark.parametrize("is_cast", [True, False])
def test_weights_that_each_call_makes_hide_no_parabola(is_cast):
    layers = [Attention(64) for _ in range(4)]
    linears = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
    for linear in linears if not is_cast else ():
        nn.utils.parametrizations.weight_norm(linear)
    model = Model(layers, size=64)
    torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB")
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        counts = [recomputes(model, torch.randn(2, length, 64)) for length in (32, 32, 64, 64, 128)]
    assert counts == [4, 0, 4, 0, 4]


def test_a_foretold_step_is_counted_at_once(model):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="70%") as handle:
        for length in (16, 16, 32, 32, 24, 24):
            recomputes(model, torch.randn(8, length, 16))
        assert handle.plan.measured_peak_bytes <= handle.plan.peak_bytes


def test_another_keyword_is_another_step():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.wide = nn.Linear(16, 16), nn.Linear(16, 256)

        def forward(self, x, bias=None, memory=None):
            y = self.inner(x).tanh()
            return x + y + (bias if memory is None else self.wide(memory).sigmoid().tanh().sum(-1, keepdim=True))

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Either() for _ in range(6))

        def forward(self, x, **given):
            for layer in self.layers:
                x = layer(x, **given)
            return x

    model, x = Given(), torch.randn(64, 16)
    torchckpt.checkpoint_layers(model, "layers.*", budget=300_000)
    for name in ("bias", "memory") * 3:
        model.zero_grad()
        given = {name: torch.ones(64, 16)}
        taken = peak_bytes(lambda given=given: model(x, **given).sum().backward(), "cpu")
    assert taken <= 300_000


def test_a_size_far_off_is_counted(model):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        assert [recomputes(model, torch.randn(2, length, 16)) for length in (16, 32, 128)] == [6, 6, 6]


def test_steps_that_are_foretold_are_forgotten_too(monkeypatch):
    monkeypatch.setattr("torchckpt.measuring.remembered._MOST", 4)
    model = Model([Wide(16, 32) for _ in range(2)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB") as handle:
        counts = [recomputes(model, torch.randn(2, length, 16)) for length in (16, 32, *range(17, 32))]
        assert counts == [2, 2, *([0] * 15)]
        assert len(handle._steps._known._steps) == 4


def test_the_mode_is_part_of_a_shape(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        model.eval()
        assert [recomputes(model, x) for _ in range(2)] == [6, 0]
        model.train()
        assert [recomputes(model, x) for _ in range(2)] == [6, 0]


def test_what_is_trained_is_part_of_a_shape(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for trains in (False, True):
            model.layers[2].parts.requires_grad_(trains)
            assert [recomputes(model, x) for _ in range(2)] == [6, 0]
        model.layers[2].parts.requires_grad_(False)
        assert recomputes(model, x) == 0
        assert recomputes(model, x.requires_grad_()) == 6


def test_the_modes_of_modules_inside_and_autocast_are_part_of_a_shape(model, x):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        assert [recomputes(model, x) for _ in range(2)] == [6, 0]
        model.layers[2].parts.eval()
        assert [recomputes(model, x) for _ in range(2)] == [6, 0]
        with torch.autocast("cpu", torch.bfloat16):
            assert [recomputes(model, x) for _ in range(2)] == [6, 0]


def test_a_flag_is_part_of_a_shape(x):
    class Flagged(Wide):
        def forward(self, x, twice):
            x = super().forward(x)
            return super().forward(x) if twice else x

    layer = Flagged(16, 32)
    model = nn.ModuleDict({"layer": layer})
    with torchckpt.checkpoint_layers(model, "layer", budget="1GiB"), count_recomputes() as counted:
        for twice in (False, False, True, True):
            layer(x, twice=twice).sum().backward()
        assert counted.total == 2


def test_a_step_that_was_counted_with_gradients_is_counted_again_without():
    """A step that makes gradients takes more than one that adds to them."""
    short, long = torch.randn(4, 16, 16), torch.randn(4, 24, 16)
    model = Model([Wide(16, 512) for _ in range(4)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1.1MB"):
        for micro_batches in [(short, long)] * 3 + [(long, short)] * 3:
            for x in micro_batches:
                taken = peak_of(lambda x=x: model(x).square().mean().backward())
                assert taken <= 1.1e6
            model.zero_grad()


def test_a_kept_call_refuses_what_a_region_refuses(x):
    model = Model([Wide(16, 32) for _ in range(2)])
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    call = torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)).square().mean())
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for _ in range(3):
            with pytest.raises(torchckpt.TransformError):
                call(parameters)
            recomputes(model, x)
        assert recomputes(model, x) == 0


def test_steps_that_begin_alike_and_go_on_otherwise_are_learned():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.cut = nn.ModuleList(Wide(16, 32) for _ in range(4)), False

        def forward(self, x):
            for at, layer in enumerate(self.layers):
                x = layer(x[:, :4] if self.cut and at == 2 else x)
            return x

    model, x = Twice(), torch.randn(4, 16, 16)
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        counts = []
        for cut in (False, False, True, True, False, True):
            model.cut = cut
            counts.append(recomputes(model, x))
    assert counts == [4, 0, 2, 4, 0, 0]


# what a call costs ----------------------------------------------------------------------------------------------------


def python_calls(model, x):
    """How many calls of Python functions of this package a forward makes."""
    counts = Counter()

    def note(frame, event, _):
        counts[event == "call" and frame.f_code.co_filename.startswith(*torchckpt.__path__)] += 1

    sys.setprofile(note)
    outputs = model(x)
    sys.setprofile(None)
    outputs.sum().backward()
    return counts[True]


def of_one_more_layer(budget, x):
    """The Python functions of this package that a forward calls for one layer more, in steps of a plan."""
    calls = []
    for count in (6, 10):
        model = Model([Wide(16, 32) for _ in range(count)])
        with torchckpt.checkpoint_layers(model, "layers.*", **budget):
            for _ in range(4):
                gradients(model, x)
            calls.append(python_calls(model, x))
    return (calls[1] - calls[0]) / 4


def test_a_kept_call_is_the_plain_call_behind_a_look_at_its_shape(x):
    """The mixin, what it calls for a checkpointed module, the way in of a planned layer, and the step."""
    assert of_one_more_layer({"budget": "1GiB"}, x) == 4


def test_a_recomputed_call_is_a_region_and_little_more(x, monkeypatch):
    region = of_one_more_layer({}, x)
    monkeypatch.setattr("torchckpt.layers.known.chosen", lambda wishes: frozenset())
    assert of_one_more_layer({"budget": "1GiB"}, x) <= region + 1


@pytest.mark.slow
def test_calls_that_are_foreseen_and_come_otherwise(x):
    """Inside of a model that is called with the same shapes: other lengths, no gradients, a region, an error."""
    class Other(Model):
        does = None

        def forward(self, x):
            x = self.first(x)
            for at, layer in enumerate(self.layers):
                if at == 2 and self.does == "cuts":
                    x = x[:, :8]
                if at == 2 and self.does == "looks":
                    with torch.no_grad():
                        layer(x)
                if at == 2 and self.does == "skips":
                    continue
                inside = torchckpt.checkpoint if at == 2 and self.does == "has a region" else lambda call, x: call(x)
                x = inside(layer, x)
                if at == 2 and self.does == "fails":
                    raise ZeroDivisionError
            return self.head(x)

    model = Other([Wide(16, 16 * (1 + at % 3)) for at in range(6)])
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        assert [recomputes(model, x) for _ in range(4)] == [6, 0, 0, 0]
        model.does = "looks"
        assert recomputes(model, x) == 0
        model.does = "cuts"
        assert recomputes(model, x) == 4
        model.does = None
        assert [recomputes(model, x) for _ in range(20)][-1] == 0
        model.does = "skips"
        assert recomputes(model, x) == 3
        model.does = None
        assert [recomputes(model, x) for _ in range(20)][-1] == 0
        model.does = "has a region"
        assert recomputes(model, x) == 1 + 1 + 3
        model.does = "fails"
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(x)
        model.does = None
        assert [recomputes(model, x) for _ in range(20)][-1] == 0


def test_a_step_of_direct_calls_that_fails_is_over(x):
    class Failing(Wide):
        calls = 0

        def forward(self, x):
            self.calls += not torchckpt.is_recomputing()
            if self.calls == 22:  # the fourth of the fourth step
                raise ZeroDivisionError
            return super().forward(x)

    layer = Failing(16, 64)
    model = Model([layer])

    def step():
        y = x
        for _ in range(6):
            y = layer(y)
        y.square().mean().backward()

    with torchckpt.checkpoint_layers(model, "layers.0", budget="70%") as handle:
        for _ in range(3):
            step()
        with pytest.raises(ZeroDivisionError):
            step()
        for _ in range(2):
            with count_recomputes() as counted:
                step()
            assert counted.total == 6 - len(handle.plan.kept)
        assert 0 < len(handle.plan.kept) < 6


def test_sizes_that_are_near_each_other_foretell_nothing(model):
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        counts = [recomputes(model, torch.randn(8, length, 16)) for length in (16, 17, 20, 24)]
        assert counts == [6, 6, 6, 0]
