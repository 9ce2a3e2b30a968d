"""Named schedules: look up a schedule by its name, as a command line or a configuration file gives it."""
from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from torchckpt.errors import Fault, raise_faults
from torchckpt.model.schedule import schedules
from torchckpt.model.schedule.counts import whole
from torchckpt.model.schedule.schedule import Schedule

__all__ = ["NAMES", "named_schedule"]

_ONE_STAGE: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "eager_1f1b": schedules.eager_one_f_one_b,
    "zbv": schedules.zbv,
    "dualpipe_v": schedules.dualpipe_v,
}
_CHUNKED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved_1f1b": schedules.interleaved_one_f_one_b,
    "looped_bfs": schedules.looped_bfs,
    "zero_bubble": lambda ranks, chunks, m: schedules.zero_bubble(ranks, m, chunks=chunks),
}
_IN_TORCH = {"interleavedzerobubble": "zero_bubble", "zbvzerobubble": "zbv"}

NAMES = (*_ONE_STAGE, *_CHUNKED)


def named_schedule(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """A schedule by its name.

    >>> named_schedule("1F1B", 4, 8).name
    '1f1b'

    Args:
        name: one of ``NAMES``, or torch's name of the schedule. Case, ``-``, ``_`` and a leading ``Schedule`` are
            ignored.
        chunks: stages per rank, for schedules in which this number is free. Default: 2; for ``zero_bubble`` 1.

    Raises:
        ArgumentError: the name is unknown, or the counts do not fit the schedule.
    """
    key = _key(name) if isinstance(name, str) else ""
    found = _IN_TORCH.get(key) or next((known for known in NAMES if key == _key(known)), None)
    raise_faults("named_schedule()", _faults(name, found, chunks))
    if found in _ONE_STAGE:
        return _ONE_STAGE[found](ranks, micro_batches)
    if chunks is None:
        chunks = 1 if found == "zero_bubble" else 2
    return _CHUNKED[str(found)](ranks, chunks, micro_batches)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removeprefix("schedule")


def _faults(name: object, found: str | None, chunks: int | None) -> list[Fault]:
    faults = []
    if found is None:
        keys = {_key(known): known for known in NAMES} | _IN_TORCH
        close = get_close_matches(_key(str(name)), keys, n=1, cutoff=0.0)
        faults.append(Fault(f"a schedule is one of {', '.join(NAMES)}", repr(name), repr(keys[close[0]])))
    elif found in _ONE_STAGE and chunks is not None:
        works = f"{found!r} without chunks, or 'interleaved_1f1b'"
        faults.append(Fault(f"{found!r} fixes its number of stages per rank", f"chunks={chunks!r}", works))
    if chunks is not None:
        faults.extend(whole("chunks", chunks))
    return faults
