"""Fields of layouts and software: each value that cannot be is refused, with one that can."""
from __future__ import annotations

import math
from dataclasses import fields

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.jobs import Layout, Software
from torchckpt.jobs.layout import SOFTWARE

ODD = {
    "int": (-1, 2.0, math.nan, "2", None, True, 10**13),
    "float": (-0.5, math.nan, math.inf, "2", None, True, 10**13),
    "str": ("foo", 3, None, ["none"]),
    "bool": (0, 1, None, "no"),
    "Software": ("megatron", None),
    "tuple[str, ...]": ("core_attn", ("foo",), ["core_attn"], (1,), None),
}


@pytest.mark.parametrize("kind", [Layout, Software])
def test_every_field_refuses_what_it_cannot_be_and_names_what_it_can(kind):
    for field in fields(kind):
        for value in (*ODD[field.type], *((0,) if field.type == "int" and field.default else ())):
            with pytest.raises(ArgumentError, match=rf"{field.name} of the .* is not .*\n") as error:
                kind(**{field.name: value})
            works = str(error.value).split("works: ")[1].strip()
            eval(f"kind({works})", {"kind": kind, "SOFTWARE": SOFTWARE})


def test_all_faults_are_listed():
    with pytest.raises(ArgumentError, match=r"^Layout\(\): 2 faults\ntp of the layout(.*\n)*.*sequence of the layout"):
        Layout(tp=0, sequence=8192.5)


def test_the_nearest_choice_is_named():
    with pytest.raises(ArgumentError, match=r"works: +schedule='zb-2p'"):
        Layout(schedule="zb2-p")
