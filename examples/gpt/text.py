"""Text: the training text, which is the source code of Python's standard library."""
from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["VOCABULARY", "Text", "decode", "encode"]

VOCABULARY = 96
"""The characters: a line end, and ASCII from blank to tilde."""


def encode(text: str) -> Tensor:
    """A character's number: 0 for a line end, 1 to 95 for blank to tilde."""
    return (torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).long() - 31).clamp(min=0)


def decode(codes: Tensor) -> str:
    return "".join(chr(code + 31) if code else "\n" for code in codes.tolist())


class Text:
    """Up to ``limit`` characters of the standard library, in the order of its file names."""

    def __init__(self, limit: int = 3_000_000) -> None:
        self._codes = encode(_sources(limit))

    def batch(self, step: int, rows: int, length: int, device: str) -> tuple[Tensor, Tensor]:
        """The mini-batch of a step, always the same one: characters, and at each place the next character."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self._codes) - length, (rows, 1), generator=generator)
        window = self._codes[starts + torch.arange(length + 1)].to(device)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _sources(limit: int) -> str:
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_text(encoding="utf-8", errors="replace").expandtabs(4)
    return "".join(character for character in text if character == "\n" or " " <= character <= "~")[:limit]
