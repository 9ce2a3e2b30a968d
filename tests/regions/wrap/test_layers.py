"""checkpoint_layers: which modules are chosen, what the handle says and undoes, and every fault."""
from __future__ import annotations

import copy
import doctest
import pickle
import re
from typing import Union

import pytest
import torch
from torch import nn

import torchckpt
from tests.regions.modules import Block, assert_recomputes_to_equal, step
from tests.slow import few
from torchckpt import checkpoint_layers, checkpoint_module
from torchckpt.errors import ArgumentError
from torchckpt.layers import apply as layers_module
from torchckpt.regions.wrap.module import is_checkpointed
from torchckpt.testing import count_recomputes

WORKS = 'checkpoint_layers(model, Block); or checkpoint_layers(model, "layers.*")'


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Both(nn.Module):
    """``left.layers.0`` to ``right.layers.2``, and the head; one block stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Half(), Half()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.again = self.left.layers[1]

    def forward(self, x):
        return self.head(self.again(self.right(self.left(x))))


@pytest.fixture
def model():
    return Both()


def error_of(*args, **options):
    with pytest.raises(ArgumentError) as caught:
        checkpoint_layers(*args, **options)
    return str(caught.value)


def fault(rule, received, works):
    return f"checkpoint_layers: {rule}\n  received: {received}\n  works:    {works}"


def checkpointed(model):
    return [name for name, layer in model.named_modules() if is_checkpointed(layer)]


ALL = [f"{half}.layers.{place}" for half in ("left", "right") for place in range(3)]

# which ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (Block, ALL),
        ((Block, nn.Tanh), [*ALL, "head.1"]),
        (Block | nn.Tanh, [*ALL, "head.1"]),
        (Union[Block, nn.Tanh], [*ALL, "head.1"]),  # noqa: UP007
        (frozenset({Block, nn.Tanh}), [*ALL, "head.1"]),
        ("left.layers.*", ALL[:3]),
        ("*.layers.*", ALL),
        ("**.layers.*", ALL),
        ("**.1", ["left.layers.1", "right.layers.1", "head.1"]),
        ("right.layers.[02]", ["right.layers.0", "right.layers.2"]),
        ("left.layers.?", ALL[:3]),
        ("head", ["head"]),
        ("again", ["left.layers.1"]),
        (["right.layers.0", "head", "left.layers.0"], ["left.layers.0", "right.layers.0", "head"]),
        (["head", Block], [*ALL, "head"]),
        (["again", "left.layers.1", Block], ALL),
        (lambda module: isinstance(module, nn.Tanh), ["head.1"]),
        ([lambda module: isinstance(module, nn.Tanh), "left.*.0"], ["left.layers.0", "head.1"]),
    ],
    ids=str,
)
def test_chosen(model, chosen, names):
    handle = checkpoint_layers(model, chosen)
    assert list(handle.names) == names
    assert checkpointed(model) == names


def test_a_name_may_look_like_a_pattern():
    model = nn.ModuleDict({"a[0]": Block(), "a0": Block(), "b*": Block(), "bc": Block()})
    assert checkpoint_layers(model, ["a[0]", "b*"]).names == ("a[0]", "b*")


@pytest.mark.parametrize(("every", "places"), [(1, range(6)), (2, (0, 2, 4)), (4, (0, 4)), (6, (0,)), (9, (0,))])
def test_every_takes_the_first_and_then_every_nth(model, every, places):
    checkpoint_layers(model, Block, every=every)
    assert checkpointed(model) == [ALL[place] for place in places]


def test_a_star_does_not_pass_a_dot(model):
    received = "'left.*.*.*', which no layer has"
    assert received in error_of(nn.Sequential(Half()), "left.*.*.*")
    assert list(checkpoint_layers(model, "left.*.*").names) == ALL[:3]


def test_layers_of_a_container_are_named_by_number():
    model = nn.ModuleList(Block() for _ in range(3))
    assert list(checkpoint_layers(model, "*", every=2).names) == ["0", "2"]


def test_subclasses_are_of_the_class_even_those_of_checkpointed_modules(model):
    checkpoint_layers(model, Block).remove()
    assert list(checkpoint_layers(model, Block).names) == ALL


def test_a_function_is_asked_once_for_each_module(model):
    asked = []
    checkpoint_layers(model, lambda module: asked.append(module) or isinstance(module, Block))
    assert len(asked) == len(set(asked)) == len(list(model.modules())) - 1


# nothing else changes -------------------------------------------------------------------------------------------------


def test_steps_are_equal_and_every_call_is_recomputed_once(model):
    expected, none = step(copy.deepcopy(model))
    keys, text = list(model.state_dict()), repr(model)
    checkpoint_layers(model, Block)
    assert none == 0
    assert_recomputes_to_equal(model, expected, total=7)
    assert list(model.state_dict()) == keys
    assert repr(model) == text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_checkpoints_too_and_goes_its_own_way(model, copied):
    handle = checkpoint_layers(model, "*.layers.*", every=2)
    other = copied(model)
    handle.remove()
    assert checkpointed(model) == []
    assert checkpointed(other) == ALL[::2]
    assert step(other)[1] == 3


def test_options_are_those_of_checkpoint_module(model):
    checkpoint_layers(model, Block, determinism_check="values")
    handle = checkpoint_module(copy.deepcopy(model.head), determinism_check="values")
    assert model.left.layers[0]._torchckpt_options == handle._setting


# the handle -----------------------------------------------------------------------------------------------------------


def test_it_says_which(model):
    handle = checkpoint_layers(model, ["left.layers.*", "head"], every=2)
    assert repr(handle) == "<checkpoint_layers: 2 modules: left.layers.0, left.layers.2>"
    assert str(handle) == "checkpoint_layers: 2 modules\n  left.layers.0  Block\n  left.layers.2  Block"
    handle.remove()
    assert repr(handle) == "<checkpoint_layers: 2 modules, removed: left.layers.0, left.layers.2>"
    assert str(handle).startswith("checkpoint_layers: 2 modules, removed\n")
    assert repr(checkpoint_layers(model, "head")) == "<checkpoint_layers: 1 module: head>"


def test_it_removes_once_and_only_its_own(model):
    first = checkpoint_layers(model, "left.layers.*")
    first.remove()
    second = checkpoint_layers(model, "left.layers.*")
    first.remove()
    assert checkpointed(model) == ALL[:3]
    second.remove()
    assert checkpointed(model) == []
    assert type(model.left.layers[0]) is Block


def test_as_a_context_manager(model):
    x = torch.randn(2, 4)
    with checkpoint_layers(model, Block, every=3), count_recomputes() as recomputes:
        model(x).sum().backward()
    assert recomputes.total == 2
    assert checkpointed(model) == []


# faults ---------------------------------------------------------------------------------------------------------------


def test_no_model():
    assert error_of([Block()], Block) == fault("the model is not an nn.Module", "list", WORKS)


@pytest.mark.parametrize("every", [0, -1, True, 2.0, "2", None])
def test_every(model, every):
    rule, works = "every is not a whole number of at least 1", "every=2, for the 1st, the 3rd, the 5th"
    assert error_of(model, Block, every=every) == fault(rule, f"every={every!r}", works)


@pytest.mark.parametrize(
    ("chosen", "received"),
    [
        (3, "3 (int)"),
        (["head", None], "None (NoneType)"),
        ({"head": 1}, "{'head': 1} (dict)"),
        (b"head", "b'head' (bytes)"),
    ],
)
def test_what_cannot_choose(model, chosen, received):
    rule = "layers has something that is no class, no name, and no function of a module"
    assert error_of(model, chosen) == fault(rule, received, WORKS)


def test_modules_themselves_do_not_choose(model):
    assert "received: a module, ModuleList\n" in error_of(model, model.left.layers)
    assert "received: a module, Block\n" in error_of(model, [model.left.layers[0]])
    assert error_of(model, list(model.left.layers)) == error_of(model, [model.left.layers[0]])


@pytest.mark.parametrize("chosen", [[], ()])
def test_no_choice(model, chosen):
    assert error_of(model, chosen) == fault("layers chooses nothing", f"layers={chosen!r}", WORKS)


@pytest.mark.parametrize(
    ("chosen", "received", "works"),
    [
        ("left.layer.*", "'left.layer.*', which no layer has", "left.layers.*"),
        ("haed", "'haed', which no layer has", "head"),
        ("left.layers.7", "'left.layers.7', which no layer has", "left.layers.*"),
        ("left.layers.", "'left.layers.', which no layer has", "left.layers.*"),
        ("left.layers.0:2", "'left.layers.0:2', which no layer has", "left.layers.0"),
        ("", "'', which no layer has", "left.layers.*"),
        ("xyz", "'xyz', which no layer has", "left.layers.*"),
    ],
)
def test_a_name_that_no_layer_has(model, chosen, received, works):
    rule = "a name is that of no layer"
    assert error_of(model, chosen) == fault(rule, received, f'checkpoint_layers(model, "{works}")')


def test_a_name_of_a_class(model):
    received = "'Block', which no layer has: it is the name of a class"
    works = "checkpoint_layers(model, Block)"
    assert error_of(model, "Block") == fault("a name is that of no layer", received, works)


def test_a_class_of_which_no_layer_is_one(model):
    rule, received = "a class is that of no layer", "Conv2d, of which no layer is one"
    assert error_of(model, nn.Conv2d) == fault(rule, received, 'checkpoint_layers(model, "left.layers.*")')


def test_the_model_itself_is_not_chosen(model):
    rule, received = "a class is that of no layer", "Both, of which no layer is one; the model itself is a Both"
    assert error_of(model, Both) == fault(rule, received, "checkpoint_module(model)")
    assert error_of(nn.Linear(2, 2), "*").endswith("works:    checkpoint_module(model)")


def test_a_function_that_is_always_false(model):
    text = error_of(model, lambda module: False)
    received = "  received: <function .*, which is false for every layer\n"
    assert re.search(rf"a function chooses no layer\n{received}", text)


def test_what_is_never_called(model):
    rule = "the module has no forward that is called"
    received, works = "ModuleList, whose layers are called one by one", 'checkpoint_layers(model, "left.layers.*")'
    assert error_of(model, "left.layers") == fault(rule, f"left.layers, a {received}", works)


def test_one_inside_of_another(model):
    rule = "a chosen layer is inside of another"
    works = "those around alone: checkpoint_layers(model, 'left.layers.*'); or those inside alone"
    received = "'left.layers.0.linear' is inside of 'left.layers.0'"
    assert error_of(model, ["left.layers.0", "left.layers.0.lin*"]) == fault(rule, received, works)


def test_all_faults_at_once_and_nothing_is_changed(model):
    checkpoint_module(model.left.layers[2])
    model.right.layers[0].forward = lambda x: x
    text = error_of(model, ["*.layers", "*.layers.*"])
    assert text.startswith("checkpoint_layers: 6 faults\n")
    for received in (
        "left.layers, a ModuleList, whose",
        "right.layers, a ModuleList, whose",
        "'left.layers.0' is inside of 'left.layers', and 2 more",
        "left.layers.2, a Block, checkpointed already",
        "right.layers.0, a Block, whose forward is set on the instance",
    ):
        assert f"  received: {received}" in text
    assert checkpointed(model) == ["left.layers.2"]
    assert error_of(3, [3, ()], every=0, early_stop=1).startswith("checkpoint_layers: 5 faults\n")
    assert error_of(model, ["haed", nn.Conv2d]).startswith("checkpoint_layers: 2 faults\n")


class Stubborn(Block):
    """Lets no one put another class in front of its own."""

    def __setattr__(self, name, value):
        if name == "__class__":
            raise TypeError("no")
        super().__setattr__(name, value)


def test_where_a_later_one_fails_the_earlier_ones_are_plain_again(model):
    model.right.layers[2] = Stubborn()
    with pytest.raises(TypeError, match="no"):
        checkpoint_layers(model, Block)
    assert checkpointed(model) == []


def test_examples():
    results = doctest.testmod(layers_module, extraglobs={"torchckpt": torchckpt, "torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


# torch.export ---------------------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, about its tree specs
def test_what_is_exported_has_no_regions(fresh_dynamo, strict):
    model, x = Half(), torch.randn(2, 4)
    plain = torch.export.export(copy.deepcopy(model), (x,), strict=strict)
    checkpoint_layers(model, Block)
    exported = torch.export.export(model, (x,), strict=strict)
    assert exported.graph_module.code == plain.graph_module.code
    with count_recomputes() as recomputes:
        exported.module()(x).sum().backward()
        model(x).sum().backward()
    assert recomputes.total == 3
