"""offload, offload_module and offload_layers as they are called: modules, handles, copies, and every fault."""
from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import torchckpt
from tests.helpers import leaf, saved_and_loaded
from tests.regions.modules import Block, Model, step
from tests.regions.moved.calls import let_cpu_move
from tests.regions.wrap.test_layers import ALL, Both
from torchckpt import checkpoint_layers, checkpoint_module, offload, offload_layers, offload_module
from torchckpt.errors import ArgumentError
from torchckpt.regions.moved import region as regions
from torchckpt.regions.moved.region import Moved


@pytest.fixture(autouse=True)
def moved(monkeypatch):
    """The regions that move, of which the CPU's do, too."""
    let_cpu_move(monkeypatch)
    made, init = [], Moved.__init__

    def noted(self, least_bytes):
        made.append(least_bytes)
        init(self, least_bytes)

    monkeypatch.setattr(Moved, "__init__", noted)
    return made


@pytest.fixture
def model():
    return Model()


def offloaded(module, min_bytes=1):
    offload_module(module, min_bytes=min_bytes)
    return module


# a module -------------------------------------------------------------------------------------------------------------


def test_each_call_of_the_module_moves(model, moved):
    (expected, none), keys, text = step(copy.deepcopy(model)), list(model.state_dict()), repr(model)
    handle = offload_module(model, min_bytes=1)
    received, recomputes = step(model)
    assert all(map(torch.equal, received, expected))
    assert (none, recomputes, moved) == (0, 0, [1])
    assert (list(model.state_dict()), repr(model), type(model).__name__) == (keys, text, "Model")
    assert isinstance(model, Model)
    assert type(handle).__name__ == "RegionHandle"


def test_by_default_storages_from_a_mebibyte_on_move(model, moved):
    offload_module(model)
    step(model)
    offload(nn.Linear(4, 4), leaf(2, 4))
    assert moved == [2**20] * 2


def test_remove_makes_the_module_plain_again(model, moved):
    handle = offload_module(model)
    handle.remove()
    handle.remove()
    step(model)
    assert (type(model), moved) == (Model, [])
    assert "_torchckpt_options" not in vars(model)
    with offload_module(model):
        step(model)
    step(model)
    assert len(moved) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded])
def test_a_copy_moves_too_with_its_own_weights(copied, moved):
    block = offloaded(Block(), min_bytes=3)
    other = copied(block)
    assert type(other) is type(block)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(other.parameters(), block.parameters()))
    expected = step(block)[0]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(7)
    assert all(map(torch.equal, step(other)[0], expected))
    assert moved == [3, 3]


def test_a_state_goes_from_one_to_the_other(model):
    other = offloaded(Model())
    other.load_state_dict(model.state_dict())
    assert all(map(torch.equal, step(other)[0], step(model)[0]))


def test_hooks_are_outside_and_those_of_children_inside(model, moved):
    seen = []
    offload_module(model)
    model.register_forward_hook(lambda *_: seen.append("outside"))
    model.head.register_forward_hook(lambda *_: seen.append("inside"))
    step(model)
    assert seen == ["inside", "outside"]


def test_one_module_is_a_region_of_one_kind(model):
    offload_module(model)
    with pytest.raises(ArgumentError) as caught:
        checkpoint_module(model)
    assert str(caught.value) == (
        "checkpoint_module: the module is offloaded already\n"
        "  received: Model, offloaded already\n"
        "  works:    handle.remove() first; where it is a copy, before it is copied"
    )
    other = Model()
    checkpoint_module(other)
    with pytest.raises(ArgumentError, match="offload_module: the module is checkpointed already"):
        offload_module(other)


def test_layers_of_an_offloaded_model_may_be_checkpointed(model):
    expected, _ = step(copy.deepcopy(model))
    offload_module(model, min_bytes=1)
    checkpoint_layers(model, "layers.*")
    received, recomputes = step(model)
    assert all(map(torch.equal, received, expected))
    assert recomputes == 2


# layers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "every", "names"), [
    (Block, 1, ALL),
    (Block, 2, ALL[::2]),
    ("left.layers.*", 1, ALL[:3]),
    (["head", "right.layers.[02]"], 1, ["right.layers.0", "right.layers.2", "head"]),
    (lambda module: isinstance(module, nn.Tanh), 1, ["head.1"]),
])
def test_layers_are_chosen_as_by_checkpoint_layers(moved, chosen, every, names):
    model, twin = Both(), Both()
    handle = offload_layers(model, chosen, every=every, min_bytes=2)
    assert handle.names == checkpoint_layers(twin, chosen, every=every).names == tuple(names)
    step(model)
    assert len(moved) == len(names) + ("left.layers.1" in names)  # which stands in two places
    assert set(moved) == {2}


