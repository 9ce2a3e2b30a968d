"""Two ranks: DDP, FSDP2, and layers that communicate, for which all ranks keep the same calls."""
from __future__ import annotations

import copy
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchckpt
from tests.distributed.ranks import attempted, on_ranks
from tests.graph.allocations import measured_peak
from tests.layers.models import Model, Wide
from tests.settings import with_gloo
from torchckpt.ranks import turns
from torchckpt.testing import count_recomputes

pytestmark = with_gloo


class Sum(Wide):
    """A block whose output is the sum of those of all ranks: a call that is replayed on one of them alone waits."""

    def forward(self, x):
        y = super().forward(x)
        total = y.detach().sum()
        dist.all_reduce(total)
        return y + total


def model_of(block=Sum, widths=(64, 64, 64, 64)):
    torch.manual_seed(0)
    return Model([block(16, width) for width in widths])


def step(model, plain, length, seed=1):
    """How many calls a step recomputes, and whether its gradients are those of ``plain``."""
    x = torch.randn(4, length, 16)
    for each in (plain, model):
        torch.manual_seed(seed)
        with count_recomputes() as counted:
            each(x).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters())
    same = all(torch.equal(full(parameter.grad), full(other.grad)) for parameter, other in pairs)
    model.zero_grad()
    plain.zero_grad()
    return counted.total, same


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def steps(model, plain, *lengths):
    """How many calls each of the steps recomputes, and whether all gradients are those of ``plain``."""
    counts, same = zip(*(step(model, plain, length) for length in lengths))
    return list(counts), all(same)


# layers that do not communicate ---------------------------------------------------------------------------------------


