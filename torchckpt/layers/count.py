"""Count: the bytes and seconds of one step, moment by moment, while it runs as the user's loop runs it.

No context is around a step: it begins at the first call, and ends with its last backward. On a device with an
allocator that counts, it is asked. Elsewhere operators are watched, by a mode under all others of a thread.
"""
from __future__ import annotations

import gc
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchckpt.layers.took import FIRST_BYTES, Call, Key, Took
from torchckpt.measuring.live import Watch
from torchckpt.measuring.saved import Inputs
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.devices import Clock
from torchckpt.regions.live import LiveStorages, allocator_of
from torchckpt.regions.moved.region import LEAST_BYTES
from torchckpt.regions.moved.slot import stays
from torchckpt.regions.private import after_backward, keep_from_dynamo, parametrized, put_under_modes
from torchckpt.regions.saved import storage_of, storages_of
from torchckpt.tensors import tensors_in

__all__ = ["Counter"]


class Kind(Enum):
    """What begins at a moment of a step."""

    STEP = "step"
    FORWARD = "forward"
    AFTER = "after a forward"
    REPLAY = "replay"
    TAIL = "what a replay need not run"
    BACKWARD = "backward"
    FREED = "others let go of what calls have saved"
    END = "end of a backward pass"


class Moment(NamedTuple):
    kind: Kind
    call: int
    """The number of the call in its step; -1 of a step or of its end."""
    highest_bytes: int
    """The most bytes since the moment before."""
    left_bytes: int
    seconds: float


class Inner(NamedTuple):
    """What a call holds if it is kept, beside its boundary."""

    size: int
    going: int
    """The bytes of it that can go to a host."""
    cached: Mapping[Any, int]
    """The storages of it that others hold until all forwards are done, and their bytes."""
    unsaved: int
    """The bytes of its boundary that it does not save, as half-precision inputs of which it saves copies in float32."""
    freed: int
    """The bytes of its boundary that are freed when it is replayed, but not if the call is kept that saves them."""

    @property
    def more(self) -> int:
        """The bytes that keeping it takes more than recomputing it. What goes and what is cached is never less."""
        return max(self.size - self.unsaved, self.going, sum(self.cached.values()))


