"""Schedules: the pipeline schedules of the literature, as data.

``p`` is the number of stages where every rank has one, ``m`` the number of micro-batches. Schedules with several
stages on a rank take ``ranks`` instead. Where torch.distributed.pipelining has a schedule of the same name, the order
of actions is the same.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches

from torchckpt.errors import Fault, called, check
from torchckpt.planning.order.schedule import Action, Schedule, enough, in_turn, phases, visits, whole

__all__ = [
    "CHUNKS", "FOLDED", "NAMES", "SPLIT", "dualpipe_v", "eager_one_f_one_b", "full_name", "gpipe",
    "interleaved_one_f_one_b", "looped_bfs", "named_schedule", "one_f_one_b", "zbv", "zero_bubble",
]


@called("gpipe()")
def gpipe(p: int, m: int, *, last_first: bool = False) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    >>> [str(action) for action in gpipe(2, 2).ranks[1]]
    ['1F0', '1F1', '1B0', '1B1']

    Args:
        last_first: run the backward of the last micro-batch first, as torchgpipe does. Default: False, the first
            micro-batch first, as torch does.
    """
    check([*whole("p", p), *whole("m", m)])
    return _breadth_first("gpipe", p, 1, m, last_first)


@called("one_f_one_b()")
def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B (PipeDream-Flush): stage j runs ``p - 1 - j`` forwards ahead, then one forward and one backward in turn
    (Narayanan et al. 2021, arXiv:2006.09503).

    >>> [str(action) for action in one_f_one_b(2, 2).ranks[0]]
    ['0F0', '0F1', '0B0', '0B1']

    Raises:
        ArgumentError: unless ``m >= p``.
    """
    check(enough("1F1B", m, "p", p))
    return _depth_first("1f1b", p, 1, m)


@called("eager_one_f_one_b()")
def eager_one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B with twice the forwards ahead, ``2 (p - 1 - j)``, so that messages travel while other micro-batches are
    computed. It pays if recomputation makes a micro-batch in flight cheap (Zhuang et al. 2023, arXiv:2211.05322).

    Raises:
        ArgumentError: unless ``m >= p``.
    """
    check(enough("eager 1F1B", m, "p", p))
    return _depth_first("eager_1f1b", p, 1, m, pace=2)


@called("interleaved_one_f_one_b()")
def interleaved_one_f_one_b(ranks: int, chunks: int, m: int) -> Schedule:
    """Interleaved 1F1B: ``chunks`` stages on each rank, depth first (Narayanan et al. 2021, arXiv:2104.04473).

    Micro-batches run in rounds of ``ranks``; if ``ranks`` does not divide ``m``, in rounds of ``m / (m // ranks)``.

    Raises:
        ArgumentError: unless all rounds have the same number of micro-batches.
    """
    check(_even_rounds(ranks, chunks, m))
    return _depth_first("interleaved_1f1b", ranks, chunks, m, pace=2)


@called("looped_bfs()")
def looped_bfs(ranks: int, chunks: int, m: int) -> Schedule:
    """Looped BFS: GPipe with ``chunks`` stages on each rank, breadth first. The backward of the last micro-batch runs
    first (Lamy-Poirier 2023, arXiv:2211.05953)."""
    check([*whole("ranks", ranks), *whole("chunks", chunks), *whole("m", m)])
    return _breadth_first("looped_bfs", ranks, chunks, m, last_first=True)


