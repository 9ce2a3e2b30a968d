"""Steps in which something else comes before the backward: nothing is learned of them."""
from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.pipe.budget.models import SIZE, pair
from tests.slow import few, slow
from torchckpt import CheckpointError, Pipe
from torchckpt.testing import peak_bytes

ROWS = 64


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, SIZE)


def loss(pipe: Pipe, x: Tensor) -> Tensor:
    return mse_loss(pipe(x), x)


def step(pipe: Pipe, loss_fn: Any = mse_loss) -> None:
    x = batch()
    pipe.step(x, x, loss_fn=loss_fn)


def graph(pipe: Pipe) -> None:
    loss(pipe, batch()).backward()


def two_forwards(pipe: Pipe) -> None:
    (loss(pipe, batch()) + loss(pipe, batch())).backward()


def of_two_shapes(pipe: Pipe) -> None:
    (loss(pipe, batch()) + loss(pipe, batch(ROWS // 4))).backward()


def in_reverse(pipe: Pipe) -> None:
    first, second = loss(pipe, batch()), loss(pipe, batch())
    second.backward()
    first.backward()


def a_step_between(pipe: Pipe) -> None:
    waits = loss(pipe, batch())
    step(pipe)
    waits.backward()


def a_forward_in_a_step(pipe: Pipe) -> None:
    step(pipe, lambda output, target: mse_loss(output, target) + loss(pipe, target))


def an_old_backward(pipe: Pipe) -> None:
    """The third forward is alone, but its backward has that of the first in it."""
    first = loss(pipe, batch())
    loss(pipe, batch()).backward()
    (first + loss(pipe, batch())).backward()


def no_backward(pipe: Pipe) -> None:
    pipe(batch())


def fails(pipe: Pipe) -> None:
    output = pipe(batch())
    output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()


SECOND = [two_forwards, a_step_between, a_forward_in_a_step, an_old_backward, *slow([of_two_shapes, in_reverse])]


def peaks_of(pipe: Pipe, steps: list[Any]) -> list[int]:
    peaks = []
    for each in steps:
        peaks.append(peak_bytes(lambda each=each: each(pipe), "cpu"))
        pipe.zero_grad()
    return peaks


def between(ordinary: Any) -> int:
    """A budget for which some blocks are recomputed."""
    plain, pipe = pair("one stage", "100%")
    return sum(peaks_of(plain, [ordinary]) + peaks_of(pipe, [ordinary])) // 2


@few(1)
@pytest.mark.parametrize("disturbed", [*SECOND, no_backward, *slow([fails])])
def test_steps_after_it_take_no_more_than_their_budget(disturbed: Any) -> None:
    ordinary = step if disturbed is a_forward_in_a_step else graph
    budget = between(ordinary)
    _, pipe = pair("one stage", budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disturbed(pipe)
    pipe.zero_grad()
    peaks = peaks_of(pipe, [ordinary] * 4)
    assert pipe.plan is not None
    assert 0 < pipe.plan.recomputed_share < 1
    assert max(peaks) <= 1.05 * budget  # in which the mean loss is not


@few(1)
@pytest.mark.parametrize("disturbed", [*SECOND[::3], *slow([*SECOND[1:3], of_two_shapes, in_reverse])])
def test_where_each_step_is_one_everything_is_recomputed_and_a_warning_says_so(disturbed: Any) -> None:
    _, pipe = pair("one stage", "80%")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        peaks = peaks_of(pipe, [disturbed] * 5)
    assert sum("a forward begins while another waits for its backward" in str(one.message) for one in said) == 1
    assert pipe.plan is None
    assert max(peaks) <= 1.001 * peaks[0]


def test_a_step_of_a_plan_is_reported_when_it_was_counted_to_its_end() -> None:
    _, pipe = pair("one stage", "80%")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for each in (graph, graph, two_forwards, *[an_old_backward] * 4):
            each(pipe)
    assert len(said) == 1  # that of a second forward, and not that there is no plan
    with pytest.raises(CheckpointError, match="no step of a plan was counted yet"):
        pipe.report()
    graph(pipe)
    assert pipe.report().plan is pipe.plan


def test_forwards_without_a_backward_are_not_said_to_be_no_whole_steps() -> None:
    _, pipe = pair("wide", "80%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            no_backward(pipe)


def test_that_the_graph_of_a_backward_does_not_count_is_said_once() -> None:
    _, pipe = pair("wide", "80%")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            graph(pipe)
        assert said == []
        for _ in range(2):
            grads = torch.autograd.grad(loss(pipe, batch()), list(pipe.parameters()), create_graph=True)
            sum(grad.square().sum() for grad in grads).backward()
    assert ["(create_graph=True)" in str(one.message) for one in said] == [True]
