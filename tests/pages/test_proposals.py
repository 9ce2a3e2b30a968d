"""The sketches of docs/proposals run on the installed torch, and the figures in the texts are those of elsewhere."""
from __future__ import annotations

import functools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action

from tests.distributed.ranks import on_ranks, one_rank
from tests.distributed.stages import Blocks, batch, equal, events, schedule_on, stages_of, step, train
from tests.settings import with_gloo

FOLDER = Path(__file__).parents[2] / "docs" / "proposals"
FILE = FOLDER / "recompute_action.py"
M = 4
NAMES = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


@functools.cache
def sketch() -> Any:
    return SimpleNamespace(**runpy.run_path(str(FILE)))


def orders(text: str) -> dict[int, list[_Action]]:
    return {0: [sketch()._read(cell) for cell in text.split()]}


def trained(name: str, how: str) -> list[torch.Tensor]:
    """What three steps of torch's schedule ``name`` gave: plain, in our runtime, or there with offloads."""
    stages = stages_of(name, functools.partial(Blocks, regions="none" if how == "plain" else "ours"))
    schedule = schedule_on(stages, name, M)
    if how != "plain":
        new = sketch().with_recomputes(schedule.pipeline_order, offloads=how == "offload")
        schedule = sketch().Runtime(stages, M, new, loss_fn=schedule._loss_fn)
    torch.manual_seed(4)
    return train(schedule, stages, M)


def on_both(rank: int) -> dict[str, Any]:
    seen = {(name, how): trained(name, how) for name in NAMES for how in ("plain", "recompute", "offload")}
    found: dict[str, Any] = {
        name: [equal(seen[name, how], seen[name, "plain"]) for how in ("recompute", "offload")] for name in NAMES
    }
    found["forwards"] = {name: forwards_of(name) for name in NAMES}
    return found


def forwards_of(name: str) -> int:
    """The block forwards of this rank in a step whose visits are all recomputed, replays included."""
    stages = stages_of(name, functools.partial(Blocks, count=1))
    schedule = schedule_on(stages, name, M)
    ours = sketch().Runtime(stages, M, sketch().with_recomputes(schedule.pipeline_order), loss_fn=schedule._loss_fn)
    step(ours, stages, *batch(M))
    events.clear()
    step(ours, stages, *batch(M))
    return sum(event.startswith(("forward", "replay")) for event in events)


@with_gloo
def test_the_sketch_is_equal_to_the_bit_on_two_ranks_and_replays_once(tmp_path: Path) -> None:
    for found in on_ranks(on_both, tmp_path):
        assert found.pop("forwards") == dict.fromkeys(NAMES, 16)  # as benchmarks/pipeline/README.md has it
        assert found == {name: [True, True] for name in NAMES}


def test_the_sketch_is_patch_sized() -> None:
    assert len(FILE.read_text().splitlines()) < 200


def test_new_actions_are_written_and_read(tmp_path: Path) -> None:
    text = "0F0 0OFFLOAD0 0SEND_F0 1RESHARD 0RECV_B0 0LOAD0 0R0 0I0 0W0 1REDUCE_GRAD"
    sketch().write_csv(str(tmp_path / "order.csv"), orders(text))
    assert (tmp_path / "order.csv").read_text().strip() == text.replace(" ", ",")
    assert sketch().read_csv(str(tmp_path / "order.csv")) == orders(text)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0R0 0F0 0B0", "step 0: 0R0 is not between the forward and the backward"),
        ("0F0 0B0 0R0", "step 2: 0R0 is not between the forward and the backward"),
        ("0F0 0R0 0R0 0B0", "step 2: 0R0 stands there twice"),
        ("0F0 0LOAD0 0B0", "step 1: 0LOAD0 has no OFFLOAD before it"),
        ("0F0 0OFFLOAD0 0R0 0LOAD0 0B0", "step 2: 0R0 has no LOAD after the OFFLOAD"),
        ("0F0 0OFFLOAD0 0I0 0W0", "step 2: 0I0 has no LOAD after the OFFLOAD"),
    ],
)
def test_an_order_that_cannot_run_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(f"Rank 0, {wrong}")):
        sketch().validate(orders(text))


def test_what_is_offloaded_is_on_the_host_until_it_is_loaded_and_goes_with_its_node() -> None:
    visit, x = sketch().Visit(), torch.ones(4, requires_grad=True)
    with visit.forward():
        y = (x * 2).sin()
    saved = [reference() for reference in visit._saved]
    before = [one.tensor.data_ptr() for one in saved]
    visit.move(to_host=True)
    assert not {one.tensor.data_ptr() for one in saved} & set(before)
    visit.move(to_host=False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, 2 * (x * 2).cos())
    del saved, y
    assert [reference() for reference in visit._saved] == [None] * len(before)


@with_gloo
def test_a_step_that_fails_leaves_the_stages_as_they_were() -> None:
    with one_rank():
        stages = stages_of("ScheduleZBVZeroBubble", Blocks)
        schedule = schedule_on(stages, "ScheduleZBVZeroBubble", M)
        ours = sketch().Runtime(
            stages, M, sketch().with_recomputes(schedule.pipeline_order), loss_fn=lambda *_: 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            step(ours, stages, *batch(M))
        assert all("forward_one_chunk" not in vars(stage) for stage in stages)
        assert dist.get_world_size() == 1
