"""Every error of a wrong call, by its text: the rule, what was received, the call that works."""
from __future__ import annotations

import contextlib
import importlib.util
import pathlib

import pytest
import torch
from torch import nn

import torchckpt
from torchckpt import Checkpointing, checkpoint, checkpoint_module
from torchckpt.errors import (
    ArgumentError,
    CheckpointError,
    Fault,
    RecomputationError,
    RegionError,
    TransformError,
    called,
    check,
)
from torchckpt.regions import private
from torchckpt.regions.core.slots import Slot

x = torch.ones(3, requires_grad=True)


def error_of(call, *args, **kwargs) -> str:
    with pytest.raises(ArgumentError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def by_hand(function, *args, **options):
    return Checkpointing(function, *args, **options)


def of_module(module, _, **options):
    return checkpoint_module(module, **options)


# one fault ------------------------------------------------------------------------------------------------------------

FAULTS = [
    (
        {"preserve_rng_state": None},
        "preserve_rng_state is not a bool\n  received: None (NoneType)\n  works:    preserve_rng_state=False",
    ),
    (
        {"generators": 3},
        "generators is not a sequence of torch.Generator\n  received: 3 (int)\n  works:    generators=(generator,)",
    ),
    (
        {"generators": [3]},
        "generators is not a sequence of torch.Generator\n  received: [3] (list)\n  works:    generators=(generator,)",
    ),
    (
        {"determinism_check": "vales"},
        "determinism_check is not one of ('default', 'values', 'none')\n  received: 'vales' (str)\n"
        '  works:    determinism_check="values"',
    ),
    (
        {"context_fn": contextlib.nullcontext()},
        "context_fn is not callable; it returns two context managers\n  received: <contextlib.nullcontext object at",
    ),
    (
        {"context_fn": (1, 2)},
        "context_fn is not callable; it returns two context managers\n  received: (1, 2) (tuple)\n"
        "  works:    context_fn=functools.partial(create_selective_checkpoint_contexts, policy)",
    ),
    ({"early_stop": "no"}, "early_stop is not a bool\n  received: 'no' (str)\n  works:    early_stop=False"),
]


CALLERS = {"checkpoint": checkpoint, "Checkpointing": by_hand, "checkpoint_module": of_module}


@pytest.mark.parametrize(("options", "text"), FAULTS)
@pytest.mark.parametrize(("caller", "call"), CALLERS.items(), ids=CALLERS)
def test_wrong_option_is_named_by_the_call_that_got_it(caller, call, options, text):
    assert error_of(call, nn.Tanh(), x, **options).startswith(f"{caller}: {text}")


@pytest.mark.parametrize("call", [checkpoint, by_hand])
def test_function_that_is_not_callable(call):
    assert error_of(call, x.sin()).endswith(
        ": the function is not callable\n"
        "  received: a tensor of shape (3,)\n"
        "  works:    checkpoint(block, x), not checkpoint(block(x))"
    )


@pytest.mark.parametrize("value", [[], torch.Generator(), {1}, "g", iter(())], ids=lambda value: type(value).__name__)
def test_generators_are_a_sequence_of_generators_and_nothing_else(value):
    if value == []:
        checkpoint(torch.sin, x, generators=value)
        return
    assert "generators is not a sequence of torch.Generator" in error_of(checkpoint, torch.sin, x, generators=value)


@pytest.mark.parametrize("value", [["values"], {"values": 1}, None, True])
def test_determinism_check_of_any_other_type_is_a_fault(value):
    assert "determinism_check is not one of" in error_of(checkpoint, torch.sin, x, determinism_check=value)


def test_wrong_option_is_an_error_under_no_grad_too():
    with torch.no_grad():
        assert "early_stop is not a bool" in error_of(checkpoint, torch.sin, x, early_stop=0)


def test_what_was_received_is_cut_to_a_line():
    text = error_of(checkpoint, torch.sin, x, generators="g" * 200)
    assert f"received: '{'g' * 76}... (str)" in text


# several faults -------------------------------------------------------------------------------------------------------


def test_all_faults_of_a_call_are_listed():
    text = error_of(
        checkpoint, 3, x, preserve_rng_state=1, generators=2, determinism_check="3", context_fn=4, early_stop=5, debug=6
    )
    assert text.startswith("checkpoint: 7 faults\n")
    assert sorted(text.split("\n")[1:]) == sorted(
        [
            "the function is not callable",
            "  received: 3 (int)",
            "  works:    checkpoint(block, x), not checkpoint(block(x))",
            "preserve_rng_state is not a bool",
            "  received: 1 (int)",
            "  works:    preserve_rng_state=False",
            "generators is not a sequence of torch.Generator",
            "  received: 2 (int)",
            "  works:    generators=(generator,)",
            "determinism_check is not one of ('default', 'values', 'none')",
            "  received: '3' (str)",
            '  works:    determinism_check="values"',
            "context_fn is not callable; it returns two context managers",
            "  received: 4 (int)",
            "  works:    context_fn=functools.partial(create_selective_checkpoint_contexts, policy)",
            "early_stop is not a bool",
            "  received: 5 (int)",
            "  works:    early_stop=False",
            "debug is not a bool",
            "  received: 6 (int)",
            "  works:    debug=False",
        ]
    )


def test_not_a_module_and_a_wrong_option_at_once_are_two_faults():
    text = error_of(checkpoint_module, torch.sin, early_stop=1)
    assert "the module is not an nn.Module" in text
    assert "early_stop is not a bool" in text


# contexts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [None, contextlib.nullcontext(), (contextlib.nullcontext(),), (1, 2), [contextlib.nullcontext()] * 2],
    ids=["None", "one", "tuple of one", "numbers", "list"],
)
def test_context_fn_that_does_not_return_two_context_managers(made):
    assert error_of(checkpoint, torch.sin, x, context_fn=lambda: made) == (
        "checkpoint: context_fn did not return two context managers, one around the forward and one around the replay\n"
        f"  received: {made!r}\n"
        "  works:    context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext())"
    )


