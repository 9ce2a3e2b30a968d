"""Deferred batch norm: running statistics of the mini-batch, and nothing else than a BatchNorm."""
from __future__ import annotations

import copy
import doctest
import pickle
import threading
import weakref
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import torchckpt
from tests.helpers import in_thread, in_threads, saved_and_loaded
from tests.settings import without_collector
from tests.slow import few
from torchckpt.errors import ArgumentError
from torchckpt.pipe import DeferredBatchNorm, batchnorm

mini_batch = DeferredBatchNorm.mini_batch


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def unchanged(module: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def by_parts(module: Any, batch: Tensor, parts: int = 3) -> Tensor:
    """A mini-batch of so many micro-batches."""
    with mini_batch(module):
        return torch.cat([module(part) for part in batch.tensor_split(parts)])


def assert_statistics_of(plain: nn.Module, module: nn.Module, tolerance: float = 1e-6) -> None:
    """Those of ``module`` are those of ``plain``, which had whole mini-batches, in float64."""
    expected = dict(plain.named_buffers())
    assert list(dict(module.named_buffers())) == list(expected)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(buffer.double(), expected[name].double(), rtol=tolerance, atol=1e-7)


def twins(layer: nn.Module, device: Any = "cpu") -> tuple[Any, Any]:
    """``layer``, converted, and a plain one in float64 that is given whole mini-batches."""
    plain = copy.deepcopy(layer).to(device).double()
    return DeferredBatchNorm.convert(layer.to(device)), plain


def assert_deferred(layer: Any, plain: Any, run: Any = by_parts) -> None:
    """The statistics of ``layer``, a mini-batch of which is run by ``run``, are those of ``plain``, given the whole."""
    batch = torch.randn(12, 3)
    run(layer, batch)
    plain(batch.double())
    assert_statistics_of(plain, layer)


# the numbers ----------------------------------------------------------------------------------------------------------

LAYERS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (11, 3)),
    "BatchNorm1d of sequences": (lambda: nn.BatchNorm1d(3), (11, 3, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (11, 3, 4, 4)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (11, 3, 2, 3, 2)),
    "cumulative average": (lambda: nn.BatchNorm1d(3, momentum=None), (11, 3)),
    "momentum of 1": (lambda: nn.BatchNorm1d(3, momentum=1.0), (11, 3)),
    "momentum of 0": (lambda: nn.BatchNorm1d(3, momentum=0.0), (11, 3)),
    "without weights": (lambda: nn.BatchNorm1d(3, affine=False), (11, 3)),
    "frozen weights": (lambda: nn.BatchNorm1d(3).requires_grad_(False), (11, 3)),
}


