"""The orders of torch.distributed.pipelining, made without process groups."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

COMPUTE = {"F", "B", "I", "W"}


def of_torch():
    """The module of torch's schedules; without torch, the test is skipped."""
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def flat(actions):
    """Without bubbles and communication; pairs that may overlap, one after the other."""
    found = []
    for action in actions:
        for one in () if action is None else action.sub_actions or (action,):
            if one.computation_type.value in COMPUTE:
                found.append(str(one))
    return found


def single(name, p, m):
    """Of a schedule with one stage per rank."""
    orders = getattr(of_torch(), name)._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    return [flat(orders[rank]) for rank in range(p)]


def multi(name, ranks, chunks, m):
    """Of a schedule with several stages per rank."""
    rounds = max(1, m // ranks)
    schedule = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=ranks * chunks,
        n_local_stages=chunks,
        _stages=[None] * chunks,
        _n_microbatches=m,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    order = getattr(of_torch(), name)._calculate_single_rank_operations
    return [flat(order(schedule, rank)) for rank in range(ranks)]