# errors of other kinds ------------------------------------------------------------------------------------------------


def test_transform_is_refused():
    with pytest.raises(TransformError) as caught:
        torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(x)
    assert str(caught.value) == (
        "a region cannot be entered under vmap, jvp, torch.func.grad or forward-mode AD\n"
        "  received: a call inside such a transform\n"
        "  works:    block(x) itself inside the transform; or torch.autograd.grad, double backward included, "
        "through checkpoint(block, x)"
    )


def test_order_of_the_methods_of_a_region():
    region = Checkpointing(torch.sin, x)
    before = (
        "the region has not run its forward yet\n  received: {} before checkpoint()\n"
        "  works:    outputs = region.checkpoint(); outputs = region.recompute(outputs); region.prefetch()"
    )
    with pytest.raises(RegionError) as caught:
        region.recompute(x)
    assert str(caught.value) == before.format("recompute(outputs)")
    with pytest.raises(RegionError) as caught:
        region.prefetch()
    assert str(caught.value) == before.format("prefetch()")
    region.checkpoint()
    with pytest.raises(RegionError) as caught:
        region.checkpoint()
    assert str(caught.value) == (
        "the region has run its forward already\n  received: a second checkpoint()\n"
        "  works:    torchckpt.Checkpointing(function, *args).checkpoint(), a new region for each forward"
    )


def test_slot_that_stays_empty_is_a_bug_of_ours():
    with pytest.raises(RecomputationError, match="a slot is empty after the replay of its region: this is a bug of t"):
        Slot(x, False).unpack()


def test_saved_tensor_that_was_changed_shows_versions_and_the_fix():
    def function(x):
        h = x.exp()  # saves its result
        h.add_(1)
        return h.sin()

    loss = checkpoint(function, x).sum()
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        "the float32 (3,) on cpu, saved inside a region, is at version 1; expected version 0 instead\n"
        "  works:    the operation out of place, such as h = h + 1 instead of h.add_(1)"
    )


# the exception tree ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ArgumentError, ValueError),
        (RecomputationError, RuntimeError),
        (RegionError, RuntimeError),
        (TransformError, RuntimeError),
    ],
)
def test_every_error_is_a_checkpoint_error_and_a_builtin_one(error, builtin):
    assert issubclass(error, CheckpointError)
    assert issubclass(error, builtin)
    assert torchckpt.CheckpointError is CheckpointError


def test_no_fault_is_no_error():
    check([])
    check(iter(()))


def test_one_fault_is_one_paragraph():
    with pytest.raises(ArgumentError) as caught, called("somebody"):
        check([Fault("rule", "this", "that")])
    assert str(caught.value) == "somebody: rule\n  received: this\n  works:    that"


def test_two_faults_are_two_paragraphs_and_a_number():
    with pytest.raises(ArgumentError) as caught, called("somebody"):
        check(Fault(rule, "this", "that") for rule in ("first", "second"))
    assert str(caught.value) == (
        "somebody: 2 faults\nfirst\n  received: this\n  works:    that\nsecond\n  received: this\n  works:    that"
    )


# a torch that lacks something -----------------------------------------------------------------------------------------


def test_torch_without_a_private_name_is_an_error_that_names_it(monkeypatch):
    monkeypatch.delattr(torch.nn.modules.batchnorm, "_NormBase")
    again = importlib.util.spec_from_file_location("again", pathlib.Path(private.__file__))
    with pytest.raises(CheckpointError) as caught:
        again.loader.exec_module(importlib.util.module_from_spec(again))
    text = str(caught.value)
    assert text.startswith("torchckpt needs something of torchckpt/regions/private.py that this torch does not have\n")
    assert "\n  received: cannot import name '_NormBase'" in text
    assert text.endswith(
        "\n  works:    pip install 'torch>=2.11', or the release of torchckpt that was made for this torch"
    )
    assert isinstance(caught.value.__cause__, ImportError)
