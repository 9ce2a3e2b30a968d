"""The example that is planned and never run: seconds are not measured here, memory and numbers are."""
from __future__ import annotations

import json

import pytest

from examples.plan_llama import Size, tiny
from tests.scripts import ROOT, run
from torchckpt.costs import pipeline_costs

PLAN = """
import functools, json, resource, sys
from examples import plan_llama
from torchckpt.__main__ import main
plan_llama.Size = functools.partial(plan_llama.Size, blocks={blocks})
code = main(["plan", "examples.plan_llama:stages", "--device", "h100", "--microbatches", "16", "--schedule", "1f1b",
             "--budget", "{budget}GB", "--json"])
print("|", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "budget"), [(16, 12), (80, 60)])
def test_a_llama_of_70_billion_parameters_in_under_two_gigabytes(blocks, budget):
    """And one of a fifth of its blocks, whose parameters alone have 28 GB."""
    made = run("-c", PLAN.format(blocks=blocks, budget=budget), cwd=ROOT, timeout=600)
    assert made.returncode == 0, made.stderr
    text, resident_kilobytes = made.stdout.split("|")
    assert int(resident_kilobytes) < 2_000_000
    plan, size = json.loads(text), Size()
    assert plan["balance"] == [blocks // 8] * 8
    assert max(plan["peak_bytes"]) <= budget * 1e9
    assert plan["bound"] * (1 - 1e-9) <= plan["step"] < plan["recompute_all"]["step"]
    block = plan["plan"]["stages"][1]["blocks"][1]
    keys = size.width // size.heads * size.key_heads
    parameters = 2 * size.width * (size.width + keys) + 3 * size.width * size.hidden + 2 * size.width
    assert block["static_bytes"] == 16 * parameters
    assert block["boundary_bytes"] == 2 * size.tokens * size.width
    products = 2 * size.tokens * (parameters - 2 * size.width) + 4 * size.tokens**2 * size.width
    assert block["forward_seconds"] > products / 989.4e12 / 0.601
    assert block["forward_seconds"] < 1.2 * products / 989.4e12 / 0.601


@pytest.mark.slow
def test_the_parallel_one_is_counted_as_one_rank_of_sixteen():
    from examples.plan_parallel import stages
    from torchckpt.costs import fake_mesh

    with fake_mesh(dp=2, tp=8) as mesh:
        costs = pipeline_costs(lambda: stages(mesh), "h100")
    size = Size(tokens=8192)
    keys = size.width // size.heads * size.key_heads
    matrices = 2 * size.width * (size.width + keys) + 3 * size.width * size.hidden
    block = costs.counted[1].blocks[7]
    assert [len(stage.blocks) for stage in costs.stages] == [20] * 4
    assert block.work.static_bytes == 16 * (matrices / 16 + 2 * size.width / 2)
    assert block.forward_flops == (2 * size.tokens * matrices + 4 * size.tokens**2 * size.width) / 8
    assert block.backward_flops > 2 * block.forward_flops  # attention computes its scores again
    assert block.work.boundary_bytes == 2 * size.tokens * size.width / 8
    gathers = [each for each in block.collectives if each[0] == "all_gather" and each.phase == "forward"]
    assert [(each.dimension, each.bytes, each.count) for each in gathers] == [
        ("tp", 2 * size.tokens * size.width, 2), ("dp", 2 * (matrices // 8 + 2 * size.width), 1)
    ]  # fmt: skip


@pytest.mark.slow
def test_the_small_one_runs_and_is_counted_alike():
    stages, x, loss = tiny()
    for stage in stages:
        x = stage(x)
    loss(x).backward()
    assert [len(stage.blocks) for stage in pipeline_costs(tiny, "h100").stages] == [2, 2, 2, 2]
