"""Which module runs what."""
from __future__ import annotations

import pytest
import torch
import torch.fx.traceback
from torch import nn

from tests.graph.traced import plan_of
from torchckpt import graph


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)

    def forward(self, x):
        h = self.head(self.body(x)).sin()
        return self.head(h).sum()


def operations(plan):
    """Of the forward, each operation's module."""
    return [(operation.name, path) for operation, path in zip(plan.flow.operations, plan.paths)][: plan.flow.forward]


def hooks():
    hooks = torch.nn.modules.module
    return len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)


def test_operations_belong_to_the_innermost_module():
    assert operations(plan_of(Net(), torch.randn(3, 4))) == [
        ("addmm", "body.0"), ("tanh", "body.1"), ("addmm_1", "head"), ("sin", ""), ("addmm_2", "head"), ("sum_1", ""),
    ]


def test_gradients_belong_to_the_module_of_what_they_are_gradients_of():
    plan = plan_of(Net(), torch.randn(3, 4))
    of = dict(zip(plan.order, plan.paths))
    assert (of["tanh_backward"], of["mm_1"], of["tangents"]) == ("body.1", "head", "")


def test_names_of_a_plan_are_what_leaves_a_module():
    plan = plan_of(Net(), torch.randn(3, 4))
    writers, writer = plan.flow.operations, plan.flow.writer
    named = {name: [writers[writer[storage]].name for storage in storages] for name, storages in plan.names.items()}
    assert named == {"body.0": ["addmm"], "body.1": ["tanh"], "body": ["tanh"], "head": ["addmm_1", "addmm_2"]}


def test_module_with_two_names_has_the_first():
    shared = nn.Tanh()
    plan = plan_of(nn.Sequential(shared, shared), torch.ones(3, requires_grad=True))
    assert {path for _, path in operations(plan)} == {"0"}


def test_hooks_are_there_while_a_call_is_traced_and_gone_afterwards():
    counts = []

    class Looking(Net):
        def forward(self, x):
            counts.append(hooks())
            return super().forward(x)

    plan_of(Looking(), torch.randn(3, 4))
    assert {*counts} == {(1, 1)}
    assert hooks() == (0, 0)


def test_modules_of_others_have_no_name():
    other = nn.Tanh()
    plan = plan_of(lambda x: other(x).sum(), torch.randn(3, requires_grad=True))
    assert operations(plan) == [("tanh", ""), ("sum_1", "")]


def test_a_forward_that_fails_leaves_no_name_behind():
    """Torch's notes are of the whole process, and later traces would have them."""
    with pytest.raises(RuntimeError, match="reduction dim"):
        graph.rematerialize(Net(), torch.randn(3, 5))
    assert "custom" not in torch.fx.traceback.current_meta
    test_operations_belong_to_the_innermost_module()
