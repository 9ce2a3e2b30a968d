"""A torch that lacks a private name, or whose runtime has changed."""
from __future__ import annotations

import importlib.util
import pathlib

import pytest
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from tests.distributed.stages import Blocks, loss_of, stages_of
from torchckpt.distributed import private, recompute_ahead
from torchckpt.errors import CheckpointError


def test_torch_without_a_private_name_is_an_error_that_names_it(monkeypatch):
    monkeypatch.delattr(schedules, "_PipelineScheduleRuntime")
    again = importlib.util.spec_from_file_location("again", pathlib.Path(private.__file__))
    with pytest.raises(CheckpointError) as caught:
        again.loader.exec_module(importlib.util.module_from_spec(again))
    rule, received, works = str(caught.value).splitlines()
    text = "torchckpt.distributed needs something of torchckpt/distributed/private.py that this torch does not have"
    assert rule == text
    assert received.startswith("  received: cannot import name '_PipelineScheduleRuntime' from 'torch.distributed.")
    assert works == "  works:    pip install 'torch>=2.11', or the release of torchckpt that was made for this torch"
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.usefixtures("alone")
def test_runtime_that_lacks_something_is_an_error_that_names_it(monkeypatch):
    made = _PipelineScheduleRuntime.__init__

    def without(self, *args, **kwargs):
        made(self, *args, **kwargs)
        del self.bwd_recv_ops

    monkeypatch.setattr(_PipelineScheduleRuntime, "__init__", without)
    monkeypatch.setattr(_PipelineScheduleRuntime, "_prepare_schedule_with_comms", None)
    (stage,) = stages_of("ScheduleGPipe", Blocks)
    with pytest.raises(CheckpointError) as caught:
        recompute_ahead(schedules.ScheduleGPipe(stage, 4, loss_fn=loss_of))
    assert str(caught.value) == (
        "recompute_ahead(): this torch does not have the runtime of torch.distributed.pipelining "
        "that torch 2.11 to 2.15 have\n"
        "  received: one without bwd_recv_ops, _prepare_schedule_with_comms\n"
        "  works:    the release of torchckpt that was made for this torch"
    )
