"""One layer: FLOPs, saved bytes and collectives in closed forms, and beside the costs of a model's own code."""
from __future__ import annotations

from dataclasses import replace

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.jobs import MACHINES, MODELS, Layout, Model, Software, machine_named
from torchckpt.jobs.layer import LayerWork, saved_of
from torchckpt.planning.rates import Product
from torchckpt.planning.work.block import Collective

LLAMA, GPT = MODELS["llama3-8b"], MODELS["gpt3-175b"]
H100 = MACHINES["h100"]


def work(model=LLAMA, **changes):
    return LayerWork(model, Layout(**{"sequence": 2048, **changes}), H100)


def test_flops_of_a_dense_layer():
    """24 s h^2 (of 4 h and no groups) and half of 4 s^2 h, as attention is causal."""
    model = Model("", 1, 1024, 8, 4096, 1000, gated=False)
    assert work(model).flops == 24 * 2048 * 1024**2 + 2 * 2048**2 * 1024
    assert work(model, software=Software(attention="unfused")).flops == 24 * 2048 * 1024**2 + 4 * 2048**2 * 1024
    assert work(tp=4).flops == work().flops / 4


def test_scores_that_are_written_are_those_of_the_rank():
    """Context parallel splits the queries."""
    model = Model("", 1, 1024, 8, 4096, 1000, gated=False)
    software = Software(attention="unfused")
    one, four = (sum(work(model, cp=cp, sequence=8192, software=software).attention) for cp in (1, 4))
    assert four == pytest.approx(one / 4, rel=0.02)


def test_flops_of_experts_follow_the_tokens_that_visit_them():
    model = MODELS["mixtral-8x7b"]
    routed = LayerWork(model, Layout(sequence=2048), H100, dense=False)
    attention = 2048 * 2 * (4096 * (4096 + 2 * 1024) + 4096**2) + 2 * 2048**2 * 4096
    assert routed.flops == attention + 2 * 2048 * (2 * 3 * 4096 * 14336 + 4096 * 8)
    spread = LayerWork(model, Layout(sequence=2048, ep=8, dp=8, gpus=8), H100, dense=False)
    assert spread.flops == routed.flops


def test_saved_bytes_of_korthikanti():
    """34 s b h + 5 a s^2 b of a layer with dropout; all but the scores under selective recomputation; 2 s b h whole."""
    software = Software(attention="unfused", dropout=True)
    layout = Layout(sequence=2048, sequence_parallel=False, software=software)
    tokens, hidden = 2048, 12288
    saved = saved_of(GPT, layout)
    assert saved.whole == tokens * (34 * hidden + 5 * 96 * 2048)
    assert saved_of(GPT, replace(layout, recompute="selective")).kept == tokens * 34 * hidden
    assert saved.boundary == 2 * tokens * hidden
    one = saved_of(GPT, replace(layout, tp=8))
    assert one.whole == tokens * (10 * hidden + (24 * hidden + 5 * 96 * 2048) / 8)
    assert saved_of(GPT, replace(layout, tp=8, sequence_parallel=True)).whole == saved.whole / 8
    plain = saved_of(GPT, replace(layout, software=Software(attention="unfused")))
    assert plain.whole == tokens * (32 * hidden + 2 * 96 * 2048)  # of the scores what a softmax returns
    flash = saved_of(GPT, replace(layout, software=Software(attention="flash2", dropout=True)))
    assert flash.whole == tokens * (34 * hidden + 4 * 96)  # both masks of hidden dropout as well


def test_selective_recomputation_by_module():
    layout = Layout(sequence=2048, recompute="selective", software=Software(selective=("mlp",)))
    saved = saved_of(LLAMA, layout)
    assert saved.whole - saved.kept == 2048 * (4 + 2) * 14336
    titan = replace(layout, software=Software(selective=("products",), stops_early=True))
    assert saved_of(LLAMA, titan).kept == 2048 * (2 * 4096 + 4 * 4096 + 2 * 1024 + 2 * 14336 + 2 * 4096)


