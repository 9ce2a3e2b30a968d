"""The arguments of the installed torch's checkpoint, each of which ``torchckpt.checkpoint`` takes."""
from __future__ import annotations

import inspect
import io
import re
import warnings
import weakref
from array import array
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import torchckpt
from tests.helpers import assert_program_transparent, leaf
from torchckpt.errors import ArgumentError
from torchckpt.regions.core import checkpointing
from torchckpt.regions.private import heeds_hooks, hooks_in_force
from torchckpt.testing import count_recomputes

checkpoint = torchckpt.checkpoint
PRODUCTS = partial(torchs.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
VALUES = {
    "use_reentrant": [None, False, True],
    "preserve_rng_state": [True, False],
    "context_fn": [torchs.noop_context_fn, PRODUCTS],
    "determinism_check": ["default", "none"],
    "debug": [False, True],
    "early_stop": [True, False],
    "respect_saved_tensors_hooks": [None, False, True],
}
"""Every argument that a release of torch from 2.11 on has, besides the function and its own arguments."""

OURS_ALONE = {"generators"}


@pytest.fixture(autouse=True)
def _not_warned_yet():
    checkpointing._warn_of_reentrant.cache_clear()


def names_of(function) -> list[str]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]


def block(x, scale=1.0):
    return (x @ x).sin() * scale


