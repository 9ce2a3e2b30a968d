"""Frame: the state that the forward of a region and its replay share.

The forward hands every tensor that autograd saves to the frame, which drops it and leaves the graph node a slot. The
replay runs the function again and fills the slots. A slot belongs to its node, so a recomputed tensor lives as long as
a saved tensor does in eager: it is freed with the node in a plain backward, and kept while the graph is kept
(``retain_graph``, a backward split into input and weight). So a frame is filled only once, for any number of backwards.
"""
from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor

from torchckpt.modules import name_of
from torchckpt.regions.core.call import Call, Stop, comes_of_stop, goes_on, inside
from torchckpt.regions.core.difference import Difference, compiled_anew, differs
from torchckpt.regions.core.kept import KeptCalls
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.slots import PlacedSlot, Slot
from torchckpt.regions.devices import SyncPoint
from torchckpt.regions.flags import local
from torchckpt.regions.places import holders_behind, place_of
from torchckpt.regions.private import (
    dispatch_modes_are_active,
    functorch_is_active,
    hooks_entered,
    keep_from_dynamo,
    look_through,
    mutation_is_allowed,
    newest_node,
    outside_transforms,
    set_version,
    settings_of_torch,
)
from torchckpt.regions.saved import held
from torchckpt.regions.state.ambient import Ambient, Generator, RandomState
from torchckpt.regions.state.module_state import ModuleState
from torchckpt.regions.state.norms import is_in_call, note_caller
from torchckpt.regions.state.reached import DYNAMO, compilations, is_settled
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = ["Around", "Frame", "SavedTensors", "observers"]

observers: list[Callable[[str], object]] = []
"""Functions that are called with the name of a region after its replay (``torchckpt.testing`` adds one)."""

SavedTensors: TypeAlias = list[tuple[Tensor, int]]
"""Saved tensors in the order of their slots, each with its version when it was saved."""

Around: TypeAlias = Callable[["Frame"], AbstractContextManager[None]]

_RLock = type(threading.RLock())  # the type: threading.RLock itself is a Python function