@few(9)
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])  # of 11 rows: 11; 6, 5; 4, 4, 3; 3, 2, 2, 2, 2
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_running_statistics_are_those_of_the_mini_batch(
    device: torch.device, make: Any, shape: tuple[int, ...], parts: int, offset: float
) -> None:
    layer, plain = twins(make(), device)
    for number in range(3):
        batch = torch.randn(shape, device=device) * (number + 1) + offset
        by_parts(layer, batch, parts)
        plain(batch.double())
        assert_statistics_of(plain, layer)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_a_plain_layer_in_float32_agrees(offset: float) -> None:
    layer, plain = DeferredBatchNorm.convert(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    batch = torch.randn(64, 3) + offset
    by_parts(layer, batch, 7)
    plain(batch)
    assert_statistics_of(plain, layer)


def test_a_plain_layer_by_parts_does_not() -> None:
    plain, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    batch = torch.randn(12, 3)
    by_parts(plain, batch)
    whole(batch)
    assert plain.num_batches_tracked == 3
    assert not torch.allclose(plain.running_var, whole.running_var)


def test_each_micro_batch_is_normalised_by_its_own_statistics_to_the_bit(device: torch.device) -> None:
    plain = nn.BatchNorm1d(3, device=device)
    layer = DeferredBatchNorm.convert(copy.deepcopy(plain))
    batch = torch.randn(12, 3, device=device, requires_grad=True)
    ours = by_parts(layer, batch)
    expected = torch.cat([plain(part) for part in batch.tensor_split(3)])
    assert torch.equal(ours, expected)
    grads = torch.autograd.grad(ours.sin().sum(), [batch, *layer.parameters()])
    assert all(map(torch.equal, grads, torch.autograd.grad(expected.sin().sum(), [batch, *plain.parameters()])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_layers_of_other_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    layer, plain = twins(nn.BatchNorm1d(3), device)
    layer.to(dtype)
    batch = (torch.randn(512, 3, device=device) + 5).to(dtype)
    by_parts(layer, batch)
    plain(batch.double())
    assert layer.running_var.dtype == dtype
    assert_statistics_of(plain, layer, 1e-12 if dtype is torch.float64 else torch.finfo(dtype).eps)


def test_under_autocast_values_are_tracked_in_float32(device: torch.device) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(device)
    layer, plain = DeferredBatchNorm.convert(module), copy.deepcopy(module[1]).double()
    batch = torch.randn(12, 4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        by_parts(layer, batch)
        hidden = module[0](batch)
    assert hidden.dtype == torch.bfloat16
    plain(hidden.double())
    assert_statistics_of(plain, module[1])


def test_a_layer_that_is_called_twice_for_a_micro_batch_counts_both_and_updates_once() -> None:
    layer, plain = twins(nn.BatchNorm1d(3))
    batch = torch.randn(12, 3)
    with mini_batch(layer):
        for part in batch.tensor_split(3):
            layer(part)
            layer(part * 2 + 1)
    plain(torch.cat([batch, batch * 2 + 1]).double())
    assert_statistics_of(plain, layer)


# when it does not track -----------------------------------------------------------------------------------------------


def test_in_eval_mode_nothing_is_tracked_and_the_running_statistics_are_used() -> None:
    layer, plain = twins(nn.BatchNorm1d(3))
    layer.eval()
    plain.eval().float()
    batch, before = torch.randn(12, 3), buffers(layer)
    assert torch.equal(by_parts(layer, batch), plain(batch))
    assert unchanged(layer, before)


def test_a_layer_that_is_frozen_in_a_model_that_trains_keeps_its_statistics() -> None:
    module = DeferredBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    module[0].eval()
    before = buffers(module[0])
    by_parts(module, torch.randn(12, 3))
    assert unchanged(module[0], before)
    assert module[1].num_batches_tracked == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_statistics_are_tracked_as_pytorch_does(mode: Any) -> None:
    def run(layer: nn.Module, batch: Tensor) -> None:
        with mini_batch(layer), mode():
            for part in batch.tensor_split(3):
                layer(part)

    layer, plain = twins(nn.BatchNorm1d(3))
    assert_deferred(layer, plain, run)
    layer(torch.randn(12, 3)).sum().backward()


def test_outside_a_mini_batch_it_is_a_batch_norm() -> None:
    plain = nn.BatchNorm1d(3)
    layer = DeferredBatchNorm.convert(copy.deepcopy(plain))
    for batch in torch.randn(3, 6, 3):
        assert torch.equal(layer(batch), plain(batch))
    assert unchanged(layer, buffers(plain))


def test_a_layer_that_is_not_called_is_not_updated() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    with mini_batch(layer):
        pass
    assert layer.num_batches_tracked == 0


def test_a_layer_that_lost_its_statistics_tracks_nothing() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    by_parts(layer, torch.randn(12, 3))
    assert layer.state_dict().keys() == {"weight", "bias"}


def test_without_a_count_of_batches_momentum_still_works() -> None:
    layer, plain = twins(nn.BatchNorm1d(3))
    for module in (layer, plain):
        module.num_batches_tracked = None
    batch = torch.randn(12, 3)
    by_parts(layer, batch)
    plain(batch.double())
    layer.momentum = plain.momentum = None  # then PyTorch keeps what is there
    by_parts(layer, batch + 1)
    plain(batch.double() + 1)
    assert_statistics_of(plain, layer)


# the mini-batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_middle_commits_nothing_and_the_next_mini_batch_starts_anew(error: Any) -> None:
    layer, plain = twins(nn.BatchNorm1d(3))
    before = buffers(layer)

    def fails() -> None:
        layer(torch.randn(4, 3) + 100)
        raise error

    with pytest.raises(error), mini_batch(layer):
        fails()
    assert unchanged(layer, before)
    assert_deferred(layer, plain)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 5, 6])  # of six buffers
def test_an_update_that_fails_is_undone_on_all_layers(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    model = DeferredBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    batch, before, copies, plain = torch.randn(12, 3), buffers(model), [0], Tensor.copy_
    whole = copy.deepcopy(model)
    by_parts(whole, batch)

    def copies_or_fails(target: Tensor, source: Tensor) -> Tensor:
        copies[0] += 1
        if copies[0] == fails_at:
            raise KeyboardInterrupt
        return plain(target, source)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "copy_", copies_or_fails)
        with pytest.raises(KeyboardInterrupt):
            by_parts(model, batch)
    assert unchanged(model, before)
    by_parts(model, batch)
    assert unchanged(model, dict(whole.named_buffers()))


def test_a_micro_batch_that_the_layer_refuses_leaves_its_own_buffers() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    buffers_before, before = dict(layer.named_buffers()), buffers(layer)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        by_parts(layer, torch.randn(5, 3))  # the last of the micro-batches has one row
    assert all(buffer is buffers_before[name] for name, buffer in layer.named_buffers())
    assert unchanged(layer, before)


def test_buffers_are_kept_until_the_end() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    before = buffers(layer)
    with mini_batch(layer):
        layer(torch.randn(4, 3))
        assert unchanged(layer, before)
    assert not unchanged(layer, before)


def test_layers_run_in_other_threads_than_the_one_that_entered() -> None:
    def run(layer: nn.Module, batch: Tensor) -> None:
        with mini_batch(layer):
            for part in batch.tensor_split(3):
                in_thread(layer, part)

    assert_deferred(*twins(nn.BatchNorm1d(3)), run)


def test_a_nested_mini_batch_is_part_of_the_outer_one() -> None:
    def run(layer: nn.Module, batch: Tensor) -> None:
        with mini_batch(layer):
            for part in batch.tensor_split(2):
                by_parts(layer, part)
            assert layer.num_batches_tracked == 0

    assert_deferred(*twins(nn.BatchNorm1d(3)), run)


def test_if_one_of_several_that_overlap_fails_none_is_committed() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    before = buffers(layer)
    with mini_batch(layer):
        layer(torch.randn(4, 3))
        with suppress(ValueError), mini_batch(layer):
            raise ValueError
    assert unchanged(layer, before)


def test_two_threads_at_once_are_one_mini_batch() -> None:
    layer, plain = twins(nn.BatchNorm1d(3))
    batch, entered = torch.randn(400, 3), threading.Barrier(2)

    def run(half: Tensor) -> None:
        with mini_batch(layer):
            entered.wait(30)
            for part in half.split(4):
                layer(part)
            entered.wait(30)

    in_threads(*(lambda half=half: run(half) for half in batch.split(200)))
    plain(batch.double())
    assert_statistics_of(plain, layer)


def test_after_a_mini_batch_nothing_is_kept() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    by_parts(layer, torch.randn(12, 3))
    alive = weakref.ref(layer)
    with without_collector():
        del layer
        assert alive() is None
    assert not batchnorm._under_way


def test_a_commit_does_not_disturb_a_backward_that_is_still_to_come() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    loss = layer(torch.randn(4, 3, requires_grad=True)).sin().sum()
    by_parts(layer, torch.randn(12, 3))
    loss.backward()


# replays --------------------------------------------------------------------------------------------------------------


@few(4)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("rows", [5, 12])  # 5 rows make 2 micro-batches of the 2 rows that BatchNorm needs
def test_in_a_pipe_replays_do_not_count(device: torch.device, checkpoint: Any, rows: int) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3), nn.BatchNorm1d(3))

    batch, chunks = torch.randn(rows, 4, device=device), min(4, rows // 2)
    never, module = model().to(device), DeferredBatchNorm.convert(model().to(device))
    pipe = torchckpt.Pipe(module, [2, 3], chunks=chunks, checkpoint=checkpoint)
    with mini_batch(pipe):
        output = pipe(batch)
    after_forward = buffers(module)
    output.square().sum().backward()
    assert unchanged(module, after_forward)
    DeferredBatchNorm.convert(never)
    expected = by_parts(never, batch, chunks)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert unchanged(module, buffers(never))
    assert module[1].num_batches_tracked == 1
    for ours, plain in zip(module.parameters(), never.parameters()):
        torch.testing.assert_close(ours.grad, plain.grad)  # summed in another order


@pytest.mark.parametrize("determinism_check", ["default", "values"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_in_a_region_replays_do_not_count(call: Any, inside: bool, determinism_check: Any) -> None:
    layer, plain = twins(nn.BatchNorm1d(3))
    batch, options = torch.randn(12, 3, requires_grad=True), {}
    if call is torchckpt.checkpoint:
        options["determinism_check"] = determinism_check
    with mini_batch(layer):
        losses = [call(lambda x: layer(x.exp()).sin(), part, **options).sum() for part in batch.tensor_split(3)]
        if inside:
            sum(losses).backward()
    if not inside:
        sum(losses).backward()
    plain(batch.double().exp())
    assert_statistics_of(plain, layer)


@pytest.mark.parametrize("deferred_first", [True, False])
def test_a_layer_that_is_a_region_itself(deferred_first: bool) -> None:
    layer, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3).double()
    steps = [DeferredBatchNorm.convert, torchckpt.checkpoint_module]
    for step in steps if deferred_first else reversed(steps):
        step(layer)
    for module in (layer, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        batch = torch.randn(12, 3)
        with torchckpt.testing.count_recomputes() as counted:
            by_parts(module, batch).sin().sum().backward()
        assert counted.total == 3
        twin = copy.deepcopy(plain)
        twin(batch.double())
        assert_statistics_of(twin, module)
        assert module.num_batches_tracked == 1
        layer.reset_running_stats()


@few(1)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize("region", [True, False])
def test_a_layer_in_a_compiled_block_is_deferred_too(region: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())
    DeferredBatchNorm.convert(module)
    plain = copy.deepcopy(module).double()
    DeferredBatchNorm.revert(plain)
    compiled: Any = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        batch = torch.randn(12, 4)
        with mini_batch(module):
            parts = [torchckpt.checkpoint(compiled, x) if region else compiled(x) for x in batch.tensor_split(3)]
        torch.cat(parts).sum().backward()
        plain(batch.double())
        assert module[1].num_batches_tracked == plain[1].num_batches_tracked
        torch.testing.assert_close(module[1].running_var.double(), plain[1].running_var)


# subclasses -----------------------------------------------------------------------------------------------------------


class Before(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.exp())


class Own(nn.BatchNorm1d):
    """With a forward of its own, and state."""

    def __init__(self, features: int, *, function: Any = F.batch_norm) -> None:
        super().__init__(features)
        self.function, self.calls = function, 0

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        self.calls += 1
        self.num_batches_tracked = self.num_batches_tracked + 1
        arguments: Any = {"weight": self.weight, "bias": self.bias, "running_mean": self.running_mean}
        arguments |= {"running_var": self.running_var, "training": self.training, "momentum": 0.1, "eps": 1e-5}
        if self.function is torch.batch_norm:
            arguments["cudnn_enabled"] = True
        return self.function(input=x * scale, **arguments).relu()


class Frozen(nn.BatchNorm1d):
    """Uses its running statistics in training mode too."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)


class Around(nn.BatchNorm1d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.inner = nn.BatchNorm1d(features)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.inner(input).exp())


def test_what_a_subclass_normalises_counts_and_not_what_it_is_given() -> None:
    assert_deferred(*twins(Before(3)))


@pytest.mark.parametrize("function", [F.batch_norm, torch.batch_norm])
def test_a_subclass_with_a_forward_of_its_own(function: Any) -> None:
    layer, plain = twins(Own(3, function=function))
    batch = torch.randn(12, 3)
    with mini_batch(layer):
        for part in batch.tensor_split(3):
            layer(x=part, scale=2.0)
    plain(batch.double(), scale=2.0)
    assert layer.calls == 3
    assert_statistics_of(plain, layer)


def test_a_subclass_that_does_not_update_is_not_updated() -> None:
    layer = DeferredBatchNorm.convert(Frozen(3))
    before = buffers(layer)
    by_parts(layer, torch.randn(12, 3))
    assert unchanged(layer, before)


def test_a_layer_inside_a_layer_counts_by_itself() -> None:
    layer, batch = DeferredBatchNorm.convert(Around(3)), torch.randn(12, 3)
    plain, inner = nn.BatchNorm1d(3).double(), copy.deepcopy(layer.inner).double()
    DeferredBatchNorm.revert(inner)
    plain(torch.cat([inner(part) for part in batch.double().tensor_split(3)]).exp())
    inner.reset_running_stats()
    inner(batch.double())
    by_parts(layer, batch)
    assert_statistics_of(inner, layer.inner)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(getattr(layer, name).double(), buffer.double())


# nothing else changes -------------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)))


def test_convert_is_in_place_and_revert_is_its_inverse() -> None:
    module = model()
    plain, before = copy.deepcopy(module), [dict(vars(layer)) for layer in module.modules()]
    tensors, layers = dict(module.state_dict(keep_vars=True)), list(module.modules())
    assert DeferredBatchNorm.convert(module) is module
    assert [isinstance(layer, DeferredBatchNorm) for layer in module.modules()] == [False, True, False, False, True]
    assert list(module.modules()) == layers
    assert list(module.state_dict()) == list(plain.state_dict())
    assert all(tensor is tensors[name] for name, tensor in module.state_dict(keep_vars=True).items())
    assert all(isinstance(layer, nn.BatchNorm1d) for layer in (module[0], module[1][1]))
    assert repr(module) == repr(plain)
    assert DeferredBatchNorm.revert(module) is module
    assert [type(layer) for layer in module.modules()] == [type(layer) for layer in plain.modules()]
    assert [dict(vars(layer)) for layer in module.modules()] == before


def test_converting_and_reverting_twice_is_harmless() -> None:
    module = DeferredBatchNorm.convert(model())
    classes = [type(layer) for layer in module.modules()]
    assert [type(layer) for layer in DeferredBatchNorm.convert(module).modules()] == classes
    for _ in range(2):
        DeferredBatchNorm.revert(module)
        assert type(module[0]) is nn.BatchNorm1d


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.SyncBatchNorm(3),
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        lambda: nn.LayerNorm(3),
        lambda: nn.GroupNorm(1, 3),
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        lambda: nn.LazyInstanceNorm1d(),
        lambda: nn.LazyBatchNorm1d(track_running_stats=False),
    ],
)
def test_other_layers_are_left_alone(make: Any) -> None:
    layer = make()
    cls, before = type(layer), dict(vars(layer))
    DeferredBatchNorm.convert(nn.Sequential(layer))
    assert type(layer) is cls
    assert vars(layer) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded])
def test_a_copy_is_converted_and_takes_along_nothing_that_was_tracked(copied: Any) -> None:
    module = DeferredBatchNorm.convert(model())
    with mini_batch(module):
        module(torch.randn(4, 3) + 50)
        other = copied(module)
    assert [type(layer) for layer in other.modules()] == [type(layer) for layer in module.modules()]
    assert unchanged(other, buffers(model()))
    batch, plain = torch.randn(12, 3), copy.deepcopy(other[0]).double()
    by_parts(other, batch)
    DeferredBatchNorm.revert(plain)(batch.double())
    assert_statistics_of(plain, other[0])


def test_a_layer_that_was_parametrized_since_can_be_reverted() -> None:
    layer = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    by_parts(layer, torch.randn(12, 3))
    assert layer.num_batches_tracked == 1
    DeferredBatchNorm.revert(layer)
    by_parts(layer, torch.randn(12, 3))
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("handle_first", [True, False])
def test_the_order_in_which_mixins_are_taken_away_is_free(handle_first: bool) -> None:
    layer = nn.BatchNorm1d(3)
    handle = torchckpt.checkpoint_module(layer)
    DeferredBatchNorm.convert(layer)
    for step in [handle.remove, lambda: DeferredBatchNorm.revert(layer)][:: 1 if handle_first else -1]:
        step()
    assert type(layer) is nn.BatchNorm1d
    assert vars(layer).keys() == vars(nn.BatchNorm1d(3)).keys()


def test_example() -> None:
    results = doctest.testmod(batchnorm, extraglobs={"torch": torch})
    assert results.attempted
    assert not results.failed


# wrong calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["convert", "revert", "mini_batch"])
def test_what_is_no_module_is_an_error(name: str) -> None:
    text = f"DeferredBatchNorm.{name}: the module is not an nn.Module\n  received: list\n"
    with pytest.raises(ArgumentError) as raised, ExitStack() as stack:
        stack.enter_context(getattr(DeferredBatchNorm, name)([nn.BatchNorm1d(3)]))
    assert text + "  works:    DeferredBatchNorm.convert(model)" in str(raised.value)


def test_lazy_layers_and_forwards_of_instances_are_errors_that_name_them_and_nothing_is_converted() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d(), nn.BatchNorm1d(3))
    module[2].forward = lambda x: x
    with pytest.raises(ArgumentError) as raised:
        DeferredBatchNorm.convert(module)
    assert str(raised.value) == (
        "DeferredBatchNorm.convert: 2 faults\n"
        "a lazy BatchNorm has no parameters yet, and its first call changes its class\n"
        "  received: LazyBatchNorm1d '1'\n"
        "  works:    model(example) first, then DeferredBatchNorm.convert(model)\n"
        "the forward is not a method of the layer's class\n"
        "  received: BatchNorm1d '2', whose forward is set on the instance\n"
        "  works:    a subclass of BatchNorm with that forward"
    )
    assert type(module[0]) is nn.BatchNorm1d


def test_a_lazy_layer_that_has_its_parameters_is_converted() -> None:
    layer = nn.LazyBatchNorm1d()
    layer(torch.randn(4, 3))
    layer.reset_running_stats()
    assert_deferred(*twins(layer))
