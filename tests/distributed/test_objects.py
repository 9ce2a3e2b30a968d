"""What ranks tell each other, in a group of one and in one of two; nothing of it needs NumPy."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks
from torchckpt.distributed import meeting
from torchckpt.distributed.meeting import all_gather, broadcast, none_failed
from torchckpt.errors import CheckpointError


@pytest.mark.usefixtures("alone")
def test_one_process_knows_itself():
    assert all_gather({"a": 1}) == [{"a": 1}]
    assert broadcast((1, "b")) == (1, "b")


def of_two_lengths(rank):
    pair = dist.new_group([0, 1])
    return all_gather("ab" * 1000 * rank), all_gather([rank], pair), broadcast({"from": rank})


def test_two_processes_and_values_of_two_lengths(tmp_path):
    assert on_ranks(of_two_lengths, tmp_path) == [(["", "ab" * 1000], [[0], [1]], {"from": 0})] * 2


def of_which_one_fails(rank):
    none_failed(None)
    try:
        none_failed(CheckpointError("no memory") if rank else None)
    except CheckpointError as error:
        return str(error)


def test_what_one_process_could_not_do_is_raised_on_both(tmp_path):
    assert on_ranks(of_which_one_fails, tmp_path) == ["no memory"] * 2


@pytest.mark.usefixtures("alone")
def test_no_tensor_becomes_an_array(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    assert all_gather([1, "a"]) == [[1, "a"]]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("backends", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("cuda:gloo,cpu:gloo", "cpu")]
)
def test_what_is_sent_is_where_the_collectives_of_the_group_are(monkeypatch, backends, device):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert meeting._device_of(None) == torch.device(device)
