"""Seconds and bytes of stages, from what was counted; and wrong calls."""
from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.costs.models import MODELS, ROWS, WIDTH, Mlp, vector
from tests.helpers import in_threads
from tests.slow import few
from torchckpt import ArgumentError, checkpoint
from torchckpt.costs import PipelineCosts, pipeline_costs
from torchckpt.costs.count import static_of
from torchckpt.planning import one_f_one_b
from torchckpt.planning.device import DEVICES, Device
from torchckpt.planning.plan import plan_pipeline
from torchckpt.planning.rates import RATES, Machine, Product
from torchckpt.regions.private import compiler_stance
from torchckpt.tensors import tensors_in

SLOW = Device("slow", {"float32": 2.0, "tf32": 8.0, "bfloat16": 4.0}, float("inf"), 10.0, 1e9, "made up")
"""Where only arithmetic takes time."""
NARROW = Device("narrow", {"float32": float("inf")}, 1.0, 10.0, 1e9, "made up")
"""Where only memory does."""


def linears():
    stages = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(2)]
    return stages, vector()


def test_seconds_are_flops_over_the_share_of_the_peak_that_is_reached():
    product = 2 * ROWS * WIDTH * WIDTH
    first, second = pipeline_costs(linears, SLOW, efficiency=0.5).stages
    for block in (*second.blocks, first.blocks[1]):
        assert (block.forward_seconds, block.input_grad_seconds, block.weight_grad_seconds) == (product,) * 3
    assert first.blocks[0].input_grad_seconds == 0.0  # what the first stage is given needs no gradient
    assert first.blocks[0].weight_grad_seconds == product


def test_the_gradient_of_a_weight_that_a_region_is_given_is_no_input_gradient():
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(torch.matmul, x, self.weight)

    first, second = pipeline_costs(lambda: ([Given(), Given()], vector()), SLOW, efficiency=1.0).stages
    product = 2 * ROWS * WIDTH * WIDTH / 2
    assert (first.blocks[0].input_grad_seconds, first.blocks[0].weight_grad_seconds) == (0.0, product)
    assert (second.blocks[0].input_grad_seconds, second.blocks[0].weight_grad_seconds) == (product, product)


def test_seconds_are_bytes_where_memory_is_slower():
    block = pipeline_costs(linears, NARROW).stages[1].blocks[0]
    vectors, weight = 2 * 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH  # in and out; the weight is read or its gradient written
    assert (block.forward_seconds, block.input_grad_seconds) == (vectors + weight, vectors + weight)


def test_moved_bytes_are_counted():
    part, size = pipeline_costs(linears, NARROW).counted[1].blocks[0], 4 * (2 * ROWS * WIDTH + WIDTH * WIDTH)
    assert (part.forward_moved_bytes, part.backward_moved_bytes, part.replay_moved_bytes) == (size, 2 * size, 0)


def test_a_known_device_has_the_seconds_of_each_kind_of_operation():
    def build():
        return [nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))], torch.empty(8192, 4096)

    rates, work = RATES["a100"], Product(8192, 4096, 4096)
    block = pipeline_costs(build, "a100", dtype="bf16").stages[0].blocks[1]
    machine = Machine(DEVICES["a100"], rates)
    assert block.forward_seconds == machine.beside_host(machine.product(work), 1)
    assert block.forward_seconds == pytest.approx(work.flops / 312e12 / rates.product, rel=0.2)
    small = pipeline_costs(linears, "a100").stages[0].blocks[1]
    assert small.forward_seconds == pytest.approx(rates.host_seconds, rel=0.05)


@pytest.mark.parametrize(("dtype", "peak"), [(None, 2.0), ("fp32", 2.0), ("tf32", 8.0), ("bf16", 4.0)])
def test_the_peak_is_that_of_the_type_that_is_multiplied(dtype, peak):
    block = pipeline_costs(linears, SLOW, dtype=dtype, efficiency=1.0).stages[1].blocks[0]
    assert block.forward_seconds == 2 * ROWS * WIDTH * WIDTH / peak
    assert torch.get_default_dtype() == torch.float32