class Counter:
    """Counts one step, from now on.

    Args:
        looks: whether operators may be watched. If not, and the device has no allocator that counts, only what autograd
            keeps of the calls counts.
        inputs, gathered: what the first call is given, and parameters that count, though they are there already.
    """

    def __init__(
        self, device: torch.device, looks: bool, model: nn.Module, inputs: Any, gathered: Sequence[nn.Parameter] = ()
    ) -> None:
        if allocator_of(device):
            gc.collect()  # what is freed in the middle of the step would count as freed by it
        self._live, self._clock = LiveStorages(device, looks, [*model.parameters()], inputs), Clock(device)
        self._watch, self.lost_bytes = Watch(), 0
        self._is_blind = not looks and not self._live.allocator
        self._moments: list[Moment] = []
        self._noted: dict[int, dict[Any, int]] = {}
        """By call, the storages that its forward saved, and their bytes."""
        self._going: set[Any] = set()
        """Those that a region could send to a host."""
        self._inner: dict[int, Inner] = {}
        self._returned: set[Any] = set()
        """The storages that calls have returned."""
        self._read: dict[int, dict[Any, int]] = {}
        """By call, what it has saved and neither got nor returned, and others held when the backward began."""
        self._lasting: set[Any] = set()
        """What calls have saved that others held when the last one returned, as autocast holds the weights it casts."""
        self._late = 0
        """The place of the first moment that may begin when nobody holds all of that."""
        self._outputs: dict[int, int] = {}
        """By call whose replay runs to its end, the bytes of its outputs that are no inputs."""
        self._begun: dict[dist.ProcessGroup, int] = {}
        """The collectives that had begun when a call last saved a tensor."""
        self._communicates_last = False
        """Whether the last call has communicated after that: another rank, which does not count, would stop there."""
        self._boundary: dict[int, int] = {}
        self._found: dict[int, Collection[Any]] = {}
        """By call, the weights that ``parametrize.cached()`` held before it: a region holds them, too."""
        self._inputs = Inputs()
        self._is_in_backward = self._is_broken = False
        self.groups: set[dist.ProcessGroup] = set()
        """Those in which forwards have communicated."""
        if looks and not self._live.allocator:
            put_under_modes(self._watch)
        self._stop = weakref.finalize(model, self._watch.stop)  # which the thread holds, and it holds this counter
        self._stop.atexit = False
        self._watch.live = self._live
        self._live.include(gathered)
        is_looked_at = self._live.is_sharded and not self._live.allocator
        self._model, self._sharded = weakref.ref(model), [*model.parameters()] if is_looked_at else []
        self._live.begin()
        self._note(Kind.STEP)

    def stop(self) -> None:
        """Watch no more."""
        self._stop()

    def note(self, call: int, tensor: Tensor) -> None:
        """Note the storages of a tensor that the frame of a call drops."""
        storages = storage_of(tensor)
        self._noted.setdefault(call, {}).update(storages)
        self._begun = _begun_collectives()
        if not stays(tensor, LEAST_BYTES):
            self._going.update(storages)

    @contextmanager
    def forward(self, call: int, arguments: Any) -> Iterator[None]:
        """A context around the forward of a call."""
        self._watch.live = self._live
        self._found[call] = storages_of([*parametrized["_cache"].values()])
        self._boundary[call] = self._inputs.begin(call, tensors_in(arguments))
        if self._is_blind:
            self._live.note(arguments)
        self._note(Kind.FORWARD, call)
        self._watch.in_backward, self._watch.before = self._settle, None
        begun, self._is_broken = _begun_collectives(), True
        yield
        now, self._is_broken = _begun_collectives(), False
        self.groups |= {group for group, number in now.items() if number != begun.get(group, 0)}
        self._communicates_last = now != self._begun
        self._note(Kind.AFTER, call)

    def stay(self, call: int, outputs: Any) -> None:
        """Note that a call has returned ``outputs``: they do not go, nor does what somebody else holds now."""
        tensors, noted = tensors_in(outputs), self._noted.get(call, {})
        sizes = storages_of(tensors)
        self._going.difference_update(sizes, [storage for storage in noted if not storage.expired()])
        self._returned.update(sizes)
        if not (self._is_blind or self._communicates_last):
            self._outputs[call] = sum(sizes[key] for key in sizes.keys() - self._inputs.claimed)
        if self._is_blind or self._inner:
            return
        saved = {*self._lasting, *noted} - self._inputs.claimed - sizes.keys()
        self._lasting = {storage for storage in saved if not storage.expired()}
        self._late, self._watch.before = len(self._moments) - 1, self._freed

    @contextmanager
    def replay(self, call: int, frame: Frame) -> Iterator[None]:
        """A context around the replay of a call, which fills ``frame.recomputed``. It shows what a forward takes that
        holds what it saves, so it runs to its end; but a tail that communicates would wait for other ranks."""
        self._settle()
        self._let_go()
        self._in_backward()
        self._note(Kind.REPLAY, call)
        if call in self._outputs:
            frame.tail = partial(self._note, Kind.TAIL, call)
        try:
            yield
        finally:
            frame.tail = None
        if self._is_blind:
            self._live.note([tensor for saved in frame.recomputed for tensor, _ in saved])
        self._note(Kind.BACKWARD, call)

    def backward(self, call: int, is_kept: bool) -> None:
        """Note that a backward reaches a call, which begins where the call was kept; else its replay may come first."""
        self._in_backward()
        if is_kept:
            self._note(Kind.BACKWARD, call)

    @property
    def is_complete(self) -> bool:
        """Whether no call has failed, and the last backward pass has ended."""
        return self._moments[-1].kind is Kind.END and not (self._is_broken or self._is_in_backward)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the step, without what was there before it and what came after its last backward pass."""
        return max(moment.highest_bytes for moment in self._moments)

    def took(self, key: Key) -> Took:
        """What the step took, whose calls were all recomputed. Waits for the device."""
        seconds = self._clock.reader()
        moments = [moment._replace(seconds=seconds(moment.seconds)) for moment in self._moments]
        return _took(moments, key, self._inner, self._boundary, self._outputs, self._late)

    def _note(self, kind: Kind, call: int = -1) -> None:
        model = self._model() if self._sharded else None
        parameters = () if model is None else zip(self._sharded, model.parameters())
        self._live.note([now for before, now in parameters if now is not before])  # gathered where nobody sees it
        highest = self._live.highest()
        self._live.begin()
        self._moments.append(Moment(kind, call, highest, self._live.now(), self._clock.stamp()))

    def _settle(self) -> None:
        """When a backward begins: what a forward has saved, and nothing else holds, is what keeping the call takes.

        Where operators are not watched, what is behind the last call has let go of its outputs by then, so they count.
        """
        self._watch.before = None
        fresh = [call for call in self._noted if call not in self._inner]
        saved: set[Any] = set().union(*self._noted.values()) if fresh else set()
        for call in fresh:
            dead = {storage: size for storage, size in self._noted[call].items() if storage.expired()}
            own = self._noted[call].keys() - dead.keys() - self._inputs.claimed - self._returned
            own.difference_update(self._found[call])
            if own:
                self._read[call] = {storage: self._noted[call][storage] for storage in own}
            going = (size for storage, size in dead.items() if storage in self._going)
            cached = {storage: size for storage, size in dead.items() if storage in self._lasting}
            unsaved = self._inputs.unsaved_bytes(call, saved)
            freed = self._inputs.freed_bytes(call, self._noted[call], saved)
            self._inner[call] = Inner(sum(dead.values()), sum(going), cached, unsaved, freed)

    def _let_go(self) -> None:
        """Before a replay: a loss that reads what is inside of calls (attentions) lets go of it, kept calls do not."""
        for call, read in self._read.items():
            gone = [storage for storage in read if storage.expired()]
            more = sum(map(read.pop, gone))
            self._inner[call] = self._inner[call]._replace(size=self._inner[call].size + more)

    def _freed(self) -> None:
        """Before an operator that is in no call: note where others have let go of what calls have saved."""
        if any(storage.expired() for storage in self._lasting):
            self._late, self._watch.before = len(self._moments), None
            self._note(Kind.FREED)

    def _in_backward(self) -> None:
        if not self._is_in_backward:
            self._is_in_backward, self._watch.live = True, self._live
            after_backward(self._ended)

    def _ended(self) -> None:
        self._is_in_backward = False
        model = self._model()
        self.lost_bytes = 0 if model is None else self._live.lost(model.parameters())
        self._note(Kind.END)  # what comes now is of the step if another backward of it does


keep_from_dynamo(Counter._ended)


def _begun_collectives() -> dict[dist.ProcessGroup, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torchckpt.ranks.private import begun_collectives  # which not every build of torch can import

    return begun_collectives()


_SECONDS = Call._fields[1:FIRST_BYTES]
_NONE = Inner(0, 0, {}, 0, 0)
_NOTHING = Moment(Kind.END, -1, 0, 0, 0.0)
"""In place of a call that was never replayed."""


def _took(
    moments: Sequence[Moment],
    key: Key,
    inner: Mapping[int, Inner],
    boundary: Mapping[int, int],
    outputs: Mapping[int, int],
    late: int,
) -> Took:
    """What a step took, of its moments. The calls that were never replayed are never worth keeping."""
    places = {(moment.kind, moment.call): place for place, moment in reversed(list(enumerate(moments)))}
    ends = [*moments[1:], _NOTHING]  # of what begins at a moment

    def part(kind: Kind, call: int) -> tuple[Moment, Moment]:
        place = places.get((kind, call))
        return (_NOTHING, _NOTHING) if place is None else (moments[place], ends[place])

    groups: dict[Any, list[tuple[float, float, float]]] = {}  # of calls with the same shapes, which save as much
    calls: list[Call] = []
    shared: list[list[tuple[float, float, float]]] = []
    for number, (_, layer, *shapes) in enumerate(key):
        (start, end), (replay, replayed) = part(Kind.FORWARD, number), part(Kind.REPLAY, number)
        (_, tail), (backward, done) = part(Kind.TAIL, number), part(Kind.BACKWARD, number)
        forward_seconds, replay_seconds = end.seconds - start.seconds, replayed.seconds - replay.seconds
        replay_seconds = min(replay_seconds, forward_seconds)  # which both run it
        is_replayed = (Kind.REPLAY, number) in places
        holds = inner.get(number, _NONE)
        alike = groups.setdefault((*shapes, *holds[:2]), []) if is_replayed else []
        alike.append((forward_seconds, replay_seconds * is_replayed, done.seconds - backward.seconds))
        rises = max(replayed.highest_bytes, tail.highest_bytes) - replay.left_bytes
        rises -= min(outputs.get(number, 0), end.left_bytes - start.left_bytes)  # which the forward has made, too
        calls.append(Call(
            layer,
            *alike[-1],
            boundary.get(number, 0),
            holds.more,
            end.highest_bytes,
            max(end.highest_bytes, end.left_bytes + rises),
            end.left_bytes,
            replayed.highest_bytes,
            done.highest_bytes + holds.freed,
            done.left_bytes,
            holds.going,
        ))
        shared.append(alike)
    for number, holds in inner.items():  # until the next call begins, others may hold its inputs
        place, taken = places.get((Kind.AFTER, number)), holds.size - holds.more
        if place is not None and ends[place].highest_bytes > moments[place].left_bytes:
            ends[place] = ends[place]._replace(highest_bytes=ends[place].highest_bytes + taken)
    moments = [moments[0], *ends[:-1]]
    replays = [places.get((Kind.REPLAY, number), -1) for number in range(len(key))]
    timed = (  # others were disturbed, as by kernels that are loaded when they are first used
        call._replace(**dict(zip(_SECONDS, map(min, zip(*alike))))) for call, alike in zip(calls, shared)
    )
    if any(later > place for place, later in pairwise(filter(lambda place: place >= 0, replays))):
        timed = (call._replace(moved_bytes=0.0) for call in timed)  # what goes comes back in reverse order
    return _with_cached(timed, moments, replays, inner, late)


def _with_cached(
    calls: Iterable[Call], moments: Sequence[Moment], replays: Sequence[int], inner: Mapping[int, Inner], late: int
) -> Took:
    """A step of these ``calls``, with what others held until the moment at place ``late`` began."""
    is_cached = any(each.cached for each in inner.values())
    if not is_cached or any(moment.kind is Kind.FORWARD for moment in moments[late:]):
        return Took(tuple(calls), tuple(_between(moments, replays, range(len(moments) - 1))))
    after = _between(moments, replays, range(late, len(moments) - 1))
    common: dict[int, Set[Any]] = {}
    found = []
    for number, (call, most) in enumerate(zip(calls, after[1:])):
        cached, before = inner.get(number, _NONE).cached, common.get(call.layer)
        shared = set() if before is None else cached.keys() & before
        common[call.layer] = cached.keys() if before is None else shared
        found.append(call._replace(
            cached_bytes=sum(cached.values()), shared_bytes=sum(cached[each] for each in shared), late_most=most
        ))
    first, *others = _between(moments, replays, range(late))
    return Took(tuple(found), (max(first, after[0]), *others))  # no call holds anything there


def _between(moments: Sequence[Moment], replays: Sequence[int], places: Iterable[int]) -> list[float]:
    """The most bytes while the first calls are alive and none of them runs, of what begins at these ``places``.

    Args:
        replays: the places of the replays of the calls.
    """
    until = [-place for place in accumulate(reversed(replays), max)][::-1]  # a call is alive until no later one is
    forwards = [place for place, moment in enumerate(moments) if moment.kind is Kind.AFTER]
    between = [0.0] * (len(replays) + 1)
    for place in places:
        start, end = moments[place : place + 2]
        alive = min(bisect_right(forwards, place), bisect_left(until, -place))
        is_apart = start.kind in (Kind.REPLAY, Kind.BACKWARD) and alive > start.call
        if is_apart or start.kind in (Kind.STEP, Kind.AFTER, Kind.FREED, Kind.END):
            between[alive] = max(between[alive], end.highest_bytes)
    return between
