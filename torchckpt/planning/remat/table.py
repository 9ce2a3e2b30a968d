"""Table: a plan as text, a line per module, rows of like modules as one.

A row of ``layers.0.mlp`` and one of ``layers.1.mlp`` with the same numbers are one row, ``layers.*.mlp`` of two; where
the numbers differ, the rows say which: ``layers.0-13.mlp``, ``layers.14-23.mlp``. Numbers are of all together.
"""
from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from html import escape
from itertools import groupby

from torchckpt.errors import Fault, called, raise_fault
from torchckpt.planning.draw.canvas import clipped
from torchckpt.planning.draw.units import aligned, number, percent, prefix, units_of_bytes
from torchckpt.planning.remat.flow.dataflow import Dataflow, Schedule, repeats
from torchckpt.planning.remat.flow.memory import simulate

__all__ = ["Row", "page", "plan_rows", "table"]

_MOST_ROWS = 28
_LONGEST_NAME = 40
_NUMBERS = re.compile(r"[\d,-]+|\*")


@dataclass(frozen=True)
class Row:
    """A row of a plan's table: one module of a traced step, or ``count`` of them.

    Args:
        name: a dotted path, such as ``layers.3.mlp``.
        kept_bytes: what the plan saves of its forward for the backward.
        dropped_bytes: what the eager step saves of it, and the plan does not.
        recomputed_count: how many repeats of its operations the plan has.
        recomputed_flops: what these repeats cost.
        count: of modules.
    """

    name: str
    kept_bytes: int = 0
    dropped_bytes: int = 0
    recomputed_count: int = 0
    recomputed_flops: int = 0
    count: int = 1


@called("plan_rows()")
def plan_rows(flow: Dataflow, schedule: Schedule, paths: Sequence[str]) -> list[Row]:
    """A row per module that saves, drops or recomputes something, in the order of the forward. ``paths``: of each
    operation, the module that it belongs to. An ArgumentError, if the schedule is none of this dataflow, or if there is
    not one path for each operation."""
    if len(paths) != len(flow.operations):
        rule = f"there is not one path for each of {len(flow.operations)} operations"
        raise_fault(Fault(rule, f"{len(paths)} paths", "[op.name for op in flow.operations]"))
    saved, eager = simulate(flow, schedule).saved, simulate(flow, flow.eager).saved
    rows = [Row(paths[flow.writer[storage]], kept_bytes=flow.sizes_bytes[storage]) for storage in saved]
    dropped = set(eager) - set(saved)
    rows += [Row(paths[flow.writer[storage]], dropped_bytes=flow.sizes_bytes[storage]) for storage in sorted(dropped)]
    flops = ((index, flow.operations[index].repeat.flops) for index in repeats(schedule))
    rows += [Row(paths[index], recomputed_count=1, recomputed_flops=cost) for index, cost in flops]
    order = {path: place for place, path in reversed([*enumerate(paths)])}
    return sorted(_merged(rows, [row.name for row in rows], max), key=lambda row: order[row.name])


def table(rows: Iterable[Row], amounts: Mapping[str, int], recompute_share: float) -> str:
    """``amounts`` over ``rows``, at most 100 columns wide and 40 lines long.

    Siblings with the same numbers are one row. Where that leaves too many rows, siblings are one row whatever their
    numbers; where that does, too, modules are told with the one that holds them; at last, only the largest are.
    ``amounts``: bytes by name; the others are told as shares of the ``eager peak``. ``recompute_share``: the seconds of
    repeats, as a share of the eager step's.
    """
    shown = _shortened(list(rows))
    total = _sum("total", shown)
    units = units_of_bytes(max((max(row.kept_bytes, row.dropped_bytes) for row in shown), default=0))
    letter, flops = prefix(max((row.recomputed_flops for row in shown), default=0))
    cells = [("module", "", f"saved {units.memory}", f"dropped {units.memory}", "repeats", f"recompute {letter}FLOP")]
    for row in (*shown, total):
        name = clipped(row.name, _LONGEST_NAME, tail=True)
        count = "" if row is total or row.count == 1 else f"x{row.count}"
        memory = (_or_dash(row.kept_bytes / units.bytes), _or_dash(row.dropped_bytes / units.bytes))
        cells.append((name, count, *memory, _or_dash(row.recomputed_count), _or_dash(row.recomputed_flops / flops)))
    return f"{_head(amounts, recompute_share)}\n\n{aligned(cells)}"


