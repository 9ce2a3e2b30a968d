from __future__ import annotations

from xml.etree import ElementTree

import pytest

from torchckpt.planning.draw.canvas import Axis, Canvas, clipped


def test_a_document_letter_for_letter() -> None:
    canvas = Canvas(20)
    canvas.rectangle(1, 2.504, 3, 1 / 3, class_="idle")
    canvas.line(0, 0, 1, 1, stroke_width=2)
    canvas.boxes([(0, 1, 2, 3), (4, 5, 6, 7)], class_="F")
    canvas.ticks([(1, 2), (3, 4)], 5, class_="arrival")
    canvas.steps([(0, 9), (1, 9), (1, 5), (3, 2)], class_="curve")
    canvas.words(1, 2, "a < b & c")
    assert canvas.text(10, "<title>", ".idle{fill:#eee}").splitlines() == [
        '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10" viewBox="0 0 20 10" role="img">',
        "<title>&lt;title&gt;</title>",
        "<style>.idle{fill:#eee}</style>",
        '<rect class="paper" width="20" height="10"/>',
        '<rect x="1" y="2.5" width="3" height="0.33" class="idle"/>',
        '<line x1="0" y1="0" x2="1" y2="1" stroke-width="2"/>',
        '<path d="M0,1h2v3h-2zM4,5h6v7h-6z" class="F"/>',
        '<path d="M1,2v5M3,4v5" class="arrival"/>',
        '<path d="M0,9H1V5H3V2" class="curve"/>',
        '<text x="1" y="2">a &lt; b &amp; c</text>',
        "</svg>",
    ]


def test_quotes_and_control_characters_are_safe_everywhere() -> None:
    canvas = Canvas(1)
    canvas.words(0, 0, "\x00\x0b<\ud800", id='"><script>\x01')
    root = ElementTree.fromstring(canvas.text(1, "\x1f&", ""))
    text = root.find("{http://www.w3.org/2000/svg}text")
    assert text is not None
    assert (text.text, text.attrib["id"]) == ("<", '"><script>')


def test_names_are_clipped_at_either_end() -> None:
    assert [clipped("abcdefgh", longest) for longest in (8, 7)] == ["abcdefgh", "abcd..."]
    assert clipped("abcdefgh", 7, tail=True) == "...efgh"


def test_values_lie_between_start_and_end() -> None:
    axis = Axis(10.0, 100.0, 0.0)
    assert [axis(value) for value in (0.0, 5.0, 10.0)] == [100.0, 50.0, 0.0]


@pytest.mark.parametrize(
    ("extent", "ticks"),
    [
        (33.0, [0, 10, 20, 30]),
        (4.0, [0, 1, 2, 3, 4]),
        (0.3, [0, 0.1, 0.2, 0.3]),
        (7e9, [0, 2e9, 4e9, 6e9]),
        (0.0, [0]),
    ],
)
def test_ticks_are_round(extent: float, ticks: list[float]) -> None:
    assert Axis(extent, 0, 1).ticks(4) == pytest.approx(ticks)


def test_ticks_are_round_in_units() -> None:
    assert Axis(2.5 * 2**30, 0, 1).ticks(4, unit=2**30) == [0, 2**30, 2 * 2**30]


@pytest.mark.parametrize("extent", [1e-12, 0.37, 1.0, 9.99, 10.0, 123456.0, 1e15])
@pytest.mark.parametrize("most", [1, 3, 5, 10])
def test_ticks_are_never_more_than_asked_for(extent: float, most: int) -> None:
    ticks = Axis(extent, 0, 1).ticks(most)
    assert 1 <= len(ticks) <= most + 1
    assert ticks[-1] <= extent * (1 + 1e-6)


def test_of_an_empty_axis_every_value_is_at_the_start() -> None:
    assert Axis(0.0, 7.0, 9.0)(3.0) == 7.0