def test_a_replay_ends_with_the_last_tensor_that_is_saved():
    def build():
        return [nn.Sequential(Mlp(0.0), Mlp(0.1))], vector()

    without, dropped = pipeline_costs(build, SLOW, efficiency=1.0).stages[0].blocks
    assert without.forward_seconds == 2 * without.recompute_seconds  # of two equal products, the first
    assert dropped.forward_seconds == dropped.recompute_seconds  # the mask is saved after both


def test_what_is_no_block_stands_before_and_after():
    def build():
        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Mlp() for _ in range(3))
                self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return self.head(x)

        first = nn.Sequential(nn.Embedding(10, WIDTH), Mlp(), Mlp())
        return [first, Last()], torch.randint(10, (ROWS,)), lambda y: y.square().sum()

    first, last = pipeline_costs(build, SLOW, efficiency=1.0).stages
    assert (len(first.blocks), len(last.blocks)) == (2, 3)
    assert first.before.saved_bytes == 8 * ROWS  # the tokens
    assert first.before.static_bytes == 16 * 10 * WIDTH
    assert first.after.saved_bytes == last.before.saved_bytes == 0
    assert last.after.forward_seconds == 2 * ROWS * WIDTH * 2 * WIDTH / 2
    assert last.after.saved_bytes == 4 * (ROWS * WIDTH + ROWS * 2 * WIDTH)  # what the head and the square save
    assert last.after.static_bytes == 16 * 2 * WIDTH * WIDTH
    assert (first.message_bytes, last.message_bytes) == (0.0, 4 * ROWS * WIDTH)


def test_a_block_is_free_where_nothing_of_it_has_a_backward():
    first, second = pipeline_costs(MODELS["frozen"], "h100").stages
    assert (len(first.blocks), len(second.blocks)) == (2, 4)
    assert first.before.forward_seconds > 0
    assert first.before.saved_bytes == 0


def test_a_block_that_changes_its_input_in_place_cannot_run_again():
    def build():
        class Changing(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.relu_())

        return [nn.Sequential(Mlp(), Changing(), Mlp(), Changing())], vector()

    (stage,) = pipeline_costs(build, "h100").stages
    assert len(stage.blocks) == 2
    assert stage.after.saved_bytes > stage.blocks[0].saved_bytes


class Gives(nn.Module):
    """Returns its output in a container, and takes one."""

    def __init__(self, give) -> None:
        super().__init__()
        self.blocks, self.give = nn.Sequential(Mlp(), Mlp()), give

    def forward(self, x) -> object:
        while not isinstance(x, Tensor):
            (x,) = x.values() if isinstance(x, dict) else x
        return self.give(self.blocks(x))


@few(1)
@pytest.mark.parametrize("give", [lambda x: {"x": x}, lambda x: ([x],), lambda x: [{"x": (x,)}]])
def test_a_container_ends_a_stage_as_a_tensor_does(give):
    def build(give):
        return lambda: ([Gives(give), Gives(give)], vector(), lambda y: tensors_in(y)[0].sum())

    assert pipeline_costs(build(give), "h100").counted == pipeline_costs(build(lambda x: x), "h100").counted


def test_a_stage_whose_tensors_are_not_seen_is_refused():
    @dataclass
    class Output:
        x: Tensor

    said = r"a stage returns no tensor that is seen\n  received: stage 0 returns Output\n  works:    a stage that"
    with pytest.raises(ArgumentError, match=said):
        pipeline_costs(lambda: ([Gives(Output), Mlp()], vector()), "h100")


