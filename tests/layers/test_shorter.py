"""Steps that begin like longer ones, and end where those go on: they are counted when they come again."""
from __future__ import annotations

import copy
import random
import re

import pytest
import torch

import torchckpt
from tests.layers.models import Model, Wide
from tests.slow import few
from torchckpt.testing import count_recomputes, peak_bytes

X = [torch.randn(4, 16, 16) for _ in range(4)]


def losses(model, forwards, wide=0):
    """The losses of some forwards, behind a ``wide`` head that is no part of the model."""
    outputs = [model(x) for x in X[:forwards]]
    return [(y @ torch.ones(y.shape[-1], wide)).sin().square().mean() if wide else y.square().mean() for y in outputs]


def together(model, forwards, wide=0):
    sum(losses(model, forwards, wide)).backward()


def one_by_one(model, forwards):
    for loss in losses(model, forwards):
        loss.backward()


def retained(model, forwards):
    loss = sum(losses(model, forwards))
    loss.backward(retain_graph=True)
    loss.backward()


def wide_head(model, forwards):
    together(model, forwards, 500)


def evaluated(model, forwards):
    together(model, forwards)
    with torch.no_grad():
        model(X[0])


@pytest.fixture
def model():
    return Model([Wide(16, 16 * width, 2) for width in (8, 1, 2)], head=4)


def least_of(model, step, forwards):
    """What a step takes that recomputes everything."""
    model = copy.deepcopy(model)
    with torchckpt.checkpoint_layers(model, "layers.*"):
        return peak_bytes(lambda: step(model, forwards), "cpu")


def peaks(model, steps):
    """The bytes of each step, which has the gradients of the plain model."""
    plain = copy.deepcopy(model)
    for seed, (step, forwards) in enumerate(steps):
        plain.zero_grad()
        torch.manual_seed(seed)
        step(plain, forwards)
        model.zero_grad()
        torch.manual_seed(seed)
        taken = peak_bytes(lambda kind=(step, forwards): kind[0](model, kind[1]), "cpu")
        assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), plain.parameters()))
        yield taken


@few(1)
@pytest.mark.parametrize("step", [retained, wide_head, one_by_one])
def test_it_has_a_plan_of_its_own_when_it_comes_again(model, step):
    budget = 1.02 * max(least_of(model, step, 1), least_of(model, together, 2))
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget) as handle:
        steps = [(together, 2)] * 2 + [(step, 1)] * 2 + [(together, 2), (step, 1)] * 2
        assert max([*peaks(model, steps)][3:]) <= budget
        assert len(handle.plan.took.calls) == 3


def test_its_error_comes_with_its_backward_and_what_it_asks_for_works(model):
    budget = least_of(model, together, 2) + 8
    assert least_of(model, wide_head, 1) > 2 * budget
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget):
        together(model, 2)
        together(model, 2)
        wide_head(model, 1)
        wide_head(model, 1)  # is counted
        for _ in range(2):
            with pytest.raises(torchckpt.BudgetInfeasible) as raised:
                wide_head(model, 1)
            assert max(peaks(model, [(together, 2)])) <= budget
    budget = int(re.search(r"budget=(\d+)", str(raised.value))[1])
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget):
        assert max([*peaks(model, [(together, 2)] * 2 + [(wide_head, 1)] * 4 + [(together, 2)])][3:]) <= budget


@few(1)
@pytest.mark.parametrize(("often", "seldom"), [(1, 2), (2, 1)])
def test_a_step_that_comes_now_and_then_is_counted(model, often, seldom):
    """All is recomputed until it comes again, also if it is the longer one."""
    counts = []
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for at in range(1, 70):
            with count_recomputes() as counted:
                together(model, often if at % 20 else seldom)
            counts.append(counted.total)
    all_of_it = 3 * often
    first = [all_of_it] + [0] * 18 + [3 * (seldom > often)]
    assert counts == first + [all_of_it] * 19 + [3 * seldom] + [0] * 29


@pytest.mark.slow
def test_where_nothing_can_be_learned_the_others_have_their_plan_again():
    """A step that ends with a forward is never complete."""
    model, counts = Model([Wide(16, 16)]), []
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        together(model, 4)
        for _ in range(70):
            held = losses(model, 2)
            held[0].backward()
            model(X[2])
            del held
            with count_recomputes() as counted:
                together(model, 4)
            counts.append(counted.total)
    assert 0 < counts.count(4) < 60
    assert counts[-10:] == [0] * 10


@few(1)
@pytest.mark.parametrize("seed", [1, 7, 8])
def test_steps_of_several_kinds_in_any_order(model, seed):
    chosen = random.Random(seed)
    kinds = [(chosen.choice((retained, wide_head, one_by_one, evaluated)), forwards) for forwards in (1, 2, 3)]
    order = [0, 1, 2] * 3 + [chosen.randrange(3) for _ in range(6)]
    chosen.shuffle(order)
    budget = 1.05 * max(least_of(model, *kind) for kind in kinds)
    with torchckpt.checkpoint_layers(model, "layers.*", budget=budget):
        for at, taken in enumerate(peaks(model, [kinds[kind] for kind in order])):
            assert taken <= budget or order[:at].count(order[at]) < 2
    with torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB"):
        for kind in [*order, *order, *order]:
            with count_recomputes() as counted:
                kinds[kind][0](model, kinds[kind][1])
        assert counted.total == 0