def _head(amounts: Mapping[str, int], recompute_share: float) -> str:
    units, eager = units_of_bytes(max(amounts.values())), amounts["eager peak"]
    shares = [_share(amount / eager, "eager") if eager else "" for amount in amounts.values()]
    cells = [(name, units.of_memory(amount), share) for (name, amount), share in zip(amounts.items(), shares)]
    return aligned([*cells, ("recompute", "", _share(recompute_share, "the eager step's time"))])


def _share(share: float, of: str) -> str:
    return f"{percent(share):>7} of {of}".ljust(34)


def _or_dash(value: float) -> str:
    return number(value) if value else "-"


def _shortened(rows: list[Row]) -> list[Row]:
    """The first of the ways to say ``rows`` in few, the most telling one first, that is short enough."""
    deepest = max((row.name.count(".") + 1 for row in rows), default=1)
    for depth in range(deepest, 0, -1):
        cut = _merged(rows, [".".join(row.name.split(".")[:depth]) for row in rows], max)
        for shorter in (_collapsed(cut), _merged(cut, [_pattern_of(row) for row in cut], sum)):
            if len(shorter) <= _MOST_ROWS:
                return shorter
    largest = sorted(shorter, key=lambda row: (-row.kept_bytes - row.dropped_bytes, -row.recomputed_flops))
    others = _sum("others", largest[_MOST_ROWS - 1 :])
    return [*(row for row in shorter if row in largest[: _MOST_ROWS - 1]), others]


def _collapsed(rows: list[Row]) -> list[Row]:
    """Siblings with the same numbers as one, from the innermost out; then siblings beside one another."""
    order = {pattern: place for place, pattern in reversed([*enumerate(map(_pattern_of, rows))])}
    for place in range(max((row.name.count(".") for row in rows), default=0), -1, -1):
        rows = _collapsed_at(place, rows)
    return sorted(rows, key=lambda row: order[_pattern_of(row)])


def _collapsed_at(place: int, rows: list[Row]) -> list[Row]:
    like: dict[tuple[object, ...], list[Row]] = {}
    siblings: dict[tuple[tuple[str, ...], tuple[str, ...]], set[int]] = {}
    for row in rows:
        before, part, after = _split(row.name, place)
        key: tuple[object, ...] = (row.name,)
        if part.isdecimal():
            siblings.setdefault((before, _pattern(after)), set()).add(int(part))
            key = (before, after, *astuple(row)[1:])
        like.setdefault(key, []).append(row)
    collapsed = []
    for group in like.values():
        before, part, after = _split(group[0].name, place)
        if len(group) > 1:
            numbers = {int(_split(row.name, place)[1]) for row in group}
            part = "*" if numbers == siblings[before, _pattern(after)] else _ranges(numbers)
        collapsed.append(_sum(".".join((*before, part, *after)) if part else group[0].name, group))
    return collapsed


def _split(name: str, place: int) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    parts = tuple(name.split("."))
    return parts[:place], "".join(parts[place : place + 1]), parts[place + 1 :]


def _pattern(parts: Iterable[str]) -> tuple[str, ...]:
    return tuple("*" if _NUMBERS.fullmatch(part) else part for part in parts)


def _pattern_of(row: Row) -> str:
    return ".".join(_pattern(row.name.split(".")))


def _ranges(numbers: Iterable[int]) -> str:
    """``0-13,20``"""
    ascending = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ranges = ([number for _, number in pairs] for _, pairs in ascending)
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in ranges)


def _merged(rows: Iterable[Row], names: Iterable[str], count: Callable[[Iterable[int]], int]) -> list[Row]:
    by_name: dict[str, list[Row]] = {}
    for row, name in zip(rows, names):
        by_name.setdefault(name, []).append(row)
    return [replace(_sum(name, like), count=count(row.count for row in like)) for name, like in by_name.items()]


def _sum(name: str, rows: Sequence[Row]) -> Row:
    return Row(name, *(sum(column) for column in zip(*(astuple(row)[1:] for row in rows)))) if rows else Row(name)


def page(picture: str, title: str, table: str) -> str:
    """The SVG as an image, since its styles would be those of the whole page; under it the table, folded."""
    data = b64encode(picture.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(title)}" style="max-width: 100%"/>'
    return f"{image}\n<details><summary>{escape(title)}</summary><pre>{escape(table)}</pre></details>"
