"""Fixtures of all tests: the device, the seed, and the three ways to make a region."""
from __future__ import annotations

import gc

import pytest
import torch

import torchckpt
from tests.helpers import NEEDS_CUDA, by_hand, prefetched


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA])])
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=[torchckpt.checkpoint, by_hand, prefetched], ids=["checkpoint", "by_hand", "prefetched"])
def call(request):
    """Calls a function on its arguments as a region."""
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo(collected):
    """Nothing is compiled before the test, and nothing of it stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def collected():
    """What the tests of a file leave to the garbage collector is gone after the last one."""
    yield
    gc.collect()