def test_the_handle_says_which_and_undoes_them_all(moved):
    model = Both()
    handle = offload_layers(model, ["left.layers.*", "head"], every=2)
    assert repr(handle) == "<offload_layers: 2 modules: left.layers.0, left.layers.2>"
    assert str(handle) == "offload_layers: 2 modules\n  left.layers.0  Block\n  left.layers.2  Block"
    handle.remove()
    handle.remove()
    assert repr(handle) == "<offload_layers: 2 modules, removed: left.layers.0, left.layers.2>"
    with offload_layers(model, "head"):
        step(model)
    step(model)
    assert len(moved) == 1


def test_the_example_of_the_docstring():
    import doctest

    results = doctest.run_docstring_examples
    assert results is not None
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(offload_layers, globs={"torch": torch, "torchckpt": torchckpt}):
        runner.run(test)
    assert (runner.tries > 3, runner.failures) == (True, 0)


# nothing to move ------------------------------------------------------------------------------------------------------


def test_on_the_cpu_there_is_nothing_to_move_which_is_said_once(monkeypatch):
    monkeypatch.undo()  # the CPU is no device whose tensors move
    regions._say_that_nothing_moves.cache_clear()
    block = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            offload(block, leaf(2, 4)).sum().backward()
    assert [str(warning.message) for warning in said] == [
        "torchckpt.offload: there is nothing to move: all that the region saves is on the CPU, which is the host. Its "
        "calls are plain calls"
    ]


@pytest.mark.accelerator
def test_on_a_device_nothing_is_said_where_all_is_small(monkeypatch, accelerator):
    monkeypatch.undo()
    regions._say_that_nothing_moves.cache_clear()
    offload(nn.Linear(4, 4).to(accelerator), leaf(2, 4, device=accelerator)).sum().backward()


# faults ---------------------------------------------------------------------------------------------------------------


def error_of(call, *args, **options):
    with pytest.raises(ArgumentError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_a_result_in_place_of_a_function():
    assert error_of(offload, torch.ones(2, 3)) == (
        "offload: the function is not callable\n"
        "  received: a tensor of shape (2, 3)\n"
        "  works:    offload(block, x), not offload(block(x))"
    )


@pytest.mark.parametrize("min_bytes", [-1, 1.5, "1MiB", True, None])
def test_min_bytes_that_are_no_number_of_bytes(model, min_bytes):
    fault = (
        "min_bytes is not a whole number of bytes\n"
        f"  received: min_bytes={min_bytes!r} ({type(min_bytes).__name__})\n"
        "  works:    min_bytes=2**20"
    )
    assert error_of(offload, torch.exp, leaf(3), min_bytes=min_bytes) == f"offload: {fault}"
    assert error_of(offload_module, model, min_bytes=min_bytes) == f"offload_module: {fault}"
    assert error_of(offload_layers, model, "layers.*", min_bytes=min_bytes) == f"offload_layers: {fault}"
    assert type(model) is Model


def test_all_faults_of_a_call_are_told_at_once():
    assert error_of(offload_layers, nn.ReLU, [3], every=0, min_bytes=-1).startswith("offload_layers: 4 faults\n")


def test_faults_name_the_call():
    assert error_of(offload_module, torch.sin) == (
        "offload_module: the module is not an nn.Module\n"
        "  received: builtin_function_or_method\n"
        "  works:    for layer in model.layers: offload_module(layer); or offload(function, x)"
    )
    assert error_of(offload_layers, Model(), "layer.*") == (
        "offload_layers: a name is that of no layer\n"
        "  received: 'layer.*', which no layer has\n"
        '  works:    offload_layers(model, "layers.*")'
    )
    assert error_of(offload_layers, Model(), "Block").endswith("works:    offload_layers(model, Block)")
    assert error_of(offload_layers, Model(), []).endswith(
        'works:    offload_layers(model, Block); or offload_layers(model, "layers.*")'
    )
    assert error_of(offload_layers, Both(), ["left", "left.layers.0"]).endswith(
        "works:    those around alone: offload_layers(model, 'left'); or those inside alone"
    )
    assert error_of(offload_layers, Both(), ["left.layers"]).endswith(
        'works:    offload_layers(model, "left.layers.*")'
    )
