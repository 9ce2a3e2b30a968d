"""The schedules that have a name, as data: GPipe and 1F1B."""
from __future__ import annotations

from collections.abc import Iterator

from torchckpt.model.action import Action, Kind
from torchckpt.model.schedule import Schedule

__all__ = ["gpipe", "one_f_one_b"]


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    ranks = (tuple(Action(j, kind, i) for kind in kinds for i in range(m)) for j in range(p))
    return Schedule("gpipe", tuple(ranks), tuple(range(p)), m)


def one_f_one_b(p: int, m: int) -> Schedule:
    """Stage j runs ``p - 1 - j`` forwards ahead, then a forward and a backward in turn (Narayanan et al. 2021,
    arXiv:2006.09503, PipeDream-Flush)."""
    ranks = (tuple(_in_turn(j, m, ahead=p - 1 - j)) for j in range(p))
    return Schedule("1f1b", tuple(ranks), tuple(range(p)), m)


def _in_turn(stage: int, m: int, ahead: int) -> Iterator[Action]:
    for i in range(m + ahead):
        if i < m:
            yield Action(stage, Kind.FORWARD, i)
        if i >= ahead:
            yield Action(stage, Kind.BACKWARD, i - ahead)
