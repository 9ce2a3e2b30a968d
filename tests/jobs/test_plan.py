"""Plans of jobs: what fits, what is kept, and the error that names what does not."""
from __future__ import annotations

import math
import random
import re
from contextlib import suppress
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.slow import few, slow, slow_but
from torchckpt.errors import ArgumentError, BudgetInfeasible
from torchckpt.jobs import MACHINES, MODELS, Job, Layout, memory_of, plan_job
from torchckpt.jobs import plan as plans
from torchckpt.jobs.layout import RECOMPUTES, SOFTWARE, Software
from torchckpt.jobs.plan import drawn
from torchckpt.planning.device import BUFFERS, MARGIN
from torchckpt.planning.order.schedules import NAMES
from torchckpt.planning.work.host import Host

FLAGSHIP = Layout(gpus=64, tp=8, pp=4, dp=2, global_batch=256, recompute="planned")


def job(layout=FLAGSHIP, model="llama3-70b", device="h100"):
    return Job(MODELS[model], layout, MACHINES[device])


def test_llama_on_64_gpus():
    plan = plan_job(job())
    assert plan.recomputed_share == 0
    assert plan.step_seconds == pytest.approx(plan.bound_seconds, rel=0.01)
    assert plan.tokens_per_second == pytest.approx(256 * 8192 / 64 / plan.step_seconds)
    assert 0.3 < plan.mfu < 0.5
    assert 0 < plan.bubble < 0.1
    assert "tokens a second and GPU" in str(plan)


def test_a_plan_recomputes_what_does_not_fit():
    roomy, tight = plan_job(job()), plan_job(job(), 40e9)
    assert roomy.recomputed_share == 0 < tight.recomputed_share < 1
    assert tight.peak_bytes <= 40e9 * (1 - MARGIN) < roomy.peak_bytes
    assert roomy.step_seconds < tight.step_seconds < plan_job(job(replace(FLAGSHIP, recompute="full"))).step_seconds


def test_blocks_go_to_the_host_where_that_is_shorter():
    layout = replace(FLAGSHIP, global_batch=64)
    alone = plan_job(job(layout), 40e9)
    plan = plan_job(job(layout), 40e9, Host(200e9, 50e9))
    assert alone.away_share == plan.recomputed_share == 0 < plan.away_share < 1
    assert plan.bound_seconds * (1 - 1e-9) <= plan.step_seconds < alone.step_seconds
    assert " away; at most " in plan.summary


@pytest.mark.slow
def test_a_host_may_hold_what_no_device_does():
    small = job(replace(FLAGSHIP, global_batch=16))
    with pytest.raises(BudgetInfeasible):
        plan_job(small, 32e9)
    assert plan_job(small, 32e9, Host(200e9, 50e9)).away_share > 0.9


def test_one_stage_is_planned_as_well():
    layout = replace(FLAGSHIP, tp=8, pp=1, dp=8, recompute="planned")
    plan = plan_job(job(layout))
    assert 0 < plan.recomputed_share < 1
    assert plan.bubble == 0
    assert plan.step_seconds >= plan.bound_seconds * (1 - 1e-9)


def test_the_error_names_the_part_and_the_nearest_layout_that_fits():
    small = replace(FLAGSHIP, tp=4, pp=2, dp=8, recompute="none")
    wrong = r"the job does not fit: rank 0 needs .*most of them activations"
    with pytest.raises(BudgetInfeasible, match=wrong) as error:
        plan_job(job(small))
    assert "recompute='full'" in str(error.value)
    assert plan_job(job(replace(small, recompute="full"))).peak_bytes < 80e9
    with pytest.raises(BudgetInfeasible, match=r"most of them optimizer.*\n.*\n.*gpus=128, pp=16, dp=1"):
        plan_job(job(model="llama3-405b"))
    replicas = replace(FLAGSHIP, gpus=8, tp=1, pp=1, dp=8)
    with pytest.raises(BudgetInfeasible, match=r"most of them gradients.*\n.*\n.*gpus=32, tp=8, pp=4, dp=1"):
        plan_job(job(replicas))
    assert plan_job(job(replace(replicas, gpus=32, tp=8, pp=4, dp=1))).peak_bytes < 80e9


@pytest.mark.parametrize("schedule", [*sorted({*NAMES} - {"looped_bfs"}), "zb-2p"])
@pytest.mark.parametrize("recompute", ["none", "full", "planned"])
def test_what_a_rank_holds_at_least_is_seen_in_few_micro_batches(monkeypatch, schedule, recompute):
    """A pipeline of 64 stages and 2048 micro-batches took 15 seconds to refuse."""
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    layout = replace(FLAGSHIP, global_batch=96, schedule=schedule, chunks=chunks, recompute=recompute)
    seen = []
    monkeypatch.setattr(plans, "memory_of", lambda job, peaks: seen.append(job.layout) or memory_of(job, peaks))
    few = plans._least(job(layout))
    assert seen[0].micro_batches == (48 if schedule == "gpipe" else 16)
    monkeypatch.setattr(plans, "_ROUNDS", 48)
    assert few == plans._least(job(layout))


