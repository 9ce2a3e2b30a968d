"""Experts over ranks: none is lost, whatever a layout splits, and each is shared by the ranks that hold it."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.slow import few, slow
from torchckpt.jobs import MACHINES, MODELS, Job, Layout, memory_of, plan_job
from torchckpt.jobs.layout import SOFTWARE, STATES
from torchckpt.planning.work.block import Collective

H100 = MACHINES["h100"]
MIXTRAL = MODELS["mixtral-8x7b"]
EXPERT = MIXTRAL.mlp_parameters(MIXTRAL.expert_ffn)


def job(model=MIXTRAL, **changes):
    return Job(model, Layout(**{"gpus": 8, "global_batch": 64, "sequence": 4096, **changes}), H100)


def random_layouts(seed, count=1500):
    """Layouts that divide, with their models."""
    pick = random.Random(seed).choice
    for _ in range(count):
        model, state = MODELS[pick(list(MODELS))], pick(STATES)
        tp, cp, pp, dp = (pick(sizes) for sizes in ((1, 2, 4, 8), (1, 1, 2, 3), (1, 2, 4), (1, 2, 3, 4, 8, 16)))
        schedule, chunks = pick((("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 1), ("dualpipev", 1)))
        layout = Layout(
            gpus=tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, dp=dp, ep=pick((1, 2, 4, 8, 16)) if model.experts else 1,
            global_batch=8 * pp * dp, sequence=6144, schedule=schedule, chunks=chunks if pp > 1 else 1, state=state,
            shards=pick((0, dp)), recompute="full", software=SOFTWARE[pick(tuple(SOFTWARE))],
        )  # fmt: skip
        if not list(layout.faults(model)):
            yield model, layout


@few(1)
@pytest.mark.parametrize("seed", [0, 1, *slow([2, 3])])
def test_all_ranks_together_hold_no_less_than_the_model(seed):
    """Weights, gradients and optimizer, and as often as there are ranks that do not share them."""
    layouts = list(random_layouts(seed))
    assert sum(layout.ep > 1 for _, layout in layouts) > 50
    for model, layout in layouts:
        memory, software = memory_of(Job(model, layout, H100), [0.0] * layout.pp), layout.software
        each = layout.gpus / layout.pp
        sizes = software.parameter_bytes, software.gradient_bytes, software.optimizer_bytes
        for part, size in zip(("weights", "gradients", "optimizer"), sizes):
            held = sum(getattr(rank, part) for rank in memory) * each / size
            copies = layout.dp * layout.cp / layout.state_ranks if model.experts == 0 else 1
            late = 0.1 if part == "gradients" and layout.state == "fsdp2" else 1  # at the loss most are not there
            assert held >= model.parameters * copies * late * (1 - 1e-9), (part, held, model.name, layout)


@few(1)
@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_together_hold_each_expert_as_often_as_the_layout_says(seed):
    """Before the state is shared, and when it is."""
    for model, layout in random_layouts(seed):
        if model.experts:
            one = layout.etp * model.mlp_parameters(model.expert_ffn / layout.etp)
            experts = (model.layers - model.dense_layers) * model.experts * one
            routed = sum(rank[1] for rank in Job(model, layout, H100).rank_parameters) * layout.gpus / layout.pp
            assert routed == pytest.approx(experts * layout.expert_ranks)
            assert layout.etp * layout.ep * layout.expert_ranks == layout.tp * layout.cp * layout.dp
            assert layout.expert_ranks >= layout.expert_state_ranks


@pytest.mark.parametrize(
    ("split", "etp", "same"),
    [
        ({"tp": 8}, 8, 1),
        ({"tp": 8, "ep": 8}, 1, 1),
        ({"tp": 8, "ep": 2}, 4, 1),
        ({"dp": 8, "ep": 8}, 1, 1),
        ({"dp": 8, "ep": 2}, 1, 4),
        ({"tp": 2, "dp": 4, "ep": 2}, 2, 2),
        ({"tp": 2, "cp": 2, "dp": 2, "ep": 4}, 2, 1),
        ({"tp": 2, "dp": 16, "ep": 32}, 1, 1),
    ],
)
def test_an_expert_is_split_over_the_tensor_parallel_ranks_that_expert_parallel_leaves(split, etp, same):
    layout = Layout(**split)
    assert (layout.etp, layout.expert_ranks) == (etp, same)


def test_fsdp_of_experts_that_no_other_rank_holds():
    """46.7 G parameters of 16 bytes on eight ranks are 93 GB on each."""
    fsdp = {"state": "fsdp2", "software": SOFTWARE["torchtitan"], "recompute": "full"}
    (memory,) = plan_job(job(dp=8, ep=8, **fsdp), 200e9).memory
    assert memory.weights == pytest.approx(4 * MIXTRAL.parameters / 8, rel=0.001)
    assert memory.optimizer == pytest.approx(8 * MIXTRAL.parameters / 8, rel=0.001)
    (spanned,) = plan_job(job(tp=8, ep=8, recompute="full"), 200e9).memory
    assert spanned.static == pytest.approx(18 * MIXTRAL.parameters / 8, rel=0.01)


def test_fsdp_gathers_experts_over_the_ranks_that_hold_the_same():
    dense = MIXTRAL.layer_parameters(0, 0)
    found = job(dp=8, ep=4, state="fsdp2").collectives
    gathers = [each for each in found if each.kind == "all_gather" and each.phase == "forward"]
    assert gathers == [
        Collective("all_gather", 2 * dense, 8, "dp", "forward"),
        Collective("all_gather", 2 * 2 * EXPERT, 2, "expert_dp", "forward"),
    ]
    alone = job(dp=8, ep=8, state="fsdp2")
    assert {each.dimension for each in alone.collectives} == {"dp", "ep"}
    replicas = job(gpus=16, dp=16, ep=2, shards=4, state="fsdp2").collectives[-1]
    assert replicas == Collective("all_reduce", 2 * 4 * EXPERT // 2, 4, "replicas", "backward")


def test_products_of_experts_are_as_much_work_however_they_are_split():
    """Where expert parallel takes the tensor parallel ranks, an expert is whole and meets fewer tokens at a time."""
    split, whole = (job(tp=8, ep=ep).work[False].products[2] for ep in (1, 8))
    assert split.flops == whole.flops
    assert (split.many, whole.many) == (8, 1)
    assert whole.columns == 8 * split.columns == 2 * MIXTRAL.expert_ffn
    assert whole.rows == split.rows


def test_experts_all_to_all_beside_each_other_where_they_take_the_tensor_parallel_ranks():
    layout = job(tp=8, dp=2, gpus=16, ep=16).layout
    assert (layout.stride("ep"), replace(layout, ep=2).stride("ep")) == (1, 8)
    assert replace(layout, ep=2).stride("expert_dp") == 16
