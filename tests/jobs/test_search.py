"""The search: the best of all layouts, what fell out and why."""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from tests.slow import few, slow
from torchckpt.errors import ArgumentError
from torchckpt.jobs import MACHINES, MODELS, Job, Layout, plan_job, search_layouts
from torchckpt.jobs import search as module
from torchckpt.planning import Host

BASE = Layout(gpus=4, global_batch=16, sequence=4096)
MODEL = replace(MODELS["llama3-8b"], layers=8)
H100 = MACHINES["h100"]


@pytest.fixture(scope="module")
def found():
    return search_layouts(MODEL, H100, BASE)


def test_the_best_come_first_and_all_fit(found):
    steps = [plan.step_seconds for plan in found.best]
    assert steps == sorted(steps)
    assert len(steps) == 20
    assert all(plan.peak_bytes < plan.device_bytes for plan in found.best)
    assert found.is_whole


def test_every_layout_is_accounted_for(found):
    early = sum(found.reasons.values()) - found.reasons["the activations do not fit"]
    early -= found.reasons["the micro-batches do not suit the schedule"]
    assert found.layouts == found.simulated + found.pruned + early
    assert found.pruned > 0


CASES = [
    (MODEL, "h100", BASE),
    (replace(MODELS["mixtral-8x7b"], layers=4), "a100", replace(BASE, sequence=2048, global_batch=8)),
    (replace(MODELS["gpt3-175b"], layers=6, hidden=2048, heads=16, ffn=8192), "h100", replace(BASE, gpus=8)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0].name)
def everything(request):
    """A search that prunes nothing, its case, and the least seconds of each layout."""
    model, device, base = request.param
    case = model, MACHINES[device], base
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BEST", 10**9)
        patch.setattr(module, "_WORK", 0)
        result = search_layouts(*case)
    assert result.pruned == 0
    model, machine, base = case
    space = module.Space(model, base, machine.network.node_devices, ())
    bounded = module._bounded(model, machine, space, 80e9, module.SearchResult())
    return result, case, [least for least, *_ in bounded]


@few(1)
@pytest.mark.parametrize("count", [4, *slow([1, 20])])
def test_what_is_pruned_is_not_among_the_best(everything, count, monkeypatch):
    result, case, least = everything
    monkeypatch.setattr(module, "_BEST", count)
    monkeypatch.setattr(module, "_WORK", 0)
    few = search_layouts(*case)
    assert [plan.job.layout for plan in few.best] == [plan.job.layout for plan in result.best[:count]]
    last = few.best[-1].step_seconds
    above, below = (sum(seconds > last * near for seconds in least) for near in (1 + 1e-12, 1 - 1e-12))  # rounded
    assert 0 < above <= few.pruned <= below
    assert few.pruned + few.simulated == result.simulated


def test_the_bound_is_below_each_step_and_equal_without_a_pipeline(everything):
    for plan in everything[0].best:
        least = module._least_seconds(plan.job)
        assert least <= plan.step_seconds * (1 + 1e-9)
        assert plan.job.layout.pp > 1 or least == pytest.approx(plan.step_seconds, rel=1e-9)


def test_the_bound_of_layers_of_which_a_share_is_recomputed():
    base = Layout(gpus=8, global_batch=16, recompute="full", recomputed_share=0.4)
    outcomes = search_layouts(MODEL, H100, base, "200GB", fixed=("recompute",)).outcomes
    steps = [(each.least_seconds, each.step_seconds) for each in outcomes if each.step_seconds is not None]
    assert steps
    assert all(least <= step * (1 + 1e-9) for least, step in steps)


def test_experts_are_spread():
    model = replace(MODELS["mixtral-8x7b"], layers=4)
    found = search_layouts(model, H100, BASE)
    assert {plan.job.layout.ep for plan in found.best} > {1}


