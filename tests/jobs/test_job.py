"""A job: its stages, its step, what each rank holds."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.slow import few
from torchckpt.errors import BudgetInfeasible
from torchckpt.jobs import MACHINES, MODELS, Job, Layout, Model, Software, memory_of, plan_job
from torchckpt.jobs.layout import SOFTWARE
from torchckpt.jobs.plan import rooms
from torchckpt.planning.device import BUFFERS, MARGIN, left_to_tensors
from torchckpt.planning.work.block import Collective
from torchckpt.planning.work.choice import State

SMALL = Model("small", layers=8, hidden=1024, heads=8, ffn=4096, vocab=32000)
H100 = MACHINES["h100"]


def job(model=SMALL, **changes):
    values = {"sequence": 2048, "gpus": 4, "pp": 4, "global_batch": 16, **changes}
    return Job(model, Layout(**values), H100)


def test_stages_have_the_layers_in_order():
    assert job().layers == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert job(pp=2, gpus=2, schedule="interleaved_1f1b", chunks=2).layers == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(stage) for stage in job(replace(SMALL, layers=10)).layers] == [2, 3, 3, 2]
    assert [len(stage) for stage in job(replace(SMALL, layers=9)).layers] == [3, 2, 2, 2]


def test_layers_leave_the_stage_of_the_head_until_none_has_more_flops():
    big = replace(SMALL, vocab=128000, layers=16)
    assert [len(stage) for stage in job(big).layers] == [4, 4, 4, 4]
    assert [len(stage) for stage in job(big, head="balanced").layers] == [5, 5, 6, 0]


def test_a_rank_with_both_ends_has_one_table_if_they_are_tied():
    """So do ranks that share the head; others hold a copy at each end."""
    model, table = replace(SMALL, tied=True), SMALL.embedding_parameters
    held = [sum(dense for dense, _ in job(model, **layout).rank_parameters) - model.parameters for layout in (
        {"schedule": "zbv"}, {"schedule": "dualpipe_v"}, {}, {"gpus": 1, "pp": 1},
    )]  # fmt: skip
    assert held == [0, 0, table, 0]
    assert sum(dense for dense, _ in job(model, head="split").rank_parameters) == model.parameters - SMALL.hidden


def test_ranks_at_both_ends_sum_the_gradients_of_a_table_that_is_tied():
    """Whole ones with ZeRO-1, of a shard with FSDP2; nobody else does."""
    model, table = replace(SMALL, tied=True), SMALL.embedding_parameters
    layout = {"gpus": 16, "pp": 4, "dp": 4}

    def sums(model=model, **changes):
        return [each for each in job(model, **layout, **changes).collectives if each.dimension == "ends"]

    zero, sharded = (job(model, **layout, state=state) for state in ("zero1", "fsdp2"))
    assert sums() == [Collective("all_reduce", round(table * zero.layout.software.gradient_bytes), 2, "ends", "step")]
    assert [each.bytes for each in sums(state="fsdp2")] == [
        round(table / 4 * sharded.layout.software.gradient_bytes)
    ]
    assert sums(SMALL) == sums(head="split") == sums(schedule="zbv") == []
    longer = zero.once_seconds - replace(zero, model=SMALL).once_seconds
    assert longer == pytest.approx(H100.collective(sums()[0], zero.layout.stride("ends")))  # 12 apart: in two nodes


def test_biases_of_what_ranks_sum_are_whole():
    model = Model(
        "", layers=2, hidden=64, heads=4, ffn=256, vocab=512, experts=4, active=2, shared=2, expert_ffn=128, biases=True
    )
    one, two = (job(model, gpus=tp, tp=tp, pp=1, ep=1).rank_parameters[0] for tp in (1, 2))
    norms, routers, tables = 5 * 64, 2 * 4 * 64, 2 * 512 * 64
    assert 2 * two[0] - one[0] == norms + routers + 2 * 64 * (1 + 2)  # attention's, and those of shared experts
    assert 2 * two[1] - one[1] == 2 * 4 * 64
    assert one[0] > tables


def test_a_step_of_1f1b_without_a_head_and_messages():
    """(m + p - 1) times the work of a stage, as all are alike, and what happens once."""
    alike = replace(SMALL, vocab=8)
    whole = job(alike)
    stage = whole.stages[1]
    work = stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
    assert whole.step_seconds - whole.once_seconds == pytest.approx((16 + 3) * work, rel=0.02)
    layers = sum(each.forward_seconds + each.input_grad_seconds + each.weight_grad_seconds for each in stage.blocks)
    one = job(alike, pp=1, gpus=1)
    assert one.step_seconds - one.once_seconds == pytest.approx(16 * 4 * layers, rel=0.01)


def test_messages_between_stages():
    """A rank of ``tp`` sends its share of the tokens, without sequence parallel all of them; none goes to itself."""
    layout = {"gpus": 16, "tp": 4, "sequence": 2**16}
    of_node = H100.network.seconds("permute", 2 * 2**16 * 1024, 2, 2)
    start = H100.network.seconds("permute", 0, 2, 2)
    whole = job(**layout, sequence_parallel=False)
    assert whole._sent(0) == pytest.approx(of_node)
    assert job(**layout)._sent(0) == pytest.approx(start + (of_node - start) / 4)
    assert job(**layout, sequence_parallel=False, software=Software(scatters=True))._sent(0) == job(**layout)._sent(0)
    sent = [bool(job(gpus=2, pp=2, schedule="zbv")._sent(boundary)) for boundary in range(-1, 4)]
    assert sent == [False, True, False, True, False]


def test_what_is_recomputed():
    assert job().choices == {}
    full = job(recompute="full")
    assert set(full.choices.values()) == {next(iter(full.choices.values()))}
    assert len(full.choices[0, 0].blocks(State.LATE)) == 2
    half = job(recompute="full", recomputed_share=0.5)
    assert len(half.choices[3, 15].blocks(State.LATE)) == 1
    assert job().step_seconds < half.step_seconds < full.step_seconds
    assert max(job().step.peak_bytes) > max(half.step.peak_bytes) > max(full.step.peak_bytes)


def test_schedules_that_split_backwards_are_shorter():
    steps = [job(schedule=name).step_seconds for name in ("1f1b", "zero_bubble", "zb-2p")]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.04 * steps[2]


def test_a_head_that_is_split_over_the_stages():
    big = replace(SMALL, vocab=128000)
    split = job(big, head="split", ahead=2)
    assert split.step_seconds < 0.8 * job(big).step_seconds
    assert len({stage.after.forward_seconds for stage in split.stages}) == 1
    assert sum(map(split.loss_bytes, range(4))) == sum(map(job(big).loss_bytes, range(4)))
    assert split.step.peak_bytes[0] > job(big).step.peak_bytes[0]


@pytest.mark.parametrize(
    ("state", "bytes_of_parameter"), [("none", (2, 4, 12)), ("zero1", (2, 4, 12 / 8)), ("fsdp2", (4 / 8, 4 / 8, 8 / 8))]
)
def test_static_bytes_by_what_is_shared(state, bytes_of_parameter):
    software = Software(parameter_bytes=4.0, optimizer_bytes=8.0) if state == "fsdp2" else Software()
    (memory,) = memory_of(job(pp=1, dp=8, gpus=8, state=state, software=software))
    found = [part / SMALL.parameters for part in (memory.weights, memory.gradients, memory.optimizer)]
    assert found == pytest.approx(list(bytes_of_parameter), rel=1e-3)
    assert (memory.gathered > 0) == (state == "fsdp2")
    assert memory.total == pytest.approx(sum(memory.parts.values()))


def test_experts_are_shared_by_the_ranks_that_hold_the_same():
    model = MODELS["mixtral-8x7b"]
    whole = job(model, pp=1, dp=8, gpus=8, global_batch=8)
    (spread,) = memory_of(replace(whole, layout=replace(whole.layout, ep=8)))
    (memory,) = memory_of(whole)
    experts = 32 * 8 * model.mlp_parameters(model.expert_ffn)
    assert memory.weights - spread.weights == 2 * experts * 7 / 8
    assert memory.optimizer == pytest.approx(spread.optimizer)


def test_tensor_parallel_divides_what_a_rank_holds():
    (one,), (four,) = (memory_of(job(pp=1, gpus=tp, tp=tp, state="none")) for tp in (1, 4))
    norms = 2 * SMALL.hidden * (2 * SMALL.layers + 1)
    assert four.weights - norms == (one.weights - norms) / 4
    assert four.activations == pytest.approx(one.activations / 4)


def test_collectives_of_the_state():
    """FSDP2 gathers a layer's weights twice, and in a pipeline once a step; ZeRO-1 reduces and gathers all of them."""
    layer, size = SMALL.layer_parameters(0), 2 * SMALL.parameters
    gather = Collective("all_gather", 2 * layer, 4, "dp", "forward")
    reduce = Collective("reduce_scatter", 2 * layer, 4, "dp", "backward")
    assert job(pp=1, dp=4, state="fsdp2").collectives == (gather, gather._replace(phase="backward"), reduce)
    kept = Software(resharded=False)
    assert job(pp=1, dp=4, state="fsdp2", software=kept).collectives == (gather, reduce)
    staged = job(dp=4, gpus=16, state="fsdp2").collectives
    assert staged == (gather._replace(phase="step"), reduce._replace(phase="step"))
    replicas = job(pp=1, dp=8, gpus=8, shards=4, state="fsdp2").collectives[-1]
    assert replicas == Collective("all_reduce", layer // 2, 2, "replicas", "backward")
    assert job(pp=1, dp=4).collectives == (
        Collective("all_gather", size, 4, "dp", "step"), Collective("reduce_scatter", 2 * size, 4, "dp", "step")
    )  # fmt: skip
    assert job(pp=1, dp=4, shards=2).collectives == (
        Collective("all_gather", size, 2, "dp", "step"), Collective("reduce_scatter", 2 * size, 2, "dp", "step"),
        Collective("all_reduce", size, 2, "replicas", "step"),
    )  # fmt: skip
    assert job(pp=1, dp=4, state="none").collectives == (Collective("all_reduce", 2 * size, 4, "dp", "step"),)
    halves = job(pp=1, dp=4, state="none", software=Software(gradient_bytes=2.0))
    assert halves.collectives == (Collective("all_reduce", size, 4, "dp", "step"),)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev", "interleaved_1f1b"])
def test_what_fsdp_shares_once_a_step_is_that_of_all_layers_of_a_rank(schedule):
    """As many gathers as layers, also where a folded schedule has two stages on a rank without saying chunks."""
    chunks = [2] if schedule == "interleaved_1f1b" else [1] if schedule == "1f1b" else [1, 2]
    fsdp = {"dp": 2, "gpus": 8, "state": "fsdp2", "schedule": schedule}
    alike = replace(SMALL, vocab=8)
    jobs, plain = [job(alike, chunks=count, **fsdp) for count in chunks], job(alike, **{**fsdp, "schedule": "1f1b"})
    assert [each.once_seconds for each in jobs] == pytest.approx([plain.once_seconds] * len(chunks), rel=1e-3)
    assert {tuple(map(len, each.rank_layers)) for each in jobs} == {(2, 2, 2, 2)}


def test_what_fsdp_shares_once_a_step_is_that_of_each_layer():
    """A first layer without experts costs less than one with them, and the others cost what they did."""
    experts = MODELS["qwen3-235b-a22b"]
    fsdp = {"dp": 8, "ep": 4, "pp": 8, "gpus": 64, "state": "fsdp2", "global_batch": 64}
    once = [job(replace(experts, dense_layers=count), **fsdp).once_seconds for count in (0, 1, 93)]
    assert once[0] == pytest.approx(once[1])  # of the rank that has most
    assert once[2] < once[1]


def test_messages_between_nodes_take_longer():
    near, far = job(pp=4, gpus=4), job(pp=4, dp=8, gpus=32, global_batch=128)
    assert near.stages[1].before.forward_seconds < far.stages[1].before.forward_seconds
    edge = job(pp=16, gpus=16, model=replace(SMALL, layers=16), global_batch=64)
    messages = [stage.before.forward_seconds for stage in edge.stages[1:15]]
    assert messages.index(max(messages)) == 6  # stage 7 sends to the second node


def test_what_a_backward_needs_beside_what_is_saved():
    """Gradients of activations, 0.3 of a layer, or what selective recomputation makes again; the logits, which are
    freed before, count as far as they are more."""
    first, *_, last = memory_of(job())
    layer = job().work[True].saved.whole
    assert first.working == last.working == 0.3 * layer
    logits = 2048 * 32000 * Software().loss_bytes
    assert last.activations + last.working == pytest.approx(2 * layer + logits)
    unfused = job(recompute="selective", software=Software(attention="unfused"))
    saved = unfused.work[True].saved
    assert memory_of(unfused)[0].working == saved.whole - saved.kept > 0


@few(23)
@pytest.mark.parametrize("vocab", [1000, 32000, 128000])
@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("hidden", [512, 2048, 8192])
@pytest.mark.parametrize(
    ("state", "framework"),
    [("none", "megatron"), ("zero1", "megatron"), ("fsdp2", "megatron"), ("fsdp2", "torchtitan")],
)
def test_the_peak_is_at_the_loss_or_in_the_first_or_last_replay(state, framework, hidden, batch, vocab):
    """One rank, everything recomputed: the inputs of all layers and the logits, or a whole layer beside these inputs,
    with the gradients of its activations; with FSDP2 also its weights in two bytes and its gradients. Of all gradients
    a tenth is there then, none at the loss; all of them in the last replay, with that layer alone."""
    software = SOFTWARE[framework]
    model = replace(SMALL, vocab=vocab, hidden=hidden, ffn=4 * hidden)
    changes = {"pp": 1, "dp": 4, "global_batch": batch, "recompute": "full", "state": state, "software": software}
    one = job(model, **changes)
    (memory,), saved = memory_of(one), one.work[True].saved
    logits = one.layout.tokens * vocab * software.loss_bytes
    gradients = model.parameters / (4 if state == "fsdp2" else 1) * software.gradient_bytes
    late = gradients if state == "fsdp2" and batch == 4 else 0.0
    replay, inputs = 0.3 * saved.whole, model.layers * saved.boundary
    if state == "fsdp2":
        replay += model.layer_parameters(0) * (software.reduce_bytes + 2)
    at_loss = inputs + logits
    first = 0.1 * late + inputs - saved.boundary + saved.whole + replay
    last = late + saved.whole + replay
    rest = memory.weights + memory.optimizer + memory.gathered + gradients - late
    assert memory.total == pytest.approx(rest + max(at_loss, first, last))


@pytest.mark.parametrize(("framework", "dp", "batch", "late"), [
    ("torchtitan", 1, 1, True), ("torchtitan", 1, 2, False), ("torchtitan", 2, 2, False), ("megatron", 1, 1, False),
])  # fmt: skip
def test_modules_of_torch_on_one_rank_have_gradients_as_they_come(framework, dp, batch, late):
    """Others have buffers of them: Megatron, and DistributedDataParallel."""
    changes = {"pp": 1, "dp": dp, "gpus": dp, "global_batch": batch, "state": "none", "software": SOFTWARE[framework]}
    (memory,) = memory_of(job(**changes))
    share = memory.gradients / (SMALL.parameters * SOFTWARE[framework].gradient_bytes)
    assert share == pytest.approx(0.1 if late else 1)


@pytest.mark.parametrize("memory", [40e9, 45e9, 50e9])
@pytest.mark.parametrize("state", ["none", "fsdp2"])
def test_a_plan_of_one_backward_fills_its_device_and_no_more(state, memory):
    """Gradients leave room at the loss."""
    model = replace(SMALL, layers=24, hidden=2048, heads=16, ffn=8192)
    changes = {"pp": 1, "dp": 1, "gpus": 1, "micro_batch": 16, "global_batch": 16, "software": SOFTWARE["torchtitan"]}
    plan = plan_job(job(model, state=state, recompute="planned", **changes), memory)
    (left,) = rooms(plan.job, memory)
    assert plan.pipeline.peak_bytes[0] <= left
    assert plan.memory[0].total <= left_to_tensors(memory)
    saved = plan.job.work[True].saved
    assert left - plan.pipeline.peak_bytes[0] < 1.1 * saved.whole


@pytest.mark.parametrize(("share", "is_planned"), [(0.1, False), (0.99, False), (1.01, True), (4, True)])
@pytest.mark.parametrize("state", ["none", "fsdp2"])
def test_a_plan_of_one_backward_has_room_for_a_layer_beside_all_gradients(state, share, is_planned):
    model = replace(SMALL, layers=24, hidden=2048, heads=16, ffn=8192)
    changes = {"pp": 1, "dp": 1, "gpus": 1, "micro_batch": 4, "global_batch": 4, "software": SOFTWARE["torchtitan"]}
    one = job(model, state=state, recompute="planned", **changes)
    device = (memory_of(one, [0.0])[0].total + share * one.work[True].saved.whole + BUFFERS) / (1 - MARGIN)
    if is_planned:
        assert plan_job(one, device).memory[0].total <= left_to_tensors(device)
    else:
        with pytest.raises(BudgetInfeasible) as caught:
            plan_job(one, device)
        assert plan_job(one, caught.value.least_bytes).memory[0].total <= left_to_tensors(caught.value.least_bytes)