@few(1)
@pytest.mark.parametrize("profile", [False, True])
def test_threads_count_one_after_the_other(profile):
    """Or one puts back what another has set, and code that is compiled runs in eager mode from then on."""
    importlib.import_module("torch._dynamo")

    def of_process():
        return torch.get_default_dtype(), torch.backends.mkldnn.enabled, compiler_stance()

    before, switches_every = of_process(), sys.getswitchinterval()
    results: dict[int, PipelineCosts] = {}

    def work(number):
        dtype = ("fp32", "fp64")[number % 2]
        results[number] = pipeline_costs(linears, "h100", dtype=dtype, profile=profile)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switches_every)
    assert of_process() == before
    alone = [pipeline_costs(linears, "h100", dtype=dtype).stages[0].saved_bytes for dtype in ("fp32", "fp64")]
    assert [results[number].stages[0].saved_bytes for number in range(8)] == alone * 4


def test_a_replay_in_another_thread_waits_for_the_count_and_leaves_what_was_there():
    """It needs the default dtype of its forward, which is of the process."""
    loss = checkpoint(lambda x: (x.sin() * torch.ones(4)).exp(), torch.ones(4, requires_grad=True)).sum()
    counts, has_run = threading.Event(), threading.Event()

    def build():
        counts.set()
        has_run.wait(0.3)
        return linears()

    def replay():
        counts.wait(30)
        loss.backward()
        has_run.set()

    _, costs = in_threads(replay, lambda: pipeline_costs(build, "h100", dtype="fp64"))
    assert costs.stages[0].saved_bytes == pipeline_costs(linears, "h100", dtype="fp64").stages[0].saved_bytes
    assert torch.get_default_dtype() == torch.float32