def test_an_interrupted_search_has_what_it_found():
    def interrupt(done, of):
        if done == 3:
            raise KeyboardInterrupt

    found = search_layouts(MODEL, H100, BASE, progress=interrupt)
    assert 0 < len(found.best) <= 3
    assert str(found).endswith("; interrupted")


def test_nothing_fits():
    with pytest.raises(ArgumentError, match=r"no layout fits.*\n.*the state does not fit.*\n.*gpus=2$"):
        search_layouts(MODELS["llama3-8b"], H100, replace(BASE, gpus=1))
    assert search_layouts(MODELS["llama3-8b"], H100, replace(BASE, gpus=2)).best
    with pytest.raises(ArgumentError, match=r"gpus=128$"):
        search_layouts(MODELS["llama3-405b"], H100, BASE)
    with pytest.raises(ArgumentError, match="a host of one size"):
        search_layouts(MODEL, H100, BASE, host=Host([1, 2], out=1))


@few(1)
@pytest.mark.parametrize(
    ("values", "works"),
    [
        ({"pp": 2}, "gpus=4$"),  # every other layout of 2 would do
        ({"schedule": "zero_bubble", "pp": 2, "micro_batch": 2}, "gpus=4$"),
        ({"tp": 1, "cp": 1, "pp": 1, "dp": 1}, "devices with more memory, or other values of cp, dp, pp, tp$"),
        ({"micro_batch": 64}, "works:    other values of micro_batch$"),  # memory does not help
    ],
)
def test_the_number_of_gpus_that_would_do_is_that_of_the_fixed_fields(values, works):
    base = replace(BASE, gpus=1, **values)
    with pytest.raises(ArgumentError, match=works) as caught:
        search_layouts(MODELS["llama3-8b"], H100, base, fixed=tuple(values))
    if found := re.search(r"gpus=(\d+)$", str(caught.value)):
        assert search_layouts(MODELS["llama3-8b"], H100, replace(base, gpus=int(found[1])), fixed=tuple(values)).best


def test_a_batch_that_no_layout_divides():
    with pytest.raises(ArgumentError, match=r"works:    another number of GPUs, or another batch$"):
        search_layouts(MODEL, H100, replace(BASE, gpus=1009, global_batch=1))


def test_a_short_sequence_is_not_split():
    found = search_layouts(MODEL, H100, replace(BASE, sequence=512))
    assert {plan.job.layout.cp for plan in found.best} == {1}
    assert found.reasons["a rank has fewer than 1024 tokens of a sequence"]


@few(1)
@pytest.mark.parametrize(
    "values",
    [
        {"tp": 2, "pp": 2, "dp": 1, "micro_batch": 2, "schedule": "gpipe"},
        {"pp": 2, "chunks": 1, "schedule": "interleaved_1f1b"},
        {"state": "none", "recompute": "selective"},
        {"recompute": "planned", "pp": 4},
    ],
)
def test_fields_that_are_fixed(values):
    base = replace(BASE, **values)
    found = search_layouts(MODEL, H100, base, fixed=values)
    assert {tuple(getattr(plan.job.layout, name) for name in values) for plan in found.best} == {(*values.values(),)}


@pytest.mark.parametrize("fixed", ["tp", ("tpp",), ("tp", 3)])
def test_what_is_fixed_are_fields(fixed):
    with pytest.raises(ArgumentError, match="what is fixed is not a list of fields of a layout: gpus, tp, "):
        search_layouts(MODEL, H100, BASE, fixed=fixed)


def test_a_search_of_another_policy_takes_no_host():
    with pytest.raises(ArgumentError, match="only what is planned goes there"):
        search_layouts(MODEL, H100, replace(BASE, recompute="full"), host=Host("1TB", out="1GB"), fixed=("recompute",))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_search")
