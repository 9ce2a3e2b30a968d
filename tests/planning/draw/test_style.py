from __future__ import annotations

import re

from tests.planning.steps import step
from torchckpt.planning.draw.canvas import COLOURS, STYLE, clipped
from torchckpt.planning.draw.svg import svg


def test_names_are_clipped_at_either_end() -> None:
    assert [clipped("abcdefgh", longest) for longest in (8, 7)] == ["abcdefgh", "abcd..."]
    assert clipped("abcdefgh", 7, tail=True) == "...efgh"


def test_pictures_of_schedules_have_the_same_look() -> None:
    rules = set(re.findall(r"[^{}]+{[^{}]+}", re.sub(r"\s+(?=[.t])", "", STYLE)))
    drawn = re.sub(r"\s+(?=[.t])", "", svg(step(2, 2)))
    assert {rule for rule in rules if rule not in drawn} == set()
    assert set(COLOURS) == set("FBIWR")
