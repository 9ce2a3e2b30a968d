"""Visit: one stage on one micro-batch, and which of its layers are regions, for ``pipeline.py`` and ``step.py``.

Layers may change an input of their stage in place, such as ``ReLU(inplace=True)`` as the first layer of a stage. But a
replay must start from the same input as the forward, and the input of the first stage belongs to the caller. So the
stage works on a copy of that input, made inside the region. The first run of a stage in a mode (``_mode_of``) copies
all its inputs, and notes which of them it changes. Inference tensors have no versions that tell: all are copied.

If an input shares memory with another tensor that crosses a cut, a copy would give other results than the plain layers.
Changing such an input is an error in the forward.

The backward of a change in place has other layouts, and so sums in other orders, where a view is changed. So an input
that was a view, and that a copy or a cut has made no view, is one again for the layers.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, check, raise_fault
from torchckpt.pipe.microbatch import MicroBatch
from torchckpt.pipe.partition import Mode, Stage
from torchckpt.pipe.run.links import copy_of, has_strides
from torchckpt.pipe.skip import Name, Skips, StageSkips, stasher_behind
from torchckpt.planning import Action
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import DEFAULT, Options
from torchckpt.regions.private import storage_key
from torchckpt.regions.state.layout import NamesModules, layout_of
from torchckpt.tensors import PutBack, copy_attributes, hides_tensors, tensors_of, tensors_of_pair

__all__ = ["InFlight", "Memory", "Part", "Regions", "Replay", "StageCall", "Visited", "of_caller", "visit"]


class Part(NamedTuple):
    """Consecutive layers of a stage, on one micro-batch."""

    stage: Stage
    frame: Frame | None
    """The frame of the region that they are; None: their activations are kept."""


class Replay(Protocol):
    """What an action R of a pipeline runs: a frame, or several."""

    def recompute(self) -> None: ...


class Regions:
    """The regions of each visit. Here all layers of a stage are one.

    Args:
        is_recomputed: maps a stage and a micro-batch to whether the visit is a region.
        options: the settings of the regions.
    """

    def __init__(self, is_recomputed: Callable[[int, int], bool], options: Options = DEFAULT) -> None:
        self._is_recomputed, self._options = is_recomputed, options

    def parts(self, stage: Stage, i: int) -> tuple[list[Part], Replay | None]:
        """The parts of a visit, in the order of their forwards; and what an R replays."""
        frame = Frame(self._options) if self._is_recomputed(stage.number, i) else None
        return [Part(stage, frame)], frame

    def acting(self, action: Action) -> AbstractContextManager[None]:
        """A context around an action."""
        return nullcontext()

    def forwarded(self, j: int, i: int, arrived: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Called behind the forward of a visit whose backward is that of the whole graph."""

    def finish(self) -> None:
        """Called when all actions of a step have run."""


class InFlight(NamedTuple):
    """A micro-batch before a stage."""

    transfers: Sequence[Any]
    """How its tensors come to the stage: ``Transfer`` of ``pipeline.py``, ``CutTensor`` of ``step.py``."""
    put_back: PutBack
    """Makes the arguments of the stage, (args, kwargs), from the tensors that have come."""
    skips: Skips
    memory: Memory


class Visited(NamedTuple):
    """A micro-batch behind a stage."""

    tensors: tuple[Tensor, ...]
    """The tensors that leave the stage, in its output or as skips."""
    put_back: PutBack
    """Makes (output, skips) from as many tensors."""
    skips: Skips
    memory: Memory

    def onward(
        self,
        tensors: tuple[Tensor, ...],
        stash: Callable[[Tensor], Any],
        send: Callable[[tuple[Tensor, ...]], Sequence[Any]],
    ) -> InFlight:
        """The micro-batch before the next stage.

        Args:
            tensors: those that leave, as the engine has passed them on.
            stash: says how a skip comes to the stage that pops it.
            send: says how the tensors of the output come to the next stage.
        """
        output, stashed = self.put_back(tensors)
        for name, tensor in stashed.items():
            self.skips.sent(name, tensor, stash(tensor))
        tensors, put_back = tensors_of_pair(((output,), {}))
        return InFlight(send(tensors), put_back, self.skips, self.memory)