@called("zero_bubble()")
def zero_bubble(ranks: int, m: int, *, chunks: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients fill the bubbles, at the memory of 1F1B (Qi et al. 2024, arXiv:2401.10241).

    Rank j runs the weight gradients of a micro-batch j backwards after its input gradients. With several ``chunks``
    (stages on each rank), the order is that of torch's ``ScheduleInterleavedZeroBubble``. Default: 1 chunk.

    Raises:
        ArgumentError: unless all rounds have the same number of micro-batches.
    """
    check(_even_rounds(ranks, chunks, m))
    return _depth_first("zero_bubble", ranks, chunks, m, is_split=True)


@called("zbv()")
def zbv(ranks: int, m: int) -> Schedule:
    """ZB-V: rank ``r`` has the stages ``r`` and ``2 ranks - 1 - r``. Split backwards leave no bubble if forward, input
    gradients and weight gradients take equally long (Qi et al. 2024, arXiv:2401.10241, section 6)."""
    check([*whole("ranks", ranks), *whole("m", m)])
    full = max(m, 2 * ranks - 1)

    def plan(rank: int) -> list[tuple[int, str]]:
        up = ranks - rank
        return [
            (2 * up - 1, "Fa"),
            (rank, "Fb Fa"),
            (up, "Fb Ib Wb"),
            (full - ranks, "Fa Ia Wa Fb Ib Wb"),
            (rank, "Ia Ib"),
            (up, "Ia Wa"),
            (full, "Wb"),
            (full, "Wa"),
        ]

    return _folded("zbv", ranks, m, plan)


@called("dualpipe_v()")
def dualpipe_v(ranks: int, m: int) -> Schedule:
    """DualPipeV: a forward of one half of the V overlaps a backward of the other half (DeepSeek-AI 2024,
    arXiv:2412.19437, cut in half as in github.com/deepseek-ai/DualPipe). Here such pairs run one after the other.

    Raises:
        ArgumentError: unless ``m >= 2 ranks``.
    """
    check(enough("DualPipeV", m, "ranks", ranks, factor=2))

    def plan(rank: int) -> list[tuple[int, str]]:
        up = ranks - 1 - rank
        turns = ["ba"[turn % 2] for turn in range(2 * (rank + 1))]
        return [
            (2 * up, "Fa"),
            (rank + 1, "Fa Fb"),
            (up, "Ib W Fb"),
            (m - 2 * ranks + rank + 1, "Fa Bb Fb Ba"),
            (up, "Bb Fb Ba"),
            (1, " ".join("B" + chunk for chunk in turns[: rank + 1])),
            (1, " ".join("I" + chunk for chunk in turns[rank + 1 :])),
            (up, "W Ia"),
            (rank + 1, "W"),
        ]

    return _folded("dualpipe_v", ranks, m, plan)


def _breadth_first(name: str, ranks: int, chunks: int, m: int, last_first: bool) -> Schedule:
    """All forwards, then all backwards, of the first or of the last one first."""

    def order(rank: int) -> Iterable[Action]:
        forwards = visits(range(rank, ranks * chunks, ranks), m, m)
        return in_turn(forwards, forwards[::-1] if last_first else forwards, ahead=len(forwards))

    return _looped(name, ranks, chunks, m, order)


def _depth_first(name: str, ranks: int, chunks: int, m: int, pace: int = 1, is_split: bool = False) -> Schedule:
    """Rounds of micro-batches, each through all stages of a rank, forwards and backwards in turn. A rank runs ``pace``
    forwards ahead for each rank behind it, and a round for each of its stages but one. If backwards are split, rank j
    runs weight gradients j backwards later."""
    together = m // max(1, m // ranks)

    def order(rank: int) -> Iterable[Action]:
        stages = range(rank, ranks * chunks, ranks)
        forwards, backwards = visits(stages, m, together), visits(stages[::-1], m, together)
        ahead = (chunks - 1) * together + pace * (ranks - 1 - rank)
        return in_turn(forwards, backwards, ahead, weights_behind=rank if is_split else None)

    return _looped(name, ranks, chunks, m, order)


def _looped(name: str, ranks: int, chunks: int, m: int, order: Callable[[int], Iterable[Action]]) -> Schedule:
    """A schedule with stage j on rank ``j mod ranks``."""
    placement = tuple(stage % ranks for stage in range(ranks * chunks))
    return Schedule(name, tuple(tuple(order(rank)) for rank in range(ranks)), placement, m)


def _folded(name: str, ranks: int, m: int, plan: Callable[[int], list[tuple[int, str]]]) -> Schedule:
    """A schedule in a V: the stages go from the first rank to the last (chunk a), and back to the first (chunk b)."""
    orders = (phases(plan(rank), {"a": rank, "b": 2 * ranks - 1 - rank}, m) for rank in range(ranks))
    return Schedule(name, tuple(map(tuple, orders)), (*range(ranks), *range(ranks)[::-1]), m)


def _even_rounds(ranks: int, chunks: int, m: int) -> list[Fault]:
    faults = [*whole("ranks", ranks), *whole("chunks", chunks), *whole("m", m)]
    if faults or m % max(1, m // ranks) == 0:
        return faults
    near = (other for distance in range(m) for other in (m + distance, m - distance))
    works = next(other for other in near if other % max(1, other // ranks) == 0)
    rule = "the micro-batches do not divide into m // ranks rounds of equal size"
    return [Fault(rule, f"m={m}, ranks={ranks}: {m // ranks} rounds", f"m={works}, the nearest")]


_ONE_STAGE: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}
_CHUNKED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved_1f1b": interleaved_one_f_one_b,
    "looped_bfs": looped_bfs,
    "zero_bubble": lambda ranks, chunks, m: zero_bubble(ranks, m, chunks=chunks),
}
_IN_TORCH = {"interleavedzerobubble": "zero_bubble", "zbvzerobubble": "zbv"}

NAMES = (*_ONE_STAGE, *_CHUNKED)
CHUNKS = {"interleaved_1f1b": 2, "looped_bfs": 2, "zero_bubble": 1}
"""Schedules whose number of stages a rank is free, with its default."""
FOLDED = ("zbv", "dualpipe_v")
"""Schedules whose stages go over the ranks there and back."""
SPLIT = ("zero_bubble", "zbv", "dualpipe_v")
"""Schedules with split backwards."""


@called("named_schedule()")
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
    known = full_name(name)
    check(_faults(name, known, chunks))
    if known in _ONE_STAGE:
        return _ONE_STAGE[known](ranks, micro_batches)
    known_name = str(known)
    return _CHUNKED[known_name](ranks, CHUNKS[known_name] if chunks is None else chunks, micro_batches)


def full_name(name: object) -> str | None:
    """Which of ``NAMES`` a name is that may be torch's, or written in another way; None if it is none."""
    key = _key(name) if isinstance(name, str) else ""
    return _IN_TORCH.get(key) or next((each for each in NAMES if key == _key(each)), None)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removeprefix("schedule")


def _faults(name: object, known: str | None, chunks: int | None) -> Iterator[Fault]:
    if known is None:
        keys = {_key(each): each for each in NAMES} | _IN_TORCH
        close = get_close_matches(_key(str(name)), keys, n=1, cutoff=0.0)
        yield Fault(f"the schedule is not one of {', '.join(NAMES)}", repr(name), repr(keys[close[0]]))
    elif known in _ONE_STAGE and chunks is not None:
        rule = f"chunks are given, but {known!r} fixes its number of stages per rank"
        yield Fault(rule, f"chunks={chunks!r}", f"{known!r} without chunks, or 'interleaved_1f1b'")
    if chunks is not None:
        yield from whole("chunks", chunks)
