from __future__ import annotations

from xml.etree import ElementTree

from torchckpt.planning.draw.canvas import Canvas


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