def of_caller(batch: MicroBatch, stages: Sequence[Stage], transfer: Callable[[Tensor], Any]) -> InFlight:
    """``batch`` before the first of ``stages``. ``transfer`` says how each of its tensors comes there."""
    tensors, put_back = tensors_of_pair((batch.args, batch.kwargs))
    skips = Skips(partial(stasher_behind, [layer for stage in stages for layer in stage.layers]))
    return InFlight(list(map(transfer, tensors)), put_back, skips, Memory.of_caller(tensors))


def visit(
    parts: Sequence[Part],
    batch: InFlight,
    arrived: tuple[Tensor, ...],
    fetch: Callable[[Any], Tensor],
    stash: Callable[[Tensor], Any],
    is_cut: bool,
    is_last: bool,
) -> Visited:
    """Run a stage on a micro-batch.

    Args:
        parts: all layers of the stage. Between parts nothing is moved or cut.
        arrived: the tensors of ``batch``, at the stage.
        fetch: moves a skip to the stage.
        stash: says how a skip comes from one part to whoever pops it.
        is_cut: whether tensors between stages are moved, or their graph ends there. If not, the layers may work on
            their inputs directly: autograd itself sees their in-place changes.
    """
    passed: frozenset[int] | None = batch.skips.enter(arrived if len(parts) > 1 else ())
    for part in parts[:-1]:
        visited = _visit_part(part, batch, arrived, fetch, passed, is_cut, goes_to_cut=False)
        batch = visited.onward(visited.tensors, stash, send=list)
        arrived, passed = tuple(batch.transfers), None
    visited = _visit_part(parts[-1], batch, arrived, fetch, passed, is_cut, goes_to_cut=not is_last)
    batch.skips.enter(())
    return visited


def _visit_part(
    part: Part,
    batch: InFlight,
    arrived: tuple[Tensor, ...],
    fetch: Callable[[Any], Tensor],
    passed: frozenset[int] | None,
    is_cut: bool,
    goes_to_cut: bool,
) -> Visited:
    """``passed``: of the first part, the indices of its inputs that are skips for later ones; None: it is a later one.
    """
    stage, frame = part
    memory = batch.memory
    if passed:
        memory = memory._replace(shared=memory.shared | passed)
    if frame is not None:  # its replay needs them, and what comes next may have no frame
        memory = memory._replace(kept=frozenset(range(len(arrived))))
    on_copies = bool(memory.kept)
    shared = memory.shared if on_copies or (is_cut and passed is not None) else None
    uncopied = memory.shared if passed is None else passed
    call = StageCall(stage, StageSkips(batch.skips, fetch), on_copies, shared, uncopied, memory.views - uncopied)
    args, kwargs = batch.put_back(arrived)
    output, stashed = call(*args, **kwargs) if frame is None else frame.forward(call, args, kwargs)
    check(_output_faults(stage, output, is_cut and goes_to_cut))
    tensors, put_back = tensors_of_pair((output, stashed))
    if batch.skips.are_any:
        leaving = tensors_of(output)[0]
        memory = memory.on_leaving(leaving, [*stashed.values(), *batch.skips.in_flight()], arrived)
    elif any(memory) or len(tensors) > 1 or any(tensor._is_view() for tensor in tensors):  # false of most stages
        memory = memory.on_leaving(tensors, (), arrived)
    return Visited(tensors, put_back, batch.skips, memory)