def test_a_search_of_planned_layouts_sends_blocks_to_the_host_as_a_plan_does():
    values = {"recompute": "planned", "pp": 4, "tp": 1, "cp": 1, "schedule": "1f1b", "micro_batch": 2}
    base, host = replace(BASE, **values), Host("1TB", out="400GB")
    found = [search_layouts(MODEL, H100, base, 32e9, each, fixed=values) for each in (host, None)]
    best, alone = (each.best[0] for each in found)
    assert best.away_share > 0 == alone.away_share
    assert best.step_seconds < alone.step_seconds
    plan = plan_job(Job(MODEL, best.job.layout, H100), 32e9, host)
    assert (plan.step_seconds, plan.away_share) == (best.step_seconds, best.away_share)


@few(1)
@pytest.mark.parametrize("memory", [16e9, 18e9])
def test_what_only_the_planner_finds_is_found_without_its_policy(memory):
    base = replace(BASE, sequence=8192, global_batch=32)
    found = search_layouts(MODEL, H100, base, memory)
    all_planned = search_layouts(MODEL, H100, replace(base, recompute="planned"), memory, fixed=("recompute",))
    assert found.best[0].step_seconds <= all_planned.best[0].step_seconds * (1 + 1e-9)
    assert found.best[0].job.layout.recompute == "planned"
    assert 0 < found.planned < all_planned.simulated / 4
    assert [plan.step_seconds for plan in found.best] == sorted(plan.step_seconds for plan in found.best)


@pytest.mark.slow
def test_a_host_is_used_without_the_policy():
    base = replace(BASE, sequence=8192, global_batch=32)
    alone, beside = (search_layouts(MODEL, H100, base, 18e9, host) for host in (None, Host("1TB", out="100GB")))
    assert beside.best[0].away_share > 0
    assert beside.best[0].step_seconds < alone.best[0].step_seconds


def test_the_planner_waits_for_the_bounds_that_are_cheap(monkeypatch):
    """Each bound is asked for only where the one before is below the best step."""
    asked = []

    def counted(job, memory, host, *, is_quick):
        asked.append((job.layout, is_quick))
        return bound(job, memory, host, is_quick)

    bound = module.least_planned
    monkeypatch.setattr(module, "least_planned", counted)
    found = search_layouts(MODEL, H100, replace(BASE, sequence=8192, global_batch=32), 20e9)
    quick, dear = ([layout for layout, is_quick in asked if is_quick == kind] for kind in (True, False))
    assert set(dear) <= set(quick)
    assert found.planned <= len(dear) < len(quick) < found.layouts / 2
    assert len(set(quick)) == len(quick)


@pytest.mark.slow
def test_a_plan_that_recomputes_everything_is_no_other_layout():
    found = search_layouts(MODELS["llama3-8b"], H100, replace(BASE, gpus=8, global_batch=64), 24e9)
    rows = [(replace(plan.job.layout, recompute="full"), plan.step_seconds) for plan in found.best]
    assert len(rows) == len(set(rows))


def test_table_and_numbers(found):
    lines = str(found).split("\n")
    assert lines[0].split()[:4] == ["tp", "cp", "ep", "pp"]
    assert len(lines) == 23
    numbers = found.as_json()
    assert [row["step"] for row in numbers["best"]] == [plan.step_seconds for plan in found.best]
    assert numbers["whole"]


def test_the_numbers_have_every_layout(found):
    rows = found.as_json()["outcomes"]
    outcomes = Counter(row["outcome"] for row in rows)
    assert len(rows) - outcomes["planned"] == found.layouts
    assert outcomes["pruned"] == found.pruned
    assert {what: count for what, count in outcomes.items() if what in found.reasons} == found.reasons
    shown = [row for row in rows if row["outcome"] in ("simulated", "planned")]
    assert sorted(row["step"] for row in shown)[: len(found.best)] == [plan.step_seconds for plan in found.best]
    assert all(row["least"] <= row["step"] * (1 + 1e-9) and row["peak"] > 0 for row in shown)
    assert min(row["least"] for row in rows if row["outcome"] == "pruned") > found.best[-1].step_seconds
