"""What is counted without a run is what a run has: bytes by block, whatever is kept, and FLOPs."""
from __future__ import annotations

import itertools
import random

import pytest

from tests.costs.models import DIFFERING, MODELS
from tests.costs.run import DTYPES, Real
from tests.slow import few, slow_but
from torchckpt.costs import pipeline_costs

WITHOUT_ATTENTION = [name for name in MODELS if name not in ("llama", "llama with dropout", "attention")]

QUICK = [(name, dtype) for name, dtype in zip(MODELS, itertools.cycle(DTYPES)) if name not in ("llama", "attention")]
"""Each in one dtype."""


def counted(name: str, dtype: str):
    return pipeline_costs(MODELS[name], "h100", dtype=dtype, kernels="cpu").counted


def subsets(blocks: int) -> list[tuple[int, ...]]:
    """Of the blocks that are recomputed."""
    every = [chosen for size in range(blocks + 1) for chosen in itertools.combinations(range(blocks), size)]
    return every if len(every) <= 8 else [every[0], every[-1], *random.Random(blocks).sample(every[1:-1], 6)]


@few(1)
@pytest.mark.parametrize(("name", "dtype"), slow_but(QUICK, itertools.product(MODELS, DTYPES)))
def test_bytes_are_those_of_a_run_whatever_is_recomputed(name, dtype):
    real = Real(MODELS[name], DTYPES[dtype])
    for number, stage in enumerate(counted(name, dtype)):
        fixed = stage.before.work.saved_bytes + stage.after.work.saved_bytes
        for dropped in subsets(len(stage.blocks)):
            expected = fixed + sum(
                block.work.boundary_bytes if place in dropped else block.work.saved_bytes
                for place, block in enumerate(stage.blocks)
            )
            assert real.saved_bytes(number, dropped) == expected, (number, dropped)


@few(1)
@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_flops_are_those_of_a_run(name):
    real = Real(MODELS[name])
    for number, stage in enumerate(counted(name, "fp32")):
        assert sum(part.forward_flops for part in stage.parts) == real.forward_flops(number)
        backward = sum(part.backward_flops for part in stage.parts)
        assert backward == real.backward_flops(number)
        every = range(len(stage.blocks))
        replays = real.backward_flops(number, every) - backward
        assert sum(block.replay_flops for block in stage.blocks) == replays


@few(1)
@pytest.mark.parametrize("how", DIFFERING)
def test_a_block_that_does_something_else_is_counted_as_it_runs(how):
    real = Real(DIFFERING[how])
    real.blocks = []  # only those of the model itself are regions
    for number, stage in enumerate(pipeline_costs(DIFFERING[how], "h100", kernels="cpu").counted):
        assert sum(part.work.saved_bytes for part in stage.parts) == real.saved_bytes(number, ())
        assert sum(part.forward_flops for part in stage.parts) == real.forward_flops(number)
        assert sum(part.backward_flops for part in stage.parts) == real.backward_flops(number)