def _output_faults(stage: Stage, output: object, is_cut: bool) -> list[Fault]:
    """The faults of the ``output`` of ``stage``. ``is_cut``: its tensors are moved, or their graph ends here."""
    if isinstance(output, Tensor) and output.device == stage.device:
        return []
    leaves = pytree.tree_leaves(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    hidden = [type(leaf).__name__ for leaf in leaves if hides_tensors(leaf)] if is_cut else []
    if hidden:
        rule = "a stage returns tensors in a container that torch's pytree does not know, unlike list, tuple and dict"
        works = "a layer that returns a dict; or torch.utils._pytree.register_pytree_node for that class"
        return [Fault(rule, f"a {hidden[0]} that has tensors, from {stage.__qualname__}", works)]
    if not tensors:
        rule = "a stage returns no tensor, and nothing that holds one"
        works = "a last layer in the stage that returns a tensor"
        return [Fault(rule, f"{type(output).__name__}, from {stage.__qualname__}", works)]
    elsewhere = sorted({str(tensor.device) for tensor in tensors if tensor.device != stage.device})
    if elsewhere:
        received = f"a tensor on {', '.join(elsewhere)}, from {stage.__qualname__} on {stage.device}"
        works = "a layer that makes its tensors on the device of its input: torch.zeros(n, device=x.device)"
        return [Fault("the output of a stage is not on its device", received, works)]
    return []


# in place -------------------------------------------------------------------------------------------------------------

_Watched: TypeAlias = dict[int, tuple[Tensor, int]]
"""The inputs of a forward that were not changed yet, by index, each with its version."""


class StageCall(NamesModules):
    """One stage on one micro-batch, as a function of the arguments, in its forward and in its replays. It returns the
    output, and the skips that leave.

    Args:
        on_copies: whether the layers work on copies of the inputs that they change.
        shared: the indices of inputs that share memory with other tensors that cross a cut; None: all changes are
            allowed.
        uncopied: the indices of inputs that other parts of a stage read, too. None of these is copied: sums of three
            gradients round otherwise behind a copy.
        views: the indices of others that were views when they left their stage.
    """

    def __init__(
        self,
        stage: Stage,
        skips: StageSkips,
        on_copies: bool,
        shared: Collection[int] | None,
        uncopied: frozenset[int],
        views: frozenset[int],
    ) -> None:
        self._stage, self._skips, self._shared, self._uncopied, self._views = stage, skips, shared, uncopied, views
        self._known = stage.in_place if on_copies else None
        self._mode: Mode = ()
        self._copied: frozenset[int] | None = frozenset()  # None: all
        self._is_forward = True
        self.region_modules = stage.modules
        self.__qualname__ = stage.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[Name, Tensor]]:
        is_forward, self._is_forward = self._is_forward, False
        if self._shared is None and not self._views:
            arguments = tensors_of_pair((args, kwargs))[0] if self._skips.are_any else ()
            return self._skips.run(partial(self._run, args, kwargs, None), arguments)
        tensors, put_back = tensors_of_pair((args, kwargs))
        if is_forward and self._known is not None:
            self._mode = _mode_of(self, tensors)
            self._copied = self._known.get(self._mode)
        places = range(len(tensors)) if self._copied is None else self._copied
        # A leaf that requires grad cannot be changed in place where there are gradients.
        is_graded = torch.is_grad_enabled()
        leaves = {place for place in places if is_graded and tensors[place].requires_grad and tensors[place].is_leaf}
        copied = {*places} - leaves - self._uncopied
        if copied:
            tensors = tuple(copy_of(tensor) if n in copied else tensor for n, tensor in enumerate(tensors))
        if is_forward:
            viewed = self._views if is_graded else ()
            self._views = frozenset(n for n in viewed if has_strides(tensors[n]) and not tensors[n]._is_view())
        if self._views:
            # view_as() may change the stride of a dimension of size one.
            views = {n: copy_attributes(tensors[n], tensors[n][...]) for n in self._views}
            tensors = tuple(views.get(n, tensor) for n, tensor in enumerate(tensors))
        if copied or self._views:
            args, kwargs = put_back(tensors)
        if not is_forward or self._shared is None:
            return self._skips.run(partial(self._run, args, kwargs, None), tensors)
        watched = {n: (x, x._version) for n, x in enumerate(tensors) if not x.is_inference()}
        is_first, is_told = self._copied is None, len(watched) == len(tensors)
        result = self._skips.run(partial(self._run, args, kwargs, watched), tensors)
        if is_first and is_told and self._known is not None:
            self._known[self._mode] = frozenset(range(len(tensors))) - watched.keys()
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], watched: _Watched | None) -> Any:
        for layer in self._stage.layers:
            self._skips.layer = layer
            args, kwargs = (layer.module(*args, **kwargs),), {}
            if watched:
                self._note_changes(watched, layer)
        return args[0]

    def _note_changes(self, watched: _Watched, layer: object) -> None:
        """Note which inputs ``layer`` has changed, or raise."""
        for place, (tensor, version) in tuple(watched.items()):
            if tensor._version == version:
                continue
            del watched[place]
            if place in (self._shared or ()):
                self._refuse(place, layer, "it shares memory with another tensor or with a skip")
            if self._known is not None and self._copied is not None and place not in self._copied:
                self._known[self._mode] = self._copied | {place}
                self._refuse(place, layer, "the first run of the stage in this mode did not change it")

    def _refuse(self, place: int, layer: object, why: str) -> NoReturn:
        rule = "a stage changes an input in place that something else may read"
        received = f"tensor {place} of {self._stage.__qualname__}, changed by {layer}: {why}"
        works = "the operation out of place, such as ReLU(inplace=False) or x = x + 1"
        raise_fault(Fault(rule, received, works), "Pipe")