def gradient_of(call) -> torch.Tensor:
    x = torch.arange(9.0).view(3, 3).requires_grad_()
    call(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("name", [*names_of(torchs.checkpoint)[1:], "preserve_rng_state"])
@pytest.mark.filterwarnings("ignore:torchckpt.checkpoint. use_reentrant=True")
def test_every_argument_of_the_installed_torch_is_taken(name):
    default = inspect.signature(torchs.checkpoint).parameters.get(name)
    for value in [*VALUES[name], *([] if default is None else [default.default])]:
        assert torch.equal(gradient_of(partial(checkpoint, block, **{name: value})), gradient_of(block))


def test_the_function_may_be_named_and_have_keywords():
    assert torch.equal(checkpoint(function=block, x=torch.ones(2, 2), scale=3.0), block(torch.ones(2, 2), 3.0))


def test_ours_are_those_of_all_releases_and_generators():
    assert set(names_of(checkpoint)) == {"function", *VALUES} | OURS_ALONE


@pytest.mark.parametrize("function", [torchs.checkpoint, torchs.checkpoint_sequential])
def test_the_page_has_a_row_for_each(function):
    page = (Path(__file__).parents[3] / "docs" / "migration" / "torch.md").read_text()
    part = page.partition("## checkpoint_sequential")[0 if function is torchs.checkpoint else 2]
    rows = "".join(line.split("|")[1] for line in part.splitlines() if line.startswith("|"))
    assert set(names_of(function)) <= set(re.findall(r"`\**(\w+)", rows))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("preserve_rng_state", [True, False])
@pytest.mark.filterwarnings("ignore:torchckpt.checkpoint. use_reentrant=True")
def test_a_sequence_in_segments_is_that_of_torch(use_reentrant, preserve_rng_state):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

    def ours(functions, segments, input, **options):
        size = len(functions) // segments
        for start in range(0, size * (segments - 1), size):
            input = checkpoint(functions[start : start + size], input, **options)
        return functions[size * (segments - 1) :](input)

    options = {"use_reentrant": use_reentrant, "preserve_rng_state": preserve_rng_state}
    assert {"functions", "segments", "input", "use_reentrant"} == set(names_of(torchs.checkpoint_sequential))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gradient_of(partial(torchs.checkpoint_sequential, model, 2, **options))
    assert torch.equal(gradient_of(partial(ours, model, 2, **options)), expected)


# use_reentrant=True ---------------------------------------------------------------------------------------------------


def test_reentrant_is_run_as_always_and_warned_of_once_in_a_line():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(gradient_of(partial(checkpoint, block, use_reentrant=True)), gradient_of(block))
    (warning,) = said
    assert str(warning.message) == (
        "torchckpt.checkpoint: use_reentrant=True is run as use_reentrant=False: nothing has to require a gradient, "
        "and keywords, autograd.grad, inputs= and double backward work, too"
    )
    assert warning.filename == __file__  # of the caller


@pytest.mark.filterwarnings("ignore:torchckpt.checkpoint. use_reentrant=True")
def test_reentrant_with_a_wrong_argument_is_an_error_of_that():
    with pytest.raises(ArgumentError, match=r"^checkpoint: debug is not a bool"):
        checkpoint(block, leaf(3, 3), use_reentrant=True, debug=1)


@pytest.mark.filterwarnings("ignore:torchckpt.checkpoint. use_reentrant=True")
def test_reentrant_needs_no_input_with_a_gradient():
    layer = nn.Linear(3, 3)
    (gradient,) = torch.autograd.grad(checkpoint(layer, torch.ones(2, 3), use_reentrant=True).sum(), [layer.bias])
    assert torch.equal(gradient, torch.full((3,), 2.0))


@pytest.mark.usefixtures("fresh_dynamo")
def test_reentrant_inside_of_a_graph_breaks_none():
    compiled = torch.compile(lambda x: checkpoint(block, x, use_reentrant=True), backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(gradient_of(compiled), gradient_of(block))


# the decorator --------------------------------------------------------------------------------------------------------


def test_a_function_with_the_decorator_is_a_region_at_each_call():
    @checkpoint(use_reentrant=False, determinism_check="values")
    def decorated(x, scale=1.0):
        """Of the user."""
        return block(x, scale)

    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Of the user."
    with count_recomputes() as recomputes:
        for _ in range(2):
            assert torch.equal(gradient_of(partial(decorated, scale=2.0)), gradient_of(partial(block, scale=2.0)))
    assert recomputes.total == 2


def test_a_method_with_the_decorator():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        @checkpoint()
        def forward(self, x):
            return self.norm(self.layer(x)).sin()

    model = Model()
    with count_recomputes() as recomputes:
        model(torch.randn(4, 3)).sum().backward()
    assert recomputes.total == model.norm.num_batches_tracked == 1


def test_a_module_with_the_decorator_keeps_its_tables_to_itself():
    layer = nn.Linear(3, 3)
    decorated = checkpoint(early_stop=False)(layer)
    assert torch.equal(gradient_of(decorated), gradient_of(layer))
    assert "_parameters" not in vars(decorated)


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_decorator_inside_of_a_graph():
    decorated = checkpoint(preserve_rng_state=False)(block)
    compiled = torch.compile(lambda x: decorated(x).cos(), backend="aot_eager", fullgraph=True)
    assert torch.equal(gradient_of(compiled), gradient_of(lambda x: block(x).cos()))


def test_faults_of_the_decorator_are_said_where_it_stands():
    with pytest.raises(ArgumentError) as caught:
        checkpoint(x=3, early_stop=1)
    assert str(caught.value) == (
        "checkpoint: 2 faults\n"
        "there is a keyword that is no option, and no function that takes it\n  received: x=\n"
        "  works:    checkpoint(block, x); or checkpoint(early_stop=False)(block)(x)\n"
        "early_stop is not a bool\n  received: 1 (int)\n  works:    early_stop=False"
    )
    with pytest.raises(ArgumentError, match="the function is not callable"):
        checkpoint()(3)
    with pytest.raises(ArgumentError, match="the function is not callable"):
        checkpoint(None, leaf(3))


# respect_saved_tensors_hooks ------------------------------------------------------------------------------------------

needs_torch_that_heeds_hooks = pytest.mark.skipif(not heeds_hooks, reason="selective contexts look for no hooks")


class Seen:
    """Saved-tensor hooks, and the shapes that they packed and unpacked."""

    def __init__(self):
        self.packed, self.unpacked = [], []

    def pack(self, tensor):
        self.packed.append(tuple(tensor.shape))
        return tensor

    def unpack(self, tensor):
        self.unpacked.append(tuple(tensor.shape))
        return tensor


def seen_by_hooks(call, around=lambda run: run):
    def products(x):
        return (x @ torch.ones(3, 5)).sin() @ torch.ones(5, 3)

    seen, x = Seen(), leaf(2, 3)
    with saved_tensors_hooks(seen.pack, seen.unpack):
        y = around(partial(call, products))(x)
    assert hooks_in_force(False) is None
    y.sum().backward()
    (expected,) = torch.autograd.grad(products(x).sum(), x)
    assert torch.equal(x.grad, expected)
    return seen


@needs_torch_that_heeds_hooks
@pytest.mark.parametrize("respects", [True, False])
def test_hooks_see_what_selective_contexts_keep_as_with_torch(respects):
    ours, theirs = (
        seen_by_hooks(partial(call, use_reentrant=False, context_fn=PRODUCTS, respect_saved_tensors_hooks=respects))
        for call in (checkpoint, torchs.checkpoint)
    )
    assert ours.packed.count((2, 5)) == theirs.packed.count((2, 5)) == ours.unpacked.count((2, 5)) == int(respects)


@needs_torch_that_heeds_hooks
def test_hooks_outside_of_an_outer_region_see_it_too():
    inner = partial(checkpoint, context_fn=PRODUCTS, respect_saved_tensors_hooks=True)
    assert seen_by_hooks(inner, around=lambda run: partial(checkpoint, run)).packed.count((2, 5)) == 1


@needs_torch_that_heeds_hooks
def test_the_graph_keeps_no_hook_that_packs():
    def pack(tensor):
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = checkpoint(block, leaf(2, 2), context_fn=PRODUCTS, respect_saved_tensors_hooks=True)
    packs = weakref.ref(pack)
    del pack
    assert packs() is None
    y.sum().backward()


@pytest.mark.skipif(heeds_hooks, reason="selective contexts look for hooks")
def test_a_torch_whose_selective_contexts_look_for_no_hooks_is_an_error():
    with pytest.raises(ArgumentError, match="respect_saved_tensors_hooks needs selective contexts that look for hooks"):
        checkpoint(block, leaf(3, 3), context_fn=PRODUCTS, respect_saved_tensors_hooks=True)
    checkpoint(block, leaf(3, 3), respect_saved_tensors_hooks=True).sum().backward()  # nothing to route


def test_respect_of_another_type_is_an_error():
    with pytest.raises(ArgumentError, match="respect_saved_tensors_hooks is not a bool or None"):
        checkpoint(block, leaf(3, 3), respect_saved_tensors_hooks="yes")


def test_a_container_that_the_function_fills_is_the_callers(call, device):
    """As a cache of keys and values, or a list of losses."""

    def function(x, cache, *, table):
        assert cache[0] is table["x"]
        cache.append(x.sin())
        table["y"] = cache[0].exp()
        return (cache[0] * x).tanh()

    def program(call, x):
        hidden = x * 2
        cache, table = [hidden], {"x": hidden}
        output = call(function, hidden.cos(), cache, table=table)
        return output, [*cache], {**table}

    assert_program_transparent(call, program, leaf(4, device=device))


ITERATORS = {
    "generator": lambda parts: (part for part in parts),
    "list_iterator": iter,
    "map": lambda parts: map(torch.cos, parts),
    "_deque_iterator": lambda parts: iter(deque(parts)),
    "arrayiterator": lambda parts: iter(array("f", parts[0].tolist())),
}


def shifted(x, parts):
    for part in parts:
        x = x + part
    return x.sin()


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_is_an_error(name, call):
    """The replay found it at its end, and saved as many tensors of the same shapes: silently wrong."""
    text = f"an argument is an iterator, .*\n  received: a {name}\n  works:    .*list"
    for wrapped in (lambda parts: parts, lambda parts: {"parts": [parts]}):
        with pytest.raises(ArgumentError, match=text):
            call(shifted, leaf(3), wrapped(ITERATORS[name]([torch.ones(3)])))
    with torch.no_grad():
        call(shifted, leaf(3), ITERATORS[name]([torch.ones(3)]))


def test_a_file_is_no_iterator_that_a_function_takes_from(call):
    def written(x, file):
        print("forward", file=file)
        return x.sin()

    file = io.StringIO()
    call(written, leaf(3), file).sum().backward()
    assert file.getvalue().startswith("forward\n")