def of_wrapped(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, counts, lengths = model_of(Wide), {}, [16 + 8 * rank] * 4
    wrapped = copy.deepcopy(plain)
    torchckpt.checkpoint_layers(wrapped, "layers.*", budget="80%")
    wrap = nn.parallel.DistributedDataParallel
    counts["ddp"] = steps(wrap(wrapped), wrap(copy.deepcopy(plain)), *lengths)
    mesh, errors = init_device_mesh("cpu", (2,)), []
    for turn in range(3):
        sharded = [copy.deepcopy(plain), copy.deepcopy(plain)]
        handle = torchckpt.checkpoint_layers(sharded[0], "layers.*", budget="80%")
        for model in sharded:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        counts[f"fsdp {turn}"] = steps(*sharded, *lengths)
        errors.append(abs(handle.plan.measured_peak_bytes / handle.plan.peak_bytes - 1))
    return counts, errors


def test_ranks_with_inputs_of_their_own_length_plan_for_themselves(tmp_path):
    for found, errors in on_ranks(of_wrapped, tmp_path):
        for counts, same in found.values():
            assert counts[0] == 4
            assert 0 < counts[1] == counts[3] < 4
            assert same
        assert min(errors) <= 0.02  # a thread of gloo may hold a layer that FSDP2 has gathered a little longer


def of_gathered(rank):
    """What a step takes by the events of the allocator, and what was counted of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, x, found = init_device_mesh("cpu", (2,)), torch.randn(4, 32, 64), []
    for _ in range(3):
        model = Model([Wide(64, 256) for _ in range(6)], 64, head=1024)
        handle = torchckpt.checkpoint_layers(model, "layers.*", budget="80%")
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)

        def run(model=model):
            model(x).square().mean().backward()
            model.zero_grad()

        for _ in range(3):
            run()
        taken = min(measured_peak(run) for _ in range(3))
        found.append((taken, handle.plan.peak_bytes, handle.plan.measured_peak_bytes))
    return found


def test_gathered_parameters_count_while_they_are_gathered(tmp_path):
    for found in on_ranks(of_gathered, tmp_path):
        taken, planned, measured = min(found, key=lambda of_one: abs(of_one[2] - of_one[1]))
        assert planned == measured  # a thread of gloo may hold a layer that FSDP2 has gathered a little longer
        assert taken == pytest.approx(planned, rel=0.02)


# layers that do -------------------------------------------------------------------------------------------------------


def warned(call):
    """What ``call()`` returns, and what it says of communication."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = call()
    return returned, [str(each.message) for each in caught if "communicate" in str(each.message)]


def of_sums(rank):
    """Steps in which every rank has the same length, then some in which each has its own."""
    model = model_of()
    plain = copy.deepcopy(model)
    handle = torchckpt.checkpoint_layers(model, "layers.*", budget="80%")
    same = steps(model, plain, 32, 32, 32, 32)
    kept = sorted(handle.plan.kept)
    lengths = [32, 32, 24 + 16 * rank, 24 + 16 * rank, 32 if rank else 24, 32 if rank else 24]
    return same, kept, steps(model, plain, *lengths), handle.plan.peak_bytes <= handle.plan.budget_bytes


def test_ranks_that_communicate_inside_of_layers_keep_the_same_calls(tmp_path):
    reports = on_ranks(of_sums, tmp_path)
    for (counts, same), kept, (others, same_again), fits in reports:
        assert counts == [4, *[4 - len(kept)] * 3]
        assert 0 < len(kept) < 4
        assert same
        assert same_again
        assert fits
        assert others[:3] == [4 - len(kept), 4 - len(kept), 4]
        assert others[3] < 4
        assert others[5] == others[4] < 4  # each knows its step, but the two of them have not come together before
    assert reports[0][1:3] == reports[1][1:3]


def of_one_new_shape(rank):
    model = model_of()
    plain = copy.deepcopy(model)
    torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB")
    return steps(model, plain, 32, 32, 32 + 64 * rank, 32, 32 + 64 * rank)


def test_where_a_rank_does_not_know_its_step_none_keeps_a_call(tmp_path):
    assert on_ranks(of_one_new_shape, tmp_path) == [([4, 0, 4, 0, 0], True)] * 2


def of_budgets(rank):
    """The budget of rank 1 is too small."""
    model = model_of()
    torchckpt.checkpoint_layers(model, "layers.*", budget=["1GiB", "1kB"][rank])
    model(torch.randn(4, 16, 16)).sum().backward()
    with pytest.raises(torchckpt.BudgetInfeasible) as raised:
        model(torch.randn(4, 16, 16))
    return raised.value.rank, str(raised.value), raised.value.least_bytes


def test_a_budget_that_is_too_small_for_one_rank_is_an_error_on_all(tmp_path):
    for rank, said, least in on_ranks(of_budgets, tmp_path):
        assert rank == 1
        assert said == (
            f"checkpoint_layers: the budget is too small: a step takes {least:.0f} bytes on rank 1 even if it "
            f"recomputes every chosen layer\n  received: 1000 bytes for it\n"
            f"  works:    budget={least:.0f} or more, more layers, or smaller batches"
        )


def of_unequal_budgets(rank):
    """Rank 1 has room for less, and has more to hold."""
    model = model_of()
    plain = copy.deepcopy(model)
    handle = torchckpt.checkpoint_layers(model, "layers.*", budget=["90%", "75%"][rank])
    counts, same = steps(model, plain, *[16 + 8 * rank] * 4)
    return counts, same, handle.plan.kept, handle.plan.measured_peak_bytes <= handle.plan.budget_bytes


def test_the_plan_is_within_the_budget_of_every_rank(tmp_path):
    reports = on_ranks(of_unequal_budgets, tmp_path)
    assert reports[0] == reports[1]
    counts, same, _, fits = reports[0]
    assert counts[1] > 0
    assert same
    assert fits


def of_other_layers(rank):
    """Rank 1 has chosen one layer less."""
    model = model_of()
    plain = copy.deepcopy(model)
    torchckpt.checkpoint_layers(model, ["layers.*", "layers.[0-2]"][rank], budget="1GiB")
    return warned(lambda: steps(model, plain, 16, 16, 16))


def test_ranks_with_different_layers_recompute_everything_and_say_so(tmp_path):
    reports = on_ranks(of_other_layers, tmp_path)
    assert [counts for ((counts, _), _) in reports] == [[4, 4, 4], [3, 3, 3]]
    for (_, same), said in reports:
        assert same
        assert said == [
            "checkpoint_layers: ranks that communicate inside of the chosen layers do not have the same layers, so "
            "every call is recomputed"
        ]


def of_one_that_holds_its_graph(rank):
    """Rank 1 holds a graph, so that its next forward is of the same step."""
    turns.timeout_of = lambda *_: timedelta(seconds=2)
    model, x = model_of(), torch.randn(2, 16, 16)
    torchckpt.checkpoint_layers(model, "layers.*", budget="1GiB")
    model(x).sum().backward()
    held = [model(x), None][1 - rank] if rank else model(x).sum().backward()
    return held is None, warned(lambda: attempted(model, x))


def test_a_rank_that_begins_no_step_is_named(tmp_path):
    (_, (error, said)), _ = on_ranks(of_one_that_holds_its_graph, tmp_path)
    assert said == [
        "checkpoint_layers: layers communicate, so ranks begin their steps together; this one waits for rank 1"
    ]
    assert error.endswith(
        "CheckpointError: checkpoint_layers: ranks that communicate inside of the chosen layers do not begin a step "
        "together\n  received: a step on rank 0, nothing on rank 1 within 1 s\n"
        "  works:    the same calls of the model on every rank, each with its backward\n"
    )
