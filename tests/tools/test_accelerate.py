"""Accelerate: a loop with ``Accelerator``, in one process and under its DDP; regions before and after ``prepare``."""
from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import attempted, on_ranks
from tests.tools.steps import ROWS, STEPS, Block, Model, equal, rows, trained
from torchckpt import checkpoint_layers

pytestmark = [
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # those of accelerate
]


def steps_of(when=None, **options):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = Model()
    if when == "before prepare":
        checkpoint_layers(model, Block)
    if when == "with a budget":
        checkpoint_layers(model, Block, budget="1GiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if when == "after prepare":
        checkpoint_layers(prepared, Block)
    batches = rows().roll(accelerator.process_index, 0).split(ROWS)

    def loss_of(batch):
        with accelerator.accumulate(prepared):
            return prepared(batch).square().mean()

    seen, recomputes = trained(prepared, loss_of, batches, accelerator.backward, optimizer)
    return seen, recomputes, type(prepared).__name__


@pytest.fixture(autouse=True)
def forgotten():
    """Accelerate keeps its state in classes."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


OPTIONS = [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 3}]


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_accelerator(when, options):
    expected, none, _ = steps_of(**options)
    tensors, recomputes, _ = steps_of(when, **options)
    assert none == {}
    assert recomputes == {"Block.forward": 3 * STEPS}
    assert equal(tensors, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_accelerator_with_a_budget(options):
    """The first step recomputes the three layers, and the others nothing."""
    expected, _, _ = steps_of(**options)
    tensors, recomputes, _ = steps_of("with a budget", **options)
    assert recomputes == {"Block.forward": 3}
    assert equal(tensors, expected)


# two ranks ------------------------------------------------------------------------------------------------------------


def work(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return {when: attempted(steps_of, when) for when in (None, "before prepare", "after prepare")}


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_two_ranks(tmp_path):
    for report in on_ranks(work, tmp_path, 2, timeout=120):
        assert not isinstance(report[None], str), report[None]
        expected, none, wrapped = report[None]
        assert (none, wrapped) == ({}, "DistributedDataParallel")
        for when in ("before prepare", "after prepare"):
            assert not isinstance(report[when], str), report[when]
            tensors, recomputes, _ = report[when]
            assert recomputes == {"Block.forward": 3 * STEPS}
            assert equal(tensors, expected)
