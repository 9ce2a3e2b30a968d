"""Why a call is traced anew, word for word."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.settings import default_dtype
from torchckpt.graph.trace.guard import guard_of
from torchckpt.graph.trace.reason import reason_of

SETTINGS = {"scale": 1}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.times = nn.Linear(3, 3), 2


def guard(model, *args, outside=(), **kwargs):
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return guard_of(model, state, args, kwargs, outside)


def reason(model, before, *args, outside=(), **kwargs):
    return reason_of(model, before, guard(model, *args, outside=outside, **kwargs), args, kwargs)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("change", "args", "kwargs", "text"),
    [
        (None, (torch.ones(4, 3),), {}, "shape of args[0]: (2, 3), now (4, 3)"),
        (None, (X.double(),), {}, "dtype of args[0]: torch.float32, now torch.float64"),
        (None, (torch.ones(3, 2).T,), {}, "layout in memory of args[0]: (3, 1), now (1, 2)"),
        (None, (X.clone().requires_grad_(),), {}, "requires_grad of args[0]: False, now True"),
        (None, (nn.Parameter(X, False),), {}, "class of args[0]: <class 'torch.Tensor'>, now "
                                              "<class 'torch.nn.parameter.Parameter'>"),
        (None, (X, X), {}, "other arguments"),
        (lambda model: model.eval(), (X,), {}, "eval()"),
        (lambda model: setattr(model, "times", 3), (X,), {}, "times: 2, now 3"),
        (lambda model: setattr(model.inner, "mode", "a"), (X,), {}, "inner.mode"),
        (lambda model: model.inner.register_forward_hook(print), (X,), {}, "other modules, or other hooks of them"),
        (lambda model: model.inner.weight.requires_grad_(False), (X,), {}, "requires_grad of inner.weight: True, now "
                                                                           "False"),
        (lambda model: model.inner.register_buffer("more", X + 1), (X,), {}, "other parameters or buffers"),
    ],
)
def test_one_thing_that_has_changed(change, args, kwargs, text):
    model = Model()
    before = [guard(model, X)]
    if change is not None:
        change(model)
    assert reason(model, before, *args, **kwargs) == text


def test_first_call():
    assert reason(Model(), [], X) == "the first call"


def test_constants_by_keyword_and_what_lies_outside():
    model = Model()
    before = [guard(model, X, times=1, outside=(("SCALE", (int, 1)), ("SCALE", (int, 5))))]
    assert reason(model, before, X, times=2, outside=before[0].outside) == "kwargs['times']: 1, now 2"
    changed = (("SCALE", (int, 1)), ("SCALE", (int, 6)))
    assert reason(model, before, X, times=1, outside=changed) == "SCALE: 5, now 6"
    assert reason(model, before, X, times=1, outside=(("OTHER", 1),)) == "something else that its code reads"


def test_nearest_of_several_is_told_of_and_at_most_three_things():
    model = Model()
    before = [guard(model, X), guard(model, torch.ones(7, 3).double()), guard(model, X, X)]
    assert reason(model, before, torch.ones(7, 3)) == "dtype of args[0]: torch.float64, now torch.float32"
    before = [guard(model, X, a=1, b=1, c=1, d=1)]
    text = reason(model, before, X, a=2, b=2, c=2, d=2)
    assert text == "kwargs['a']: 1, now 2, kwargs['b']: 1, now 2, kwargs['c']: 1, now 2, and 1 more"


def test_modes_of_torch():
    model = Model()
    before = [guard(model, X)]
    with torch.autocast("cpu", torch.bfloat16):
        assert reason(model, before, X) == "autocast"
    with default_dtype(torch.float64):
        assert reason(model, before, X) == "the default dtype, determinism or oneDNN"
