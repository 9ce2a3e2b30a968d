"""What is counted on a mesh that is not there equals what real ranks compute, keep and say."""
from __future__ import annotations

from collections import Counter

import pytest

from tests.distributed.ranks import on_ranks
from tests.settings import with_gloo
from tests.slow import slow
from torchckpt.costs import fake_mesh, pipeline_costs

pytestmark = with_gloo

RANKS = (2, *slow([4]))


def real(rank):
    """Of a process: every layout for as many ranks."""
    import torch.distributed as dist

    from tests.costs.parallel_models import LAYOUTS
    from tests.costs.rank import measured

    return [measured(way) for way in LAYOUTS[dist.get_world_size()]]


@pytest.fixture(scope="module", params=RANKS)
def runs(request, tmp_path_factory):
    """The layouts of some ranks, and what each rank measured."""
    from tests.costs.parallel_models import LAYOUTS

    measured = on_ranks(real, tmp_path_factory.mktemp("ranks"), request.param, timeout=120)
    return [(way, [of_rank[place] for of_rank in measured]) for place, way in enumerate(LAYOUTS[request.param])]


def counted(way, rank):
    from tests.costs.parallel_models import built
    from tests.costs.rank import loss_of

    with fake_mesh(rank=rank, **way.mesh) as mesh, loss_of(way):
        (stage,) = pipeline_costs(lambda: built(way, mesh), "h100", kernels="cpu").counted
    flops, collectives = Counter(), Counter()
    for part in stage.parts:
        is_block = part in stage.blocks
        flops += Counter(forward=part.forward_flops, backward=part.backward_flops)
        flops["replay"] += part.replay_flops if is_block else 0
        for kind, size, ranks, dimension, phase, count in part.collectives:
            if is_block or phase != "replay":
                collectives[phase, kind, size, ranks, dimension] += count
    return {
        "saved": sum(part.work.saved_bytes for part in stage.parts),
        "static": sum(part.work.static_bytes for part in stage.parts),
        "gathered": stage.gathered_bytes,
        "flops": flops,
        "collectives": collectives,
        "torch's count": sum(n for (phase, *_), n in collectives.items() if phase in ("forward", "backward")),
    }


def test_counts_are_those_of_real_ranks(runs):
    for way, measured in runs:
        ranks = range(len(measured)) if way.tokens % 2 else (0,)  # shards are uneven, or all are like the first
        for rank in ranks:
            assert counted(way, rank) == measured[rank], (way, rank)
