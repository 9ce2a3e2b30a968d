"""Gradients of what no loss reads: None, as in eager."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import assert_equal, leaf
from tests.slow import few
from torchckpt import graph


class Heads(nn.Module):
    """Two outputs of one body, and one of the input alone."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.second, self.apart = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        h = self.body(x).tanh()
        return {"first": self.first(h), "second": self.second(h).exp(), "apart": self.apart(x), "detached": h.detach()}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Heads()


LOSSES = {
    "first": lambda outputs: outputs["first"].sum(),
    "second": lambda outputs: outputs["second"].sum(),
    "apart": lambda outputs: outputs["apart"].sum(),
    "first and apart": lambda outputs: (outputs["first"] * outputs["apart"]).sum(),
    "all": lambda outputs: sum(output.sin().sum() for name, output in outputs.items() if name != "detached"),
    "first twice": lambda outputs: (outputs["first"] * outputs["first"]).sum(),
}

NONE = {
    "first": {"second", "apart"},
    "second": {"first", "apart"},
    "apart": {"body", "first", "second"},
    "first and apart": {"second"},
    "all": set(),
    "first twice": {"second", "apart"},
}


@few(3)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_none_where_eager_has_none(model, name):
    x = leaf(2, 3)
    results = []
    for call in (model, graph.rematerialize(model)):
        model.zero_grad()
        x.grad = None
        LOSSES[name](call(x)).backward()
        results.append({key: parameter.grad for key, parameter in [*model.named_parameters(), ("x", x)]})
    assert_equal(results[1], results[0])
    assert {key.split(".")[0] for key, gradient in results[1].items() if gradient is None} == NONE[name]


def test_one_output_after_the_other(model):
    """Of one call, with the graph retained; each backward knows what has arrived for it."""
    step, x = graph.rematerialize(model), leaf(2, 3)
    for order in (["first", "second", "all"], ["apart", "first"]):
        received, expected = step(x), model(x)
        for name in order:
            wanted = [*model.parameters(), x]
            assert_equal(*(
                torch.autograd.grad(LOSSES[name](outputs), wanted, retain_graph=True, allow_unused=True)
                for outputs in (received, expected)
            ))


def test_parameters_that_took_no_part_do_not_decay(model):
    step = graph.rematerialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.second.weight.clone()
    LOSSES["first"](step(torch.randn(2, 3))).backward()
    optimizer.step()
    assert torch.equal(model.second.weight, before)


def test_gradients_accumulate_over_losses(model):
    def accumulated(call):
        model.zero_grad()
        x = torch.ones(2, 3)
        for name in ("first", "second"):
            LOSSES[name](call(x)).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_equal(accumulated(graph.rematerialize(model)), accumulated(model))


def test_error_in_a_backward_leaves_nothing(model):
    """What has arrived is of one backward."""
    step, x = graph.rematerialize(model), leaf(2, 3)
    outputs = step(x)
    outputs["first"].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LOSSES["first"](outputs).backward()
    LOSSES["apart"](step(x)).backward()
    assert model.first.weight.grad is None
    assert model.apart.weight.grad is not None