def _mode_of(call: StageCall, tensors: Sequence[Tensor]) -> Mode:
    """What may decide which of ``tensors`` the layers change: gradients, leaves, and what is in training."""
    layout = layout_of(call)
    training = () if layout is None else (bool(of.get("training")) for of in layout[0].dicts)
    leaves = (is_true for tensor in tensors for is_true in (tensor.requires_grad, tensor.is_leaf))
    return torch.is_grad_enabled(), len(tensors), *leaves, *training


def shared_places(leaving: Sequence[Tensor], others: Iterable[Tensor] = ()) -> frozenset[int]:
    """The indices of the tensors in ``leaving`` that share memory with each other or with ``others``."""
    homes: dict[int | None, list[int]] = {}
    for place, tensor in [*enumerate(leaving), *((-1, other) for other in others)]:
        homes.setdefault(storage_key(tensor), []).append(place)
    homes.pop(None, None)
    return frozenset(place for places in homes.values() if len(places) > 1 for place in places if place >= 0)


_NONE: frozenset[int] = frozenset()


class Memory(NamedTuple):
    """What else has the memory of the tensors that go from one stage to the next, as indices of these tensors."""

    shared: frozenset[int] = _NONE
    """Tensors that share memory with others that cross a cut, or with skips."""
    kept: frozenset[int] = _NONE
    """Tensors in the memory of the caller's tensors, or of inputs that an earlier region still needs for its replay."""
    views: frozenset[int] = _NONE
    """Tensors that are views, until they are copied or cut."""

    @classmethod
    def of_caller(cls, tensors: Sequence[Tensor]) -> Memory:
        shared = shared_places(tensors) if len(tensors) > 1 else _NONE
        return cls(shared, frozenset(range(len(tensors))), _views_of(tensors))

    def on_leaving(self, leaving: Sequence[Tensor], in_flight: Sequence[Tensor], arrived: Sequence[Tensor]) -> Memory:
        """The memory of the tensors ``leaving`` a stage that got ``arrived``, while the skips ``in_flight`` exist."""
        is_alone, views = len(leaving) < 2 and not in_flight and not self.shared, _views_of(leaving)
        if is_alone and not self.kept:
            return Memory(views=views)
        others = [*in_flight, *(arrived[place] for place in self.shared)]
        shared = _NONE if is_alone else shared_places(leaving, others)
        homes = [storage_key(arrived[place]) for place in self.kept]
        stays = [n for n, tensor in enumerate(leaving) if (key := storage_key(tensor)) is not None and key in homes]
        return Memory(shared, frozenset(stays), views)


def _views_of(tensors: Sequence[Tensor]) -> frozenset[int]:
    return frozenset(place for place, tensor in enumerate(tensors) if tensor._is_view())
