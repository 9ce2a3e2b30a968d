"""A picture, read back."""
from __future__ import annotations

import re
from collections.abc import Container
from itertools import islice
from typing import NamedTuple
from xml.etree import ElementTree

__all__ = ["Box", "Picture", "corners", "extent", "faults"]

SPACE = "{http://www.w3.org/2000/svg}"
NUMBER = r"(-?[\d.]+)"


class Box(NamedTuple):
    kind: str
    x: float
    y: float
    width: float
    height: float


class Picture:
    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.width, self.height = float(self.root.attrib["width"]), float(self.root.attrib["height"])
        self.words = list(self.root.iter(f"{SPACE}text"))
        self.title = str(self.root.findtext(f"{SPACE}title"))

    def texts(self, kind: str = "") -> list[str]:
        return [str(word.text) for word in self.words if not kind or kind in word.attrib.get("class", "").split()]

    def word(self, text: str) -> tuple[float, float]:
        (word,) = [word for word in self.words if word.text == text]
        return float(word.attrib["x"]), float(word.attrib["y"])

    def of(self, element: str, kind: str) -> list[dict[str, str]]:
        return [shape.attrib for shape in self.root.iter(SPACE + element) if shape.attrib.get("class") == kind]

    def boxes(self, kinds: Container[str]) -> list[Box]:
        """The boxes of paths of these kinds."""
        return [
            Box(path.attrib["class"], *map(float, numbers))
            for path in self.root.iter(f"{SPACE}path")
            if path.attrib["class"] in kinds
            for numbers in re.findall(rf"M{NUMBER},{NUMBER}h{NUMBER}v{NUMBER}h-[\d.]+z", path.attrib["d"])
        ]

    def corners(self, kind: str) -> list[tuple[float, float]]:
        return [corner for path in self.of("path", kind) for corner in corners(path["d"])]

    def colour(self, kind: str) -> str:
        colour = re.search(rf"\.{kind}{{fill:(#\w+)}}", self.root.findtext(f"{SPACE}style") or "")
        assert colour
        return colour[1]


def corners(drawn: str) -> list[tuple[float, float]]:
    """The corners of a path; of small boxes and ticks, one."""
    places: list[tuple[float, float]] = []
    for command, values in re.findall(r"([MHV])([-\d.,]+)", drawn):
        numbers = [float(value) for value in values.split(",")]
        x, y = places[-1] if places else (0.0, 0.0)
        places.append({"M": (numbers[0], numbers[-1]), "H": (numbers[0], y), "V": (x, numbers[0])}[command])
    return places


def extent(word: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, in a font as wide as they come."""
    kind = word.attrib.get("class", "").split()
    sizes = {"title": 18.0, "name": 15.0, "facts": 14.0, "small": 12.0, "budgeted": 11.0}
    size = next((sizes[name] for name in sizes if name in kind), 12.0 if "style" in word.attrib else 13.0)
    width = len(str(word.text)) * size * 0.6
    x, y = float(word.attrib["x"]), float(word.attrib["y"])
    before, after = (width, 0.0) if "end" in kind else (width / 2, width / 2) if "middle" in kind else (0.0, width)
    if "transform" in word.attrib:  # up
        return x - size * 0.75, y - after, x, y + before
    return x - before, y - size * 0.75, x + after, y


def faults(picture: Picture) -> list[object]:
    """The texts and boxes that overlap, and whatever is outside of the frame."""
    texts = [(*extent(word), str(word.text)) for word in picture.words]
    boxes = [(x, y, x + w, y + h, kind) for kind, x, y, w, h in picture.boxes((*"FBIWR", "there", "back"))]
    shapes: list[tuple[float, ...]] = [box[:4] for box in (*texts, *boxes)]
    shapes += [(x, y, x, y) for path in picture.root.iter(f"{SPACE}path") for x, y in corners(path.attrib["d"])]
    for rect in picture.root.iter(f"{SPACE}rect"):
        x, y, width, height = (float(rect.attrib.get(name, 0)) for name in ("x", "y", "width", "height"))
        shapes.append((x, y, x + width, y + height))
    for line in picture.root.iter(f"{SPACE}line"):
        shapes += [(float(line.attrib[f"x{end}"]), float(line.attrib[f"y{end}"])) * 2 for end in "12"]
    outside = [
        shape for shape in shapes
        if shape[0] < 0 or shape[1] < 0 or shape[2] > picture.width + 0.01 or shape[3] > picture.height + 0.01
    ]
    return [*outside, *_overlapping(texts), *_overlapping(boxes)]


def _overlapping(boxes: list[tuple[float, float, float, float, str]]) -> list[object]:
    """Those that share more than a hundredth, to which coordinates are rounded."""
    boxes, overlapping = sorted(boxes), list[object]()
    for place, (_, top, right, bottom, name) in enumerate(boxes):
        for other in islice(boxes, place + 1, None):
            if other[0] >= right - 0.011:
                break
            if top < other[3] - 0.011 and other[1] < bottom - 0.011:
                overlapping.append((name, other))
    return overlapping