def test_collectives_of_tensor_parallel():
    size, network = 2.0 * 2048 * 4096, H100.network
    two = 2 * sum(network.seconds(kind, size, 8, 8) for kind in ("all_gather", "reduce_scatter"))
    assert work(tp=8).collective_seconds == 2 * two
    assert work(tp=8, software=Software(async_tp=True)).collective_seconds == pytest.approx(0.7 * two)
    assert work(tp=8, sequence_parallel=False).collectives == (
        Collective("all_reduce", size, 8, "tp", "forward", 2), Collective("all_reduce", size, 8, "tp", "backward", 2)
    )  # fmt: skip
    assert work().collectives == ()
    assert work().collective_seconds == 0


@pytest.mark.parametrize(("regathers", "backward"), [(True, 4), (False, 2)])
def test_inputs_of_products_that_are_gathered_again_are_listed(regathers, backward):
    layer = work(tp=8, software=Software(regathers=regathers))
    gathers = {each.phase: each.count for each in layer.collectives if each.kind == "all_gather"}
    assert gathers == {"forward": 2, "backward": backward}
    assert layer.collective_seconds == work(tp=8).collective_seconds


def test_collectives_of_experts_and_of_context_parallel():
    layout = Layout(sequence=2048, ep=8, dp=8, gpus=8)
    sent = 2 * 2048 * 4096 * 2
    routed = LayerWork(MODELS["mixtral-8x7b"], layout, H100, dense=False).collectives
    assert routed == tuple(Collective("all_to_all", sent, 8, "ep", phase, 2) for phase in ("forward", "backward"))
    keys = 2048 * 2 * 2 * 1024
    ring = work(cp=4).collectives
    assert ring == tuple(
        Collective("all_gather", keys, 4, "cp", phase, count) for phase, count in (("forward", 1), ("backward", 2))
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "planned"])
def test_a_replay_passes_keys_and_values_around_again(recompute):
    ring = {each.phase: each.count for each in work(cp=4, recompute=recompute).collectives}
    again = {"replay": 1} if recompute in ("full", "planned") else {}
    assert ring == {"forward": 1, "backward": 2, **again}


def test_a_head_of_keys_and_values_is_whole_on_each_rank():
    """With fewer heads than ranks all gather what the product makes (Megatron), and each keeps a head."""
    model = replace(LLAMA, kv_heads=1)
    split, layout = LLAMA.query_width + 2 * 128, Layout(sequence=2048, tp=8)
    each = saved_of(model, layout).whole - 2048 * (8 * 4096 + 2 * 2 * 4096 + 6 * 14336 + 4 * 32) / 8
    assert each == 2048 * 2 * 2 * 128
    eight = saved_of(LLAMA, layout), work(tp=8, cp=2).collectives[-1], work(tp=8).elementwise
    one = saved_of(model, layout), work(model, tp=8, cp=2).collectives[-1], work(model, tp=8).elementwise
    assert eight == one
    gathers = set(work(model, tp=8).collectives) - set(work(tp=8).collectives)
    assert gathers == {
        Collective("all_gather", 2 * 2048 * split, 8, "tp", "forward"),
        Collective("reduce_scatter", 2 * 2048 * split, 8, "tp", "backward"),
    }


