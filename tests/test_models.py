"""What the models are: their parts counted, their inputs and weights from a seed, their bytes at benchmark sizes."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.graph.allocations import measured_peak
from tests.graph.eager import assert_same, step
from tests.models import BENCHMARK, MODELS
from tests.models.image import Basic, Bottleneck
from tests.models.sequence import Attention, Block, Experts
from tests.slow import few

PARAMETERS = {
    "gpt24": 21_168,
    "gpt2_hf": 7_088,
    "gpt6": 5_472,
    "gpt6_without_dropout": 5_472,
    "llama_hf": 6_960,
    "lstm50": 621,
    "mlp24": 1_728,
    "moe": 4_192,
    "nested_outputs": 126,
    "resnet110": 28_076,
    "resnet20": 4_556,
    "resnet200": 35_984,
    "sparse_embedding": 544,
    "tanh_chain": 0,
    "tanh_chain_residual": 0,
    "unet": 7_559,
}


@pytest.fixture
def build():
    """Builds a case by its name; skips where its library is not installed."""

    def build(name, **sizes):
        if name.endswith("_hf"):
            pytest.importorskip("transformers")
        return MODELS[name](**sizes)

    return build


def number(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


def gradients(case):
    return step(case.model, case.inputs, case.loss).gradients


# all of them ----------------------------------------------------------------------------------------------------------


def test_there_are_these_models():
    assert sorted(MODELS) == sorted(PARAMETERS)
    assert set(BENCHMARK) <= set(MODELS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_model_is_in_training_mode_and_has_this_many_parameters(name, build):
    case = build(name)
    assert case.name == name
    assert all(module.training for module in case.model.modules())
    assert sum(parameter.numel() for parameter in case.model.parameters()) == PARAMETERS[name]


@few(2)
@pytest.mark.parametrize("name", PARAMETERS)
def test_weights_inputs_and_step_follow_from_the_seed(name, build):
    before = torch.get_rng_state()
    case, twin = build(name), build(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, case.inputs, twin.make_inputs(0)))
    result = step(case.model, case.inputs, case.loss)
    assert_same(step(twin.model, twin.inputs, twin.loss), result)
    assert not all(map(torch.equal, case.inputs, case.make_inputs(1)))


@few(4)
@pytest.mark.parametrize("name", [name for name, parameters in PARAMETERS.items() if parameters])
def test_weights_of_another_seed_differ(name, build):
    first, other = (list(build(name, seed=seed).model.parameters()) for seed in (0, 1))
    assert not all(map(torch.equal, first, other))


@few(3)
@pytest.mark.parametrize("name", PARAMETERS)
def test_loss_is_a_finite_scalar_and_all_that_it_reads_has_a_gradient(name, build):
    case = build(name)
    loss = case.loss(case.model(*case.inputs))
    assert loss.shape == ()
    assert loss.isfinite()
    unread = {"spare.weight", "spare.bias"} if name == "nested_outputs" else set()
    unread |= {f"inputs[{place}]" for place, leaf in enumerate(case.inputs) if not leaf.requires_grad}
    found = gradients(case)
    assert {key for key, gradient in found.items() if gradient is None} == unread
    assert all(gradient.to_dense().isfinite().all() for key, gradient in found.items() if key not in unread)


@pytest.mark.parametrize("name", PARAMETERS)
def test_inputs_share_no_memory_with_each_other_or_with_those_before(name, build):
    case = build(name)
    inputs = [*case.make_inputs(0), *case.make_inputs(0)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in inputs}) == len(inputs)
    assert all(tensor.is_leaf and tensor.is_contiguous() for tensor in inputs)


# one by one -----------------------------------------------------------------------------------------------------------


def test_mlp_is_linear_and_relu_by_turns(build):
    assert list(map(type, build("mlp24").model)) == [nn.Linear, nn.ReLU] * 24


@pytest.mark.parametrize("name", ["tanh_chain", "tanh_chain_residual"])
def test_tanh_chain_has_no_parameters_and_nodes_of_a_megabyte(name, build):
    case = build(name)
    (x,) = case.inputs
    assert x.requires_grad
    assert x.nbytes == case.model(x).nbytes == 10**6


def test_tanh_chain_has_its_input_among_its_nodes(build):
    case, residual = build("tanh_chain", nodes=4), build("tanh_chain_residual", nodes=4)
    (a,) = case.inputs
    assert torch.equal(case.model(a), a.tanh().tanh().tanh())
    b = a.tanh()
    c = (b + a).tanh()
    assert torch.equal(residual.model(a), (c + b).tanh())


@pytest.mark.parametrize(("name", "blocks"), [("gpt6", 6), ("gpt6_without_dropout", 6), ("gpt24", 24)])
def test_gpt_has_this_many_blocks(name, blocks, build):
    model = build(name).model
    assert (number(model, Block), number(model, Attention)) == (blocks, blocks)
    assert (number(model, nn.LayerNorm), number(model, nn.Embedding)) == (2 * blocks + 1, 2)


@pytest.mark.parametrize(("name", "random"), [("gpt6", True), ("gpt6_without_dropout", False), ("gpt2_hf", True)])
def test_gpt_draws_random_numbers_where_it_has_dropout(name, random, build):
    case = build(name)
    losses = {case.model(*case.inputs).item() for _ in range(3)}
    assert len(losses) == (3 if random else 1)


def test_gpt_is_causal(build):
    """The logits of the first tokens do not read the last one."""
    case, seen = build("gpt6_without_dropout"), []
    tokens, targets = case.inputs
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    case.model.head.register_forward_hook(lambda module, args, output: seen.append(output))
    case.model(tokens, targets)
    case.model(changed, targets)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


@pytest.mark.parametrize(
    ("name", "kind", "blocks", "convolutions"),
    [("resnet20", Basic, 9, 19 + 2), ("resnet110", Basic, 54, 109 + 2), ("resnet200", Bottleneck, 66, 199 + 3)],
)
def test_resnet_has_this_many_blocks_and_convolutions(name, kind, blocks, convolutions, build):
    """With the head the depth is in the name; each change of width takes one more convolution, beside the block."""
    model = build(name).model
    assert (number(model, kind), number(model, nn.Conv2d), number(model, nn.Linear)) == (blocks, convolutions, 1)
    assert all(module.inplace for module in model.modules() if isinstance(module, nn.ReLU))


@pytest.mark.parametrize("name", ["resnet20", "resnet200", "unet"])
def test_batch_norm_updates_its_statistics(name, build):
    case = build(name)
    buffers = step(case.model, case.inputs, case.loss).buffers
    assert len(buffers) == 3 * number(case.model, nn.BatchNorm2d) > 0
    assert not any(torch.equal(buffer, buffers[key]) for key, buffer in case.model.named_buffers())


def test_unet_concatenates_what_it_had_on_its_way_down(build):
    model = build("unet").model
    assert (len(model.down), len(model.up), number(model, nn.ConvTranspose2d)) == (2, 2, 2)
    assert [merge[0].in_channels for merge in model.merge] == [2 * up.out_channels for up in model.up] == [16, 8]


def test_lstm_calls_its_cell_fifty_times(build):
    case, calls = build("lstm50"), []
    case.model.cell.register_forward_hook(lambda *_: calls.append(1))
    case.model(*case.inputs)
    assert len(calls) == 50


def test_mixture_of_experts_is_that_of_a_loop_over_tokens(build):
    """The twin: each token, best expert first, finds a place as long as its expert has room."""
    layer, rows = Experts(width=4, experts=3, chosen=2, room=2).double(), torch.randn(6, 4).double()
    shares = layer.router(rows).softmax(-1)
    weights, experts = shares.topk(2)
    expected, filled, late = torch.zeros_like(rows), [0, 0, 0], 0
    for row, (shared, among) in enumerate(zip(weights, experts.tolist())):
        for weight, expert in zip(shared, among):
            filled[expert] += 1
            late += filled[expert] > 2
            if filled[expert] <= 2:
                made = nn.functional.gelu(rows[row] @ layer.rise[expert]) @ layer.fall[expert]
                expected[row] = expected[row] + weight * made
    assert late
    torch.testing.assert_close(layer(rows)[0], expected)


def test_mixture_of_experts_has_the_same_shapes_for_all_inputs(build):
    case = build("moe")

    def shapes(inputs):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(found.append, lambda nothing: nothing):
            case.model(*inputs)
        return [(saved.shape, saved.dtype) for saved in found]

    assert shapes(case.make_inputs(0)) == shapes(case.make_inputs(1))


def test_nested_outputs_are_a_tuple_and_dicts_with_an_integer_a_view_and_one_unused(build):
    case = build("nested_outputs")
    outputs = case.model(*case.inputs)
    hidden, read = outputs
    assert set(read) == {"logits", "first", "best", "unused"}
    assert isinstance(hidden, Tensor)
    assert len(pytree.tree_leaves(outputs)) == 6
    assert read["best"]["class"].dtype == torch.int64
    assert read["first"].untyped_storage().data_ptr() == read["logits"].untyped_storage().data_ptr()
    (gradient,) = torch.autograd.grad(case.loss(outputs), read["unused"], allow_unused=True)
    assert gradient is None


def test_sparse_embedding_has_a_sparse_gradient_with_a_word_that_occurs_twice(build):
    gradient = gradients(build("sparse_embedding"))["0.weight"]
    assert gradient.is_sparse
    assert gradient._nnz() == 20 > gradient.coalesce()._nnz()


@pytest.mark.parametrize("name", ["gpt2_hf", "llama_hf"])
def test_models_of_the_transformers_library_use_the_fused_operator_and_no_cache(name, build):
    config = build(name).model.model.config
    assert config._attn_implementation == "sdpa"
    assert config.use_cache is False


@few(1)
@pytest.mark.parametrize(("name", "megabytes"), [("mlp24", 15.2), ("gpt6", 60.3), ("resnet20", 51.5)])
def test_peak_of_a_step_at_the_size_of_the_benchmarks(name, megabytes, build):
    case = build(name, **BENCHMARK[name])
    inputs = case.make_inputs(0)
    assert measured_peak(lambda: case.backward(*inputs)) / 1e6 == pytest.approx(megabytes, rel=0.05)
