"""By hand: the schedule of one rank, as a text."""
from __future__ import annotations

from torchckpt.planning import Action, Kind, Schedule

__all__ = ["actions", "one_rank"]


def actions(text):
    return tuple(Action(int(word[0]), Kind(word[1]), int(word[2:])) for word in text.split())


def one_rank(text, m):
    return Schedule("by hand", (actions(text),), (0,), m)
