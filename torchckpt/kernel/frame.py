"""Frame: the state that the forward of a region and its replay share.

The forward hands every tensor that autograd saves to the frame, which drops it and leaves the graph node a slot. The
replay runs the function again and fills the slots. A slot belongs to its node, so what fills it lives as long as
eager's saved tensor would: freed with the node in a plain backward, kept where the graph is kept (``retain_graph``, a
backward split into input and weight). So a frame is filled once, and nobody has to guess which backward is the last.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor

from torchckpt.errors import RecomputationError
from torchckpt.kernel.ambient import Ambient, Generator
from torchckpt.kernel.call import Call, Stop
from torchckpt.kernel.determinism import differs, name_of
from torchckpt.kernel.kept import Kept
from torchckpt.kernel.module_state import Seen
from torchckpt.kernel.options import Options
from torchckpt.kernel.private import keep_from_dynamo, look_through
from torchckpt.kernel.slots import Slot, describe
from torchckpt.kernel.streams import Trail
from torchckpt.typing import Function

__all__ = ["Around", "Frame", "Fresh", "observers"]

observers: list[Callable[[str], object]] = []
"""Each is called with the name of a region right after that was replayed (``torchckpt.testing`` counts with it)."""

Fresh: TypeAlias = list[tuple[Tensor, int]]
"""Saved tensors in the order of their slots, each with its version when it was saved."""

Around: TypeAlias = Callable[["deque[Fresh]"], AbstractContextManager[None]]

_RLock = type(threading.RLock())  # what threading.RLock(), a function in Python, makes


class Frame:
    """One region in one forward. ``forward()`` is called once, ``recompute()`` by whoever comes first.

    The nodes of the region's graph hold the frame, by their hooks. The frame holds the call and the slots until those
    are filled, and then nothing.
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_lock",
        "_options",
        "_returned",
        "_slots",
        "_trail",
        "ambient",
        "around",
        "kept",
        "recomputed",
    )

    def __init__(self, options: Options) -> None:
        self._options = options
        self._call: Call | None = None
        self._slots: list[Slot] = []
        self._returned = False  # whether the forward has, so that no more slots will come
        self._trail: Trail | None = None
        self._lock = _RLock()
        self.ambient: deque[Ambient] = deque()
        """Of one element, from the forward to the replay: what the call found around it."""
        self.recomputed: deque[Fresh] = deque()
        """Of one element, from the replay to the backward: what the function saved when it ran again."""
        self.around: Around | None = None
        """Entered around the replay, with ``recomputed``, which it fills."""
        self.kept: Kept | None = None
        """What ``keep`` has recorded in the forward, for the replay (keep.py)."""

    def forward(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._call = Call(function, args, kwargs, self._options)
        outputs = call.forward(args, kwargs, self.ambient, self._pack, self._unpack)
        self._returned = True
        if not self._slots or self._slots[-1].tensor is not None:  # nothing was saved, or all is there already
            self._call, self._slots, self.kept = None, [], None
            self.ambient.clear()
        return outputs

    @property
    def saved(self) -> int:
        """How many tensors the forward has saved so far."""
        return len(self._slots)

    @property
    def seen(self) -> Seen | None:
        """What the call found on its modules."""
        return None if self._call is None else self._call.seen

    @property
    def generators(self) -> list[Generator]:
        """Those that a replay puts back."""
        return [generator for generator, _ in self.ambient[0][1]]

    def replays(self, generator: Generator, _: Tensor) -> bool:
        """Whether the replay that is under way has put ``generator`` back."""
        return any(generator is one for one in self.generators)

    @property
    def checks(self) -> bool:
        """Whether the replay is held to what the forward did."""
        return self._options.determinism_check != "none"

    @property
    def is_recomputed(self) -> bool:
        """Whether the replay is done, or there is nothing to replay."""
        return self._returned and self._call is None

    @property
    def function(self) -> Function | None:
        """What the replay will run; None when it is done."""
        return None if self._call is None else self._call.function

    def recompute(self) -> None:
        """Run the replay. Idempotent: the first caller does the work, others wait for it and find it done."""
        with self._lock:
            call, slots = self._call, self._slots
            if call is None or self.recomputed or not slots or slots[-1].tensor is not None:
                return
            if self.around is None:
                self.recomputed.append(self._replay(call, slots))
            else:
                with self.around(self.recomputed):
                    self.recomputed.append(self._replay(call, slots))
            if call.devices:
                self._trail = Trail(call.devices)  # before the slots are filled, which are read without the lock
            if self._returned:
                self._call = self.kept = None
                self.ambient.clear()
            for observer in observers:
                observer(name_of(call.function))

    def let_go(self) -> None:
        """Give the slots what was recomputed: from then on each tensor lives as long as the node that saved it."""
        with self._lock:
            if not self.recomputed:
                return
            for slot, (tensor, version) in zip(self._slots, self.recomputed.popleft()):
                if slot.tensor is None:
                    slot.version, slot.tensor = version, tensor
            if self._call is None:
                self._slots = []

    def _pack(self, tensor: Tensor) -> Slot:
        slot = Slot(tensor, self._options.determinism_check == "values")
        self._slots.append(slot)
        return slot

    def _unpack(self, slot: Slot) -> Tensor:
        if slot.tensor is None:
            self.recompute()
            self.let_go()
        tensor = slot.take()
        if self._trail is not None:
            self._trail.followed((tensor,))
        return tensor

    def _same(self, tensor: Tensor) -> Tensor:
        # What unpacks in a replay: a method, so that hooks in force tell of which frame.
        return tensor

    def _replay(self, call: Call, slots: list[Slot]) -> Fresh:
        """What the function saves when it runs again, in the order of ``slots``, each with its version then."""
        total = len(slots)
        checked = self._options.determinism_check != "none"
        # A function that runs a backward itself unpacks before its forward has returned: the rest is not due yet.
        stops = self._options.early_stop or not self._returned
        fresh: Fresh = []
        different: list[str] = []  # what the replay saved instead, if anything: an exception would hold this list

        def pack(tensor: Tensor) -> Tensor:
            place = len(fresh)
            if place < total:
                # Without its graph, or it would keep that of the replay alive.
                kept = tensor if tensor.is_leaf else tensor.detach()
                if checked and not slots[place].accepts(tensor):
                    different.append(slots[place].compare(tensor))
                    raise _error(call, slots, place, different)
                fresh.append((kept, tensor._version))
                if place + 1 < total or not stops:
                    return kept
            elif checked and not stops:
                different.append(describe(tensor))
                raise _error(call, slots, place, different)
            raise Stop

        look_through(pack)
        if self.kept is not None:
            self.kept.begin(fresh)
        try:
            call.replay(self.ambient[0], pack, self._same)
        except Exception:
            if different or len(fresh) < total or not stops:
                if self.kept is not None:
                    self.kept.begin(None)
                raise
            # Or else the function caught a Stop, and this is what it made of it.
        if self.kept is not None and not different:
            self.kept.end(call.function, checked)
        if different or len(fresh) < total:  # the function caught the error, or ended before its time
            raise _error(call, slots, len(fresh), different)
        return fresh


def _error(call: Call, slots: list[Slot], place: int, different: list[str]) -> RecomputationError:
    nothing = "nothing, it had ended"
    forward = describe(slots[place]) if place < len(slots) else nothing
    return differs(call.function, place, len(slots), forward, different[0] if different else nothing)


keep_from_dynamo(Frame._pack, Frame._unpack, Frame._replay, Frame._same)
look_through(Frame._pack)
