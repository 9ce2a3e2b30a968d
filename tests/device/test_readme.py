"""The page about the device: its example runs."""
from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import torch


def test_the_example(sim):
    text = (Path(__file__).parent / "README.md").read_text()
    example = dedent(text.split("simulator  # in a conftest.py")[1].split("\n\n", 2)[1])
    names = {"torch": torch}
    exec(example, names)
    names["test_who_reads_waits"](sim)
