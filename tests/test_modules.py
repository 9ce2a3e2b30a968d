"""What ``torch.nn`` and ``torch.compile`` make of modules."""
from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tests.scripts import run
from torchckpt.modules import OF_EVERY_MODULE, contents_of, imported, is_compiled, is_compiled_class, name_of


def test_a_module_is_compiled_by_wrapping_or_in_place():
    plain, wrapped, in_place = nn.Linear(1, 1), torch.compile(nn.Linear(1, 1), backend="eager"), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    assert [is_compiled(module) for module in (plain, wrapped, in_place)] == [False, True, True]
    assert [is_compiled_class(type(module)) for module in (plain, wrapped, in_place)] == [False, True, False]


def test_a_module_inside_a_compiled_one_is_not_compiled_itself():
    assert not is_compiled(torch.compile(nn.Linear(1, 1), backend="eager")._orig_mod)


def test_to_ask_imports_no_compiler():
    program = (
        "import sys, torch; from torchckpt.modules import is_compiled; is_compiled(torch.nn.ReLU());"
        "print('torch._dynamo' in sys.modules)"
    )
    done = run("-c", program, timeout=60)
    assert done.stdout.strip() == "False"


def test_the_mode_and_what_a_user_adds_are_not_of_every_module():
    module = nn.Linear(1, 1)
    assert vars(module).keys() - OF_EVERY_MODULE == {"training", "in_features", "out_features"}


def test_a_function_holds_its_closure_and_its_defaults_and_a_cell_that_is_still_empty_has_its_place():
    def outer():
        def inner(x, a=1, *, b=2):
            return early, late

        early = 3
        return inner, contents_of(inner), (late := 4)

    function, before, _ = outer()
    assert before == [3, None, 1, 2]
    assert contents_of(function) == [3, 4, 1, 2]


def test_classes_of_what_is_not_imported_are_none():
    assert imported("torch.nn", "Linear", "ReLU") == (nn.Linear, nn.ReLU)
    assert imported("torch.nn", "NoSuchLayer") == imported("torch.no_such_module", "Linear") == ()


def test_the_private_name_of_a_modules_call_is_not_shown():
    layer = nn.Linear(2, 2)
    assert name_of(layer.__call__) == name_of(partial(layer.forward)) == "'Linear.forward'"
