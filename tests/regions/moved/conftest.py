"""Fixtures: the calls that move, on the CPU and on an accelerator."""
from __future__ import annotations

import pytest
import torch

from tests.accelerator import TYPE
from tests.regions.moved.calls import ahead, by_default, let_cpu_move, moved


@pytest.fixture(params=[by_default, moved, ahead], ids=["by_default", "moved", "ahead"])
def call(request):
    """Calls a function on its arguments as a region that moves."""
    return request.param


@pytest.fixture(params=["cpu", pytest.param(TYPE, marks=pytest.mark.accelerator)])
def device(request, monkeypatch):
    if request.param == "cpu":
        let_cpu_move(monkeypatch)
    elif request.param == "sim":
        request.getfixturevalue("sim")
    return torch.device(request.param)
