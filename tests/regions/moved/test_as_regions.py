"""What holds for a region that is recomputed, and not of its replay, holds for one that moves: the same tests, with the
calls of this folder."""
from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from tests.helpers import assert_equal, assert_transparent, plain, total
from tests.regions.autograd import test_backward, test_in_place, test_outputs, test_split_backward
from tests.regions.autograd.test_split_backward import Stage
from tests.slow import few, slow
from tests.test_transparency import Program, inputs

OF_REPLAYS = {
    "test_input_half_replays_and_weight_half_does_not",
    "test_weight_halves_of_several_micro_batches_in_any_order",
}


def of_any_call(module: ModuleType) -> dict[str, object]:
    """The tests of ``module`` that take a call."""
    tests = {name: value for name, value in vars(module).items() if name.startswith("test_")}
    return {name: test for name, test in tests.items() if "call" in inspect.signature(test).parameters}


for module in (test_backward, test_in_place, test_outputs, test_split_backward):
    globals().update({name: test for name, test in of_any_call(module).items() if name not in OF_REPLAYS})
del test_backward, test_in_place, test_outputs, test_split_backward


def test_tests_were_found():
    assert sum(name.startswith("test_") for name in globals()) > 40


@few(7)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]], ids=str)
def test_weight_halves_of_several_micro_batches_in_any_order(call, device, order):
    def gradients_of(call):
        stages = [Stage(call, device) for _ in range(3)]
        groups = [stage.backward_input() for stage in stages]
        return [stages[place].backward_weight(groups[place]) for place in order]

    assert_equal(gradients_of(call), gradients_of(plain))


@pytest.mark.parametrize("seed", [*range(25), *slow(range(25, 50))])
def test_program(call, device, seed):
    torch.manual_seed(seed)
    program = Program(seed).to(device)
    x, others, index = inputs(seed)
    others = {name: other.to(device) for name, other in others.items()}
    x, index = x.to(device), index.to(device)
    assert_transparent(call, program, x, others=others, index=index, modules=[program], loss=total_or_none)


def total_or_none(outputs):
    return total(outputs) + torch.zeros((), requires_grad=True)  # a program may cut its inputs off