@pytest.mark.parametrize(
    ("changes", "wrong", "works"),
    [
        ({"dp": 3, "global_batch": 255}, "the GPUs are not tp x cp x pp x dp", "gpus=96"),
        ({"tp": 64, "pp": 1, "dp": 1, "model": "llama3-8b"}, "the heads do not divide by tp", "tp=32"),
        ({"cp": 3, "gpus": 192}, "the sequence does not divide by twice cp", "cp=2"),
        ({"ep": 3, "model": "mixtral-8x7b"}, "the experts do not divide by ep", "ep=2"),
        ({"global_batch": 255}, "the batch does not divide by dp x micro-batch", "global_batch=256"),
        ({"pp": 128, "gpus": 2048}, "there are fewer layers than stages", "pp=80"),
        ({"cp": 8, "gpus": 512, "sequence": 8}, "the sequence does not divide by twice cp", "cp=4"),
        ({"chunks": 2}, "the schedule 1f1b fixes its number of stages on a rank", "chunks=1"),
        ({"schedule": "zbv", "chunks": 3}, "the schedule zbv fixes its number of stages on a rank", "interleaved"),
        ({"global_batch": 10**12}, "stages times micro-batches are more than 1000000", "global_batch=500000"),
        ({"state": "fsdp2", "shards": 64}, "dp x cp does not divide by the shards", "shards=2"),
        ({"head": "balanced", "pp": 1, "tp": 32}, "a balanced head needs several ranks", "head='last'"),
        ({"head": "balanced", "schedule": "zbv"}, "a balanced head needs several ranks", "head='last'"),
        ({"ahead": 2, "schedule": "zbv"}, "no schedule but 1F1B runs more forwards ahead", "ahead=0"),
        ({"schedule": "dualpipe_v", "global_batch": 4}, "m is too small.*\n.*global_batch=4", "global_batch=16"),
    ],
)
def test_a_layout_that_does_not_divide(changes, wrong, works):
    values = dict(changes)
    model = values.pop("model", "llama3-70b")
    with pytest.raises(ArgumentError, match=wrong) as error:
        plan_job(job(replace(FLAGSHIP, **values), model))
    assert works in str(error.value)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_host_is_for_what_is_planned(recompute):
    layout = replace(FLAGSHIP, recompute=recompute)
    with pytest.raises(ArgumentError, match=f"only what is planned goes there\n.*{recompute}.*\n.*recompute='planned'"):
        plan_job(job(layout), host=Host(200e9, 50e9))


@few(1)
@pytest.mark.parametrize("memory", [0, -1, math.nan, math.inf, True, "80", "50%", [80e9]])
def test_the_memory_of_a_device_is_a_size(memory):
    with pytest.raises(ArgumentError, match=r"the memory of a device is not .*\n.*\n.*device_bytes=\"80GB\""):
        plan_job(job(), memory)
    assert plan_job(job(), "60GB").device_bytes == plan_job(job(), 60e9).device_bytes == 60e9


@few(4)
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipe_v", "interleaved_1f1b"])
@pytest.mark.parametrize("recompute", ["none", "full", "planned"])
def test_no_step_is_shorter_than_its_bound(schedule, recompute):
    """Also where steps overlap, so that the step is that of the busiest rank."""
    layout = Layout(gpus=4, pp=4, global_batch=8, schedule=schedule, recompute=recompute,
                    chunks=2 if "inter" in schedule else 1)  # fmt: skip
    for memory in (120e9, 300e9):
        try:
            plan = plan_job(job(layout, "llama3-8b"), memory)
        except BudgetInfeasible:
            continue
        assert plan.bound_seconds <= plan.step_seconds * (1 + 1e-9)
        busy = sum(stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
                   for stage in plan.job.stages)  # fmt: skip
        assert plan.bound_seconds >= 8 * busy / 4
        assert 0 <= plan.bubble < 1


def test_a_host_beside_overlapping_steps_has_a_bound_that_holds():
    layout = Layout(gpus=4, pp=4, global_batch=8, schedule="zero_bubble", recompute="planned")
    plan = plan_job(job(layout, "llama3-8b"), 100e9, Host("1TB", out="100GB"))
    assert plan.away_share
    assert plan.bound_seconds <= plan.step_seconds


