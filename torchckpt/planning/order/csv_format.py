"""CSV format: schedules as CSV, in the format of torch.distributed.pipelining: a row per rank, a cell per action.

An empty cell is a bubble. Actions that torch adds for communication (``0SEND_F1``, ``0WAIT_SEND_F1``, ``0UNSHARD`` and
the like) are skipped. A pair that may overlap, ``(0F3;7B0)OVERLAP_F_B``, is read as two actions, one after the other.
"""
from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import NamedTuple

from torchckpt.errors import Fault, called, check, raise_fault
from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.order.validity import Misplaced, check_schedule

__all__ = ["from_csv", "to_csv"]

_ACTION = re.compile(r"(\d{1,99})([FBIWR])(\d{1,99})")  # of 4300 digits Python makes no number
_PASSED_OVER = re.compile(r"\d+((WAIT_)?(REDUCE_GRAD|SEND_F|SEND_B)|UNSHARD|RESHARD|RECV_F|RECV_B)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


class _Cell(NamedTuple):
    text: str
    line: int
    column: int

    @property
    def where(self) -> str:
        return f"line {self.line}, column {self.column}"


def to_csv(schedule: Schedule) -> str:
    """``schedule`` as CSV, without bubbles.

    >>> print(to_csv(one_f_one_b(2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.ranks)


@called("from_csv()")
def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule that ``text`` describes. A stage is on the rank whose row has its actions.

    >>> [str(action) for action in from_csv("0F0,,0B0").ranks[0]]
    ['0F0', '0B0']

    Raises:
        ArgumentError: an action is unknown, missing, duplicated, or stands before an action that it depends on. The
            message has line and column, both from 1; the column counts cells.
    """
    if not isinstance(text, str):
        raise_fault(Fault("the schedule is not text", repr(text), "Path('schedule.csv').read_text()"))
    rows = [[(action, cell) for cell in row for action in _actions(cell.text)] for row in _cells(text)]
    parsed = [row for row in rows if row]  # a blank line is no rank
    unknown = [cell for row in parsed for action, cell in row if action is None]
    rule = "this is no action: a stage, one of F B I W R, and a micro-batch"
    check([Fault(f"{cell.where}: {rule}", repr(cell.text), "'0F3'") for cell in unknown])
    orders = [[(action, cell) for action, cell in row if action is not None] for row in parsed]
    check(_beyond(orders))
    check(_gaps({action.stage for row in orders for action, _ in row}))
    schedule = _schedule(name, tuple(tuple(action for action, _ in row) for row in orders))

    def where(action: Misplaced) -> str:
        if action.position is None:
            return f"line {orders[action.rank][0][1].line}"
        return orders[action.rank][action.position][1].where

    check_schedule(schedule, where)
    return schedule


def _cells(text: str) -> list[list[_Cell]]:
    rows = enumerate(csv.reader(io.StringIO(text.rstrip())), start=1)
    return [[_Cell(cell.strip(), line, column) for column, cell in enumerate(row, start=1)] for line, row in rows]


def _actions(text: str) -> Iterator[Action | None]:
    """The actions in a cell; None for text that is no action."""
    if not text or _PASSED_OVER.fullmatch(text):
        return
    overlap = _OVERLAP.fullmatch(text)
    for part in overlap[1].split(";") if overlap else [text]:
        match = _ACTION.fullmatch(part.strip())
        yield Action(int(match[1]), Kind(match[2]), int(match[3])) if match else None


def _beyond(orders: list[list[tuple[Action, _Cell]]]) -> Iterator[Fault]:
    # Every stage runs every micro-batch, so a valid number is below the count of actions. A huge one would fill memory.
    count = sum(map(len, orders))
    for order in orders:
        for action, cell in order:
            if max(action.stage, action.micro_batch) >= count:
                wrong = f"{cell.where}: a number is too large; stages and micro-batches count from 0, without gaps"
                yield Fault(wrong, repr(cell.text), "'0F0'")


def _gaps(stages: set[int]) -> Iterator[Fault]:
    missing = sorted(set(range(max(stages, default=-1) + 1)) - stages)
    if missing or not stages:
        rule = "a stage has no actions; stages are numbered from 0"
        received = f"none of stage {', '.join(map(str, missing))}" if stages else "no action"
        yield Fault(rule, received, "0F0,0B0")


def _schedule(name: str, ranks: tuple[tuple[Action, ...], ...]) -> Schedule:
    homes: dict[int, int] = {}
    for rank, order in enumerate(ranks):
        for action in order:
            homes.setdefault(action.stage, rank)
    micro_batches = 1 + max(action.micro_batch for order in ranks for action in order)
    return Schedule(name, ranks, tuple(homes[stage] for stage in range(len(homes))), micro_batches)