def test_an_lstm_has_its_flops():
    class Lstm(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    stages = [nn.Sequential(*(Lstm(WIDTH, WIDTH, batch_first=True) for _ in range(2)))]
    (stage,) = pipeline_costs(lambda: (stages, torch.randn(3, 5, WIDTH)), "h100").counted
    products = 2 * 4 * WIDTH * 2 * WIDTH * 3 * 5  # four gates, of inputs and states, for each row and step
    assert [block.forward_flops for block in stage.blocks] == [products] * 2


def test_static_bytes_are_adams_or_as_many_as_are_said():
    parameters = WIDTH * WIDTH
    for dtype, of_each, options in (
        ("fp32", 16, {}), ("bf16", 16, {}), ("fp64", 32, {}),
        ("fp32", 8, {"optimizer_bytes": 0}), ("bf16", 4.5, {"optimizer_bytes": 0.5})
    ):  # fmt: skip
        block = pipeline_costs(linears, "h100", dtype=dtype, **options).stages[0].blocks[0]
        assert block.static_bytes == of_each * parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_the_state_is_that_of_torchs_adam(dtype):
    model = nn.Linear(6, 5, dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 6, dtype=dtype)).abs().sum().backward()
    optimizer.step()
    moments = [state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(static.optimizer for static in static_of(model).values()) == sum(moments)


def test_parameters_and_buffers_are_counted_once_where_they_are_first_used():
    tied, _ = pipeline_costs(MODELS["tied"], "h100", dtype="fp32", optimizer_bytes=0).stages
    once = sum(tensor.numel() for tensor in Mlp().parameters())
    assert [block.static_bytes for block in tied.blocks] == [8 * once, 8 * once, 0]
    frozen, _ = pipeline_costs(MODELS["frozen"], "h100", dtype="fp32", optimizer_bytes=0).stages
    assert frozen.before.static_bytes == 2 * 4 * once
    norms, _ = pipeline_costs(MODELS["norms"], "h100", dtype="fp32", optimizer_bytes=0).stages
    assert norms.static_bytes == 3 * (8 * (4 * 4 * 9 + 8) + 4 * 8 + 8)  # weights and gradients; two statistics, a count


def test_a_model_of_any_size_takes_no_memory_and_draws_no_numbers():
    def build():
        return [nn.Sequential(*(nn.Linear(1 << 20, 1 << 20) for _ in range(4)))], torch.randn(64, 1 << 20)

    before = torch.get_rng_state()
    (stage,) = pipeline_costs(build, "h100").stages
    assert stage.static_bytes == 16 * 4 * ((1 << 40) + (1 << 20))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_a_model_may_be_converted_when_it_is_made():
    def build():
        stages, example, _ = MODELS["llama"]()
        return [stage.double().to(torch.float16).bfloat16().to("cpu").requires_grad_() for stage in stages], example

    assert pipeline_costs(build, "h100").stages == pipeline_costs(
        lambda: MODELS["llama"]()[:2], "h100", dtype="bf16"
    ).stages


def test_a_model_on_the_meta_device_is_counted_like_any():
    def build():
        with torch.device("meta"):
            return MODELS["llama with dropout"]()[:2]

    def plain():
        return MODELS["llama with dropout"]()[:2]

    assert pipeline_costs(build, "h100").stages == pipeline_costs(plain, "h100").stages


def test_stages_that_exist_already_are_left_as_they_are():
    stages, example, _ = MODELS["llama"]()
    state = [{name: tensor.clone() for name, tensor in stage.state_dict().items()} for stage in stages]
    again = pipeline_costs(lambda: (stages, example), "h100").stages
    assert again == pipeline_costs(lambda: MODELS["llama"]()[:2], "h100").stages
    for stage, before in zip(stages, state):
        assert all(torch.equal(tensor, before[name]) for name, tensor in stage.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in stage.modules())
        assert all(tensor.grad is None for tensor in stage.parameters())


def test_compiled_blocks_are_counted_as_they_are_uncompiled():
    def build():
        stages, example = MODELS["mlp"]()
        for stage in stages:
            for block in stage:
                block.compile(backend="eager")
        return stages, example

    assert pipeline_costs(build, "h100").stages == pipeline_costs(MODELS["mlp"], "h100").stages


def test_costs_are_what_a_plan_takes_and_a_table():
    costs = pipeline_costs(MODELS["llama"], "a100")
    plan = plan_pipeline(one_f_one_b(2, 4), costs.stages, "60%", costs.link)
    assert plan.bound_seconds <= plan.step_seconds
    assert costs.link.bandwidth == DEVICES["a100"].link_bytes_per_second
    assert pipeline_costs(MODELS["llama"], "a100", link_bytes_per_second=5e9).link.bandwidth == 5e9
    lines = str(costs).split("\n")
    assert lines[0] == "a100: by kind and size of operation, link 300 GB/s; of one micro-batch:"
    assert [line.split()[:2] for line in lines[2:5]] == [["stage", "blocks"], ["0", "2"], ["1", "2"]]
    assert lines[5:] == ["", "optimizer: Adam's state"]
    sharded = pipeline_costs(MODELS["llama"], "a100", optimizer_bytes=12 / 64)
    assert str(sharded).endswith("optimizer: 0.1875 bytes of state a parameter")
    share = str(pipeline_costs(MODELS["llama"], "a100", efficiency=0.4)).split("\n")[0]
    assert share == "a100: 40% of its peak, link 300 GB/s; of one micro-batch:"


BAD = [
    ({"device": "tpu"}, "the device is not one of a100, h100, h200, b200, mi300x, or a Device"),
    ({"efficiency": 0}, "efficiency is not a share of the peak, above 0 and at most 1"),
    ({"efficiency": 1.5}, "received: efficiency=1.5"),
    ({"efficiency": float("nan")}, "efficiency is not a share"),
    ({"dtype": "int4"}, "dtype is not one of bf16, fp16, fp32, tf32, fp64\n  received: dtype='int4'"),
    ({"dtype": torch.bfloat16}, "dtype is not one of"),
    ({"optimizer_bytes": -1}, "optimizer_bytes is not a number of bytes, 0 or more"),
    ({"link_bytes_per_second": 0}, "link_bytes_per_second is not a number above 0"),
    ({"kernels": "gpu"}, "kernels is not accelerator or cpu\n  received: kernels='gpu'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_wrong_argument(arguments, message):
    with pytest.raises(ArgumentError) as error:
        pipeline_costs(linears, **{"device": "h100", **arguments})
    assert message in str(error.value)


def test_all_wrong_arguments_are_listed():
    with pytest.raises(ArgumentError, match="2 faults"):
        pipeline_costs(linears, "h100", efficiency=2, dtype="int4")
