"""What tests of the graph level share."""
from __future__ import annotations

import pytest
import torch

from torchckpt.graph.private.trace import differentiable


@pytest.fixture
def traces(monkeypatch):
    """One entry for each call that is traced."""
    numbers = []

    def counting(*arguments):
        numbers.append(1)
        return differentiable(*arguments)

    monkeypatch.setattr("torchckpt.graph.trace.capture.differentiable", counting)
    return numbers


@pytest.fixture
def one_thread():
    """A convolution has a workspace for each thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gradients_go(monkeypatch):
    """Gradients of outputs die as they do from torch 2.13 on; before, a plan has them to the end, in case torch has."""
    monkeypatch.setattr("torchckpt.graph.step.joint.GRADIENTS_STAY", False)