@pytest.mark.parametrize("name", ["ZBV", "ScheduleZBVZeroBubble", "Interleaved1F1B", "InterleavedZeroBubble", "1F1B"])
def test_another_name_of_a_schedule_is_the_same_layout(name):
    layout = Layout(gpus=4, pp=4, global_batch=8, schedule=name)
    assert layout.schedule in NAMES
    assert layout == replace(layout, schedule=layout.schedule)


@pytest.mark.parametrize("memory", [9e9, 12e9, 80e9])
def test_a_plan_is_no_longer_than_recomputing_everything(memory):
    """FSDP2 gathers weights beside replays, too."""
    layout = Layout(gpus=32, tp=4, dp=8, micro_batch=2, global_batch=64, sequence=2048, state="fsdp2",
                    software=SOFTWARE["torchtitan"])  # fmt: skip
    full, planned = (
        plan_job(job(replace(layout, recompute=recompute), "llama3-8b"), memory) for recompute in ("full", "planned")
    )
    assert planned.step_seconds <= full.step_seconds * (1 + 1e-9)
    assert full.bound_seconds <= planned.step_seconds * (1 + 1e-9)


def test_a_bound_of_many_micro_batches_that_can_all_wait_takes_no_time():
    layout = Layout(gpus=64, tp=16, pp=4, global_batch=8, sequence=16, schedule="zbv", recompute="planned")
    assert plan_job(job(layout), 10e12).bound_seconds > 0


def test_numbers_for_a_file_and_the_picture():
    plan = plan_job(job())
    numbers = plan.as_json()
    assert numbers["step"] == plan.step_seconds
    assert numbers["memory"][0]["buffers"] == BUFFERS
    picture = ElementTree.fromstring(drawn(plan))
    bars = [bar for bar in picture.findall("{*}rect") if len(bar)]
    assert len(bars) == 4 * 7
    (step,) = picture.findall("{*}svg")
    assert float(step.get("y")) > max(float(bar.get("y")) + float(bar.get("height")) for bar in bars)
    assert float(picture.get("height")) == float(step.get("y")) + float(step.get("height"))
    assert "1f1b, 4 stages, 128 micro-batches" in "".join(step.itertext())
    tight = "".join(ElementTree.fromstring(drawn(plan_job(job(), 40e9))).find("{*}svg").itertext())
    assert "everything kept" in tight
    assert "planned within the budget of each rank" in tight
    assert all(math.isfinite(float(bar.get("height"))) for bar in bars)


@few(1)
@pytest.mark.parametrize("seed", [0, 1, *slow([2, 3])])
def test_what_the_faults_of_a_layout_advise_has_none(seed):
    """All of it at once: a smaller split has fewer GPUs, of which the next call would complain."""
    pick, mended = random.Random(seed).choice, 0
    for _ in range(2000):
        model, schedule = MODELS[pick(list(MODELS))], pick(("1f1b", "interleaved_1f1b", "zbv", "dualpipev"))
        split = {name: pick((1, 2, 3, 4, 6, 8, 16, 64)) for name in ("tp", "cp", "ep", "pp", "dp")}
        gpus = pick((64, split["tp"] * split["cp"] * split["pp"] * split["dp"]))
        chunks = 2 if schedule == "interleaved_1f1b" else 1
        layout = Layout(**split, gpus=gpus, global_batch=pick((60, 64, 96)), micro_batch=pick((1, 2)),
                        schedule=schedule, chunks=chunks, sequence=pick((4096, 6144)))  # fmt: skip
        faults = list(layout.faults(model))
        advised = {name: int(value) for fault in faults for name, value in re.findall(r"(\w+)=(\d+)", fault.works)}
        assert not list(replace(layout, **advised).faults(model)), (layout, faults)
        mended += bool(faults)
    assert mended > 1000


def test_a_folded_schedule_has_two_stages_on_each_rank():
    layout = Layout(gpus=32, pp=32, global_batch=64, schedule="zbv")
    (fault,) = layout.faults(MODELS["llama3-8b"])
    assert fault.works == "pp=16, gpus=16"
    assert not list(replace(layout, pp=16, gpus=16).faults(MODELS["llama3-8b"]))


HOST = Host("1MB", out="1MB")  # of plans alone
SIDES = [(state, framework) for state in ("zero1", "fsdp2") for framework in ("megatron", "torchtitan")]

