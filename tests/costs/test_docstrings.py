"""The examples of the docstrings."""
from __future__ import annotations

import doctest
import importlib

import pytest
import torch
from torch import nn

import torchckpt.planning.plan as plan
from tests.costs.models import MODELS
from torchckpt.planning import one_f_one_b

NAMES = {name: getattr(plan, name) for name in plan.__all__}


@pytest.mark.parametrize("name", ["", ".count", ".mesh", ".pipeline"])
def test_examples(name):
    module = importlib.import_module(f"torchckpt.costs{name}")
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallel = {"ColwiseParallel": ColwiseParallel, "Replicate": Replicate, "parallelize_module": parallelize_module}
    names = {**NAMES, **parallel, "torch": torch, "nn": nn, "torchckpt": importlib.import_module("torchckpt")}
    names |= {"stages": MODELS["llama"], "one_f_one_b": one_f_one_b}
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted > 0
    assert results.failed == 0