class Frame:
    """One region in one forward. ``forward()`` is called once, ``recompute()`` by whoever comes first.

    The nodes of the region's graph hold the frame, through their hooks. It holds the call until the replay is done,
    and the slots until they are filled.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.checks = options.determinism_check != "none"
        """Whether the replay is compared with the forward."""
        self._by_values = options.determinism_check == "values"
        """Whether the user asked that values are compared."""
        self._values = self._by_values
        """Whether slots have checksums."""
        self._sampled = False
        """Whether those without have a sample of the values."""
        of_all = settings_of_torch["_checkpoint_debug_enabled"]
        self._slot: type[Slot] = PlacedSlot if (options.debug if of_all is None else of_all) else Slot
        self._call: Call | None = None
        self._slots: list[Slot] = []
        self._in_norm = False
        """Whether a known norm layer has saved the last vector. A tensor that is no vector ends that."""
        self._returned = False  # whether the forward has returned: no slots will be added
        self._sync_point: SyncPoint | None = None
        self._lock = _RLock()
        self.ambient: deque[Ambient] = deque()
        """At most one element, passed from forward to replay: the settings and random numbers of the forward."""
        self.recomputed: deque[SavedTensors] = deque()
        """At most one element, passed from replay to backward: the tensors that the replay saved."""
        self.around: Around | None = None
        """A context around the replay. It gets the frame, whose ``recomputed`` is full at its end."""
        self.kept: KeptCalls | None = None
        """The results that ``keep`` recorded in the forward, for the replay (kept.py)."""
        self.note: Callable[[Tensor], None] | None = None
        """Called with each tensor that the forward saves and drops. None: nothing is called."""
        self.tail: Callable[[], object] | None = None
        """Called where the replay could stop, which then runs on to its end. None: it stops there."""

    def forward(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``function``, drop what autograd saves, and return the outputs."""
        call = self._call = Call(function, args, kwargs, self._options)
        if self.checks and not (call.is_alone or is_settled(function) or dispatch_modes_are_active()):
            self._values = True  # the replay may compile code, which then saves other tensors
        self._sampled = self.checks and call.note_hidden()  # a function may change them, as one that fills a cache
        self._compilations = compilations.total or (DYNAMO in sys.modules and compilations.look())
        last = newest_node() if self._slot is PlacedSlot else 0
        outputs = call.forward(args, kwargs, self.ambient, self._pack, self._unpack, self._values)
        self._returned = True
        if self._slot is PlacedSlot:
            _name_operations(outputs, last)
        if call.named:
            _tell_outer_regions(self.ambient[0][1])
        if not self._slots or self._slots[-1].tensor is not None:  # nothing was saved, or all is there already
            self._call, self._slots, self.kept = None, [], None
            self.ambient.clear()
        return outputs

    @property
    def saved(self) -> int:
        """How many tensors the forward has saved so far."""
        return len(self._slots)

    @property
    def module_state(self) -> ModuleState | None:
        """The parameters and buffers that the call found on its modules."""
        return None if self._call is None else self._call.module_state

    @property
    def generators(self) -> list[Generator]:
        """The generators whose states a replay sets."""
        return [generator for _, random in self.ambient for generator, _ in random]

    def replays(self, generator: Generator, _: Any) -> bool:
        """Whether the running replay has set the state of ``generator``."""
        return generator in self.generators

    @property
    def is_recomputed(self) -> bool:
        """Whether the replay is done, or there is nothing to replay."""
        return self._returned and self._call is None

    @property
    def function(self) -> Function | None:
        """The function that the replay will run; None when the replay is done."""
        return None if self._call is None else self._call.function

    def recompute(self) -> None:
        """Run the replay. The first caller does the work, others wait for it. If it raises, the next tries again."""
        with self._lock:
            call, slots = self._call, self._slots
            if call is None or self.recomputed or not slots or slots[-1].tensor is not None:
                return
            if self.around is None:
                self.recomputed.append(self._replay(call, slots))
            else:
                with self.around(self):
                    self.recomputed.append(self._replay(call, slots))
            if call.devices:
                self._sync_point = SyncPoint(call.devices)  # before slots are filled, which are read without the lock
            if self._returned:
                self._call = self.kept = None
                self.ambient.clear()
            for observer in observers:
                observer(name_of(call.function))

    def fill_slots(self) -> None:
        """Move the recomputed tensors into their slots. From then on each lives as long as the node that saved it."""
        with self._lock:
            if not self.recomputed:
                return
            for slot, (tensor, version) in zip(self._slots, self.recomputed.popleft()):
                if slot.tensor is None:
                    slot.version, slot.tensor = version, tensor
            if self._call is None:
                self._slots = []

    def _pack(self, tensor: Tensor) -> Slot:
        if tensor.dim() != 1:
            self._in_norm = False
        elif not self._in_norm and not tensor.requires_grad:  # it may be a running mean
            known, caller = {} if self._call is None else self._call.means, sys._getframe().f_back
            if caller is not None:  # None where the engine calls, in a backward that keeps its graph
                self._in_norm = (id(tensor) in known and is_in_call(caller)) or note_caller(caller)
        total = compilations.total or (DYNAMO in sys.modules and compilations.look())
        if total != self._compilations and self.checks:
            self._values = True
        if self.note is not None:
            self.note(tensor)
        # A mode of selective checkpointing would note the operators of a sample, too, which a replay does not run.
        slot = self._slot(tensor, self._values, self._sampled and not dispatch_modes_are_active())
        self._slots.append(slot)
        return slot

    def _unpack(self, slot: Slot) -> Tensor:
        if slot.tensor is None:
            self.recompute()
            self.fill_slots()
        tensor = slot.unpack()
        if self._sync_point is not None:
            self._sync_point.wait_before_using((tensor,))
        return tensor

    def _unpack_in_replay(self, tensor: Tensor) -> Tensor:
        # A method, so that hooks.py finds the frame from the hooks in force.
        return tensor

    def _replay(self, call: Call, slots: list[Slot]) -> SavedTensors:
        """Run the function again. Return the tensors that it saves, in the order of ``slots``, with their versions.

        The last is followed by Stop, unless it is what the function returns: the exception would take longer. With a
        ``tail`` the function goes on; an error that it raises from then on is ignored.
        """
        total = len(slots)
        checked = self.checks
        compiled = compilations.total
        copies = mutation_is_allowed()  # the function may change what it has saved
        # A function may run a backward itself, before its forward has returned. Then not all slots exist yet.
        stops = self._options.early_stop or not self._returned
        fresh: SavedTensors = []
        finds_others = checked and call.finds_other_tensors()
        by_values = self._by_values or finds_others
        different: list[Difference] = []  # at most one, which is raised when its operation is known, or at the end

        def pack(tensor: Tensor) -> Tensor:
            if different:
                if different[0].is_named_by([tensor]):
                    raise Stop
                return tensor.detach()
            place = len(fresh)
            if place < total:
                saved = set_version(tensor.detach().clone(), tensor._version) if copies else held(tensor)
                again = slots[place].of_forward(saved) if slots[place].ragged else saved
                if checked:
                    replay = local.thread.flags[2] if compilations.total != compiled else None
                    compiles = replay is not None and replay.compiles
                    if compiles and not self._values:
                        raise compiled_anew(call.function)
                    if not slots[place].accepts(tensor if again is saved else again, by_values or compiles):
                        caller = sys._getframe().f_back
                        different.append(Difference(slots[place], tensor, place_of(caller, call.function)))
                        return saved
                fresh.append((again, again._version))
                if place + 1 < total or not stops or goes_on(tensor, sys._getframe().f_back, call):
                    return saved
                if self.tail is not None:
                    self.tail()
                    return saved
            elif checked and not stops:
                different.append(Difference(None, tensor, place_of(sys._getframe().f_back, call.function)))
                return tensor.detach()
            raise Stop

        look_through(pack)
        if self.kept is not None:
            self.kept.begin(fresh)
        outputs = None
        try:
            replay = inside(outside_transforms(), call.replay) if functorch_is_active() else call.replay
            outputs = replay(self.ambient[0], pack, self._unpack_in_replay)
        except Exception as error:
            if not different and (len(fresh) < total or not stops or not comes_of_stop(error)):
                if self.kept is not None:
                    self.kept.begin(None)
                raise
        if self.kept is not None and not different:
            self.kept.end(call.function, checked)
        if not different and len(fresh) < total:  # the function ended before its time
            different.append(Difference(slots[len(fresh)]))
        if different:
            different[0].is_named_by(tensors_in(outputs))
            raise differs(call.function, slots, len(fresh), different[0], finds_others)
        return fresh


def _name_operations(outputs: Any, last: int) -> None:
    """Note the operations of the slots that nodes behind ``outputs`` hold, of those made after node ``last``."""
    for packed, operation in holders_behind(tensors_in(outputs), last + 1):
        if isinstance(packed, PlacedSlot):
            packed.operation = operation


def _tell_outer_regions(states: RandomState) -> None:
    """A replay of an outer region runs this region, too, and resets only the generators that it was given itself."""
    for _, unpack in hooks_entered():
        outer = getattr(unpack, "__self__", None)
        if isinstance(outer, Frame) and unpack == outer._unpack and outer._options.preserve_rng_state:
            known = outer.generators
            outer.ambient[0][1].extend(state for state in states if state[0] not in known)


keep_from_dynamo(Frame._pack, Frame._unpack, Frame.recompute, Frame._replay, Frame._unpack_in_replay)
look_through(Frame._pack)