WAYS = [("none", None), ("selective", None), ("full", None), ("planned", None), ("planned", HOST)]
EVERY = [(*way, *side, schedule) for way in WAYS for side in SIDES for schedule in ("1f1b", "zbv")]
QUICK = [
    case for at, case in enumerate(EVERY)
    if ((at + at // 2 + at // 4 + at // 8) % 2 if case[1] is None else case[2:4] in SIDES[::3])
]  # fmt: skip
"""Each side of each way in one schedule, and in the other one where one thing is otherwise. With a host, two sides."""


@few(1)
@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize(
    ("recompute", "host", "state", "framework", "schedule"),
    slow_but(QUICK, EVERY),
)
def test_a_device_with_the_bytes_that_an_error_names_is_enough_and_less_is_not(
    recompute, state, framework, schedule, host
):
    """Also where the plan recomputes everything, and still needs the gradients of a layer's activations beside that."""
    layout = Layout(gpus=8, pp=4, dp=2, global_batch=16, schedule=schedule, recompute=recompute, state=state,
                    software=SOFTWARE[framework])  # fmt: skip
    whole = job(layout, "llama3-8b")
    with pytest.raises(BudgetInfeasible) as error:
        plan_job(whole, 5e9, host)
    least = error.value.least_bytes
    assert f"needs {least:.0f} bytes" in str(error.value)
    assert plan_job(whole, least, host).peak_bytes <= least * (1 - MARGIN)
    with pytest.raises(BudgetInfeasible):
        plan_job(whole, least - 2e6)


@few(1)
@pytest.mark.parametrize(("pp", "micro_batch"), [(1, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("state", ["zero1", "fsdp2"])
def test_a_plan_that_recomputes_everything_needs_the_same_bytes_under_both_names(pp, micro_batch, state):
    layout = Layout(gpus=4, pp=pp, dp=4 // pp, micro_batch=micro_batch, global_batch=32, state=state)
    needed = []
    for recompute in ("full", "planned"):
        with pytest.raises(BudgetInfeasible) as error:
            plan_job(job(replace(layout, recompute=recompute), "mistral-7b"), 5e9)
        needed.append(error.value.least_bytes)
    assert needed[0] == needed[1]


def test_what_saves_the_same_bytes_needs_the_same():
    """Selective recomputation of a fused attention frees nothing."""
    none, selective = (plan_job(job(replace(FLAGSHIP, recompute=name))) for name in ("none", "selective"))
    assert none.peak_bytes == selective.peak_bytes


@pytest.mark.parametrize(("split", "memory"), [
    ({"tp": 4, "dp": 2}, 25e9), ({"tp": 4, "dp": 2}, 80e9), ({"tp": 2, "dp": 2, "pp": 2}, 42e9),
    ({"tp": 2, "dp": 2, "pp": 2, "schedule": "zero_bubble"}, 57e9),
])  # fmt: skip
def test_the_bound_is_below_the_steps_of_all_policies(split, memory):
    """What selective recomputation makes again is in no bound, and no bound is above what it reaches."""
    layout = Layout(gpus=8, **split, global_batch=16, state="fsdp2", software=SOFTWARE["torchtitan"])
    plans = {}
    for recompute in RECOMPUTES:
        with suppress(BudgetInfeasible):
            plans[recompute] = plan_job(job(replace(layout, recompute=recompute), "llama3-8b"), memory)
    assert {"selective", "full", "planned"} <= set(plans)
    bounds = [plan.bound_seconds for plan in plans.values()]
    assert bounds == pytest.approx([bounds[0]] * len(bounds))
    least = min(plan.step_seconds for plan in plans.values())
    assert max(bounds) <= least * (1 + 1e-9)
    assert plans["planned"].step_seconds == least


def test_a_plan_does_what_selective_recomputation_does_where_that_is_shorter():
    """Of unfused attention it frees most bytes for the fewest seconds; a planner of whole layers makes all again."""
    software = Software(attention="unfused")
    layout = replace(FLAGSHIP, gpus=8, tp=4, pp=1, global_batch=8, recompute="selective", software=software)
    parts, plan = (plan_job(job(replace(layout, recompute=name), "mistral-7b"), 40e9) for name in RECOMPUTES[1::2])
    assert plan == parts
    assert "recompute selective" in plan.head


def test_what_a_selective_recompute_makes_again_is_in_its_share():
    layout = Layout(gpus=8, tp=8, global_batch=8, state="fsdp2", software=SOFTWARE["torchtitan"])
    shares = [plan_job(job(replace(layout, recompute=name), "llama3-8b")).recomputed_share for name in RECOMPUTES]
    none, selective, full, planned = shares
    assert none == planned == 0 < selective < full == 1
    plan = plan_job(job(replace(layout, recompute="selective"), "llama3-8b"))
    assert f", {selective:.1%} recomputed;".replace("%", " %") in plan.summary


def test_a_near_layout_whose_schedule_has_no_such_micro_batches_is_none():
    layout = Layout(gpus=3, pp=3, global_batch=33, schedule="interleaved_1f1b", chunks=2, recompute="planned")
    with pytest.raises(BudgetInfeasible, match="the job does not fit"):
        plan_job(job(layout))
