"""Bars: a row each, on one scale, with names that fit."""
from __future__ import annotations

from xml.etree import ElementTree

from torchckpt.planning.draw.bars import draw_bars
from torchckpt.planning.draw.units import units_of_bytes

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*bars: tuple[str, float]) -> ElementTree.Element:
    return ElementTree.fromstring(draw_bars(bars, units_of_bytes(4000), "Title", "of what"))


def test_bars_are_as_long_as_their_bytes() -> None:
    picture = drawn(("a", 4000), ("b", 1000), ("c", 0))
    bars = [bar for bar in picture.iter(f"{SVG}rect") if bar.get("class") == "F"]
    widths = [float(bar.get("width", "")) for bar in bars]
    assert [round(width / widths[0], 3) for width in widths] == [1, 0.25, 0]
    assert len({bar.get("x") for bar in bars}) == 1
    assert [text.text for text in picture.iter(f"{SVG}text")] == [
        *("Title", "of what"), *("a", "4 kB"), *("b", "1 kB"), *("c", "0 kB"),
    ]


def test_nothing_is_outside_and_nothing_overlaps() -> None:
    picture = drawn(("x" * 200, 4000), ("b", 1000))
    width, height = float(picture.get("width", "")), float(picture.get("height", ""))
    texts = list(picture.iter(f"{SVG}text"))[2:]
    assert [len(text.text or "") for text in texts[::2]] == [64, 1]
    for name, amount, bar in zip(texts[::2], texts[1::2], list(picture.iter(f"{SVG}rect"))[1:]):
        start = float(bar.get("x", ""))
        end = start + float(bar.get("width", ""))
        assert 0 <= float(name.get("x", "")) - len(name.text or "") * 13 * 0.62
        assert float(name.get("x", "")) < start
        assert end < float(amount.get("x", "")) < width - 60
        assert float(bar.get("y", "")) + float(bar.get("height", "")) < height


def test_a_picture_without_bars() -> None:
    assert [text.text for text in drawn().iter(f"{SVG}text")] == ["Title", "of what"]