def test_tokens_come_to_experts_as_they_lie_on_the_rank():
    """What arrives is gathered over the ranks of an expert; where these are one, only attention gathers."""
    model, size = MODELS["mixtral-8x7b"], 2 * 2048 * 4096

    def told(model=model, phase="forward", **changes):
        layer = LayerWork(model, Layout(**{"sequence": 2048, "tp": 8, **changes}), H100, dense=False)
        return {(each.kind, each.bytes, each.ranks): each.count for each in layer.collectives if each.phase == phase}

    both = {("all_gather", size, 8): 2, ("reduce_scatter", size, 8): 2}
    once = dict.fromkeys(both, 1)
    assert told() == both
    assert told(ep=8) == once | {("all_to_all", size * 2 // 8, 8): 2}
    assert told(ep=8, phase="backward") == told(ep=8) | {("all_gather", size, 8): 2}
    assert told(replace(model, shared=1), ep=8) == both | {("all_to_all", size * 2 // 8, 8): 2}
    four = {("all_gather", size * 2 // 2, 4): 1, ("reduce_scatter", size * 2 // 2, 4): 1}
    assert told(ep=2) == once | four | {("all_to_all", size * 2 // 8, 2): 2}


def test_each_rank_of_an_expert_keeps_all_of_its_tokens():
    model = MODELS["mixtral-8x7b"]
    bytes_by_split = [saved_of(model, Layout(sequence=2048, tp=8, ep=ep), dense=False).whole for ep in (8, 2, 1)]
    one, four, eight = bytes_by_split
    routed = 2048 * 2 * 2 * 4096 / 8
    assert (four - one, eight - one) == (3 * routed, 7 * routed)


def test_products_reach_less_when_they_are_small_or_skinny():
    def rate(*sizes):
        return Product(*sizes).flops / H100.product(Product(*sizes)) / H100.peak

    large = rate(8192, 8192, 8192)
    assert 0.5 < large < H100.rates.product
    assert rate(8192, 8192, 256) < 0.6 * large
    assert rate(256, 256, 256) < 0.2 * large
    assert rate(256, 256, 8192) < 0.4 * large
    assert replace(H100, fp8=True).product(Product(8192, 8192, 8192)) < H100.product(Product(8192, 8192, 8192))


def test_a_long_inner_dimension_is_split_where_tiles_are_few():
    """The gradient of the weight of a narrow layer takes what reading both factors takes."""
    long = Product(96, 384, 400_000)
    assert H100.product(long) == pytest.approx(H100.stream(2 * long.elements), rel=0.1)
    assert H100.product(long) < 1.1 * H100.product(Product(400_000, 384, 96))


def test_a_replay_that_stops_early_leaves_out_the_last_product():
    def replay(stops_early):
        return work(recompute="full", software=Software(stops_early=stops_early)).block.recompute_seconds

    last = H100.product(Product(2048, 4096, 14336))
    assert replay(False) - replay(True) == pytest.approx(last)


def test_the_description_has_the_flops_and_parameters_of_the_models_own_code():
    """Both ways count the same; torch's counter counts the masked half of the scores as well."""
    from examples import plan_llama
    from torchckpt.costs import pipeline_costs

    sizes = {"blocks": 4, "width": 64, "heads": 4, "key_heads": 2, "hidden": 96, "vocabulary": 128, "tokens": 32}
    size = plan_llama.Size(**sizes, stages=2)
    counted = pipeline_costs(lambda: plan_llama.made(size), "h100").counted
    model = Model("", 4, 64, 4, 96, 128, 2)
    block, layout = counted[0].blocks[0], Layout(sequence=32)
    scores = 2 * 32 * 32 * 64
    assert block.forward_flops == LayerWork(model, layout, H100).flops + scores
    assert sum(part.parameters for part in counted) == model.parameters


def test_a_device_without_a_number_that_is_needed(monkeypatch):
    bare = replace(H100, device=replace(H100.device, network=None))
    no_half = replace(H100, device=replace(H100.device, peak_flops={"float32": 1e12}))
    with pytest.raises(ArgumentError, match="the device has no peak of bfloat16, which it computes in"):
        _ = no_half.peak
    with pytest.raises(ArgumentError, match="the device has no network, which says what collectives take"):
        bare.collective(Collective("all_gather", 1000000, 8, "tp", "forward"))
    with pytest.raises(ArgumentError, match="the device is not one of"):
        machine_named("h1000")
    monkeypatch.delitem(MACHINES, "h100")
    with pytest.raises(ArgumentError, match="what the device reaches of its peaks is not known; it is of a100"):
        machine_named("h100")


LATENT = Model(
    "latent", layers=2, hidden=1024, heads=16, ffn=4096, vocab=32000, head_dim=96, query_rank=384, kv_rank=256,
    rotated=32, value_dim=64,
)  # fmt: skip


def test_latent_attention():
    """As DeepSeek's: queries of 384 numbers, keys and values of 256 others, and 32 numbers of a key that all heads
    share; each rank makes all of these, its heads alone from them."""
    tp, layout = 4, Layout(sequence=2048, tp=4, gpus=4)
    work = LayerWork(LATENT, layout, H100)
    down, queries, keys, out = 1024 * (384 + 256 + 32), 384 * 16 * 96, 256 * 16 * (64 + 64), 16 * 64 * 1024
    attention = LATENT.attention_parameters - 2 * 1024 - 384 - 256
    assert attention == down + queries + keys + out
    whole = LATENT.whole_parameters(0)
    assert whole == 2 * 1024 + 384 + 256 + down
    products = 2 * 2048 * (down + (queries + keys + out + 3 * 1024 * 4096) / tp)
    assert work.flops == products + 2048**2 * 16 * (96 + 64) / tp
    saved = saved_of(LATENT, layout).whole
    heads = 2 * 16 * (96 + 96 + 64 + 64) + 6 * 4096 + 4 * 16
    assert saved == 2048 * (8 * 1024 + 4 * (384 + 256) + heads) / tp
    plain = replace(LATENT, query_rank=0)
    assert plain.attention_parameters - LATENT.attention_parameters == 16 * 96 * (1024 - 384) - 1024 * 384 - 384


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"kv_rank": 0}, "a model without latent attention has query_rank"),
        ({"kv_heads": 4}, "latent attention has as many heads of keys and values as of queries"),
        ({"rotated": 128}, "more of a key is rotated than it has"),
    ],
)
def test_sizes_of_latent_attention_that_do_not_go_together(changes, wrong):
    with pytest.raises(ArgumentError, match=wrong):
        replace(LATENT, **changes)


def test_selective_recomputation_by_module_of_experts():
    """As Megatron names them: ``mlp`` is that of layers without experts, ``moe_act`` the routed experts' activation."""
    model = replace(MODELS["mixtral-8x7b"], shared=1)
    none = LayerWork(model, Layout(gpus=8, dp=8, ep=8, sequence=2048), H100, dense=False)

    def under(module, dense=False):
        software = Software(selective=(module,))
        return replace(none, layout=replace(none.layout, recompute="selective", software=software), dense=dense)

    token = 6 * 14336
    gone = {"mlp": 0, "moe_act": 2 * 2 * 14336, "shared_experts": token, "moe": 3 * token + 2 * 2 * 4096}
    for module, size in gone.items():
        assert none.saved.whole - under(module).saved.kept == pytest.approx(2048 * size)
    assert under("moe", dense=True).saved.kept == under("moe", dense=True).saved.whole
    backwards = {module: under(module).block.input_grad_seconds for module in gone}
    assert backwards["mlp"] == backwards["moe_act"] == none.block.input_grad_seconds
    assert backwards["mlp"] < backwards["shared_experts"] < backwards["moe"]
    again = [each for each in under("moe").collectives if each.phase == "replay"]
    assert [(each.kind, each.dimension, each.count) for each in again] == [("all_to_all", "ep", 2)]
    assert not any(each.phase == "replay" for each in under("shared_experts").collectives)


def test_selective_recomputation_of_latent_attention():
    software = Software(selective=("mla_up_proj",))
    layout = Layout(sequence=2048, tp=4, gpus=4, recompute="selective", software=software)
    again, none = LayerWork(LATENT, layout, H100), LayerWork(LATENT, replace(layout, recompute="none"), H100)
    assert again.saved.whole - again.saved.kept == 2048 * 2 * 16 * (96 + 96 + 64) / 4
    made = Product(2048, 16 * 96 / 4, 384), Product(2048, 16 * 128 / 4, 256)
    seconds = again.block.input_grad_seconds - none.block.input_grad_seconds
    assert seconds == pytest.approx(sum(map(H100.product, made)))
