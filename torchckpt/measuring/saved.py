"""Saved: the bytes that one visit of a stage saves, by region; a frame and a scope that have them counted.

What calls are called with counts as well, but for what of it a call does not need if it is kept.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.planning import Stage, fixed
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options
from torchckpt.regions.core.scope import AroundRegion, Keep, Scope
from torchckpt.regions.private import alive, use_count
from torchckpt.regions.saved import storage_of, storages_of, telling_of_saved
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = ["CountedFrame", "CountingScope", "Inputs", "RegionBytes"]


class Inputs:
    """The inputs of the calls of a forward, which come one after the other and are recomputed.

    The boundary of a call holds its inputs. If the call is kept instead, an input is freed that nobody else holds and
    that no call saves, as one in half precision of which a norm saves a copy in float32.
    """

    def __init__(self) -> None:
        self.claimed: set[Any] = set()
        """The storages of all inputs."""
        self._new: dict[int, list[tuple[weakref.ref[Tensor], dict[Any, int]]]] = {}
        """By call, those that it was the first to be called with, and their storages with their bytes."""
        self._freed: dict[int, dict[Any, int]] = {}
        """By call, the storages of inputs that its boundary alone held when the next call began."""

    def begin(self, call: int, tensors: Iterable[Tensor]) -> int:
        """Note that ``call``, a number, begins with ``tensors``. Returns the bytes that no call before it had."""
        self._freed[call - 1] = self._alone(call - 1)
        sizes = {tensor: storage_of(tensor) for tensor in tensors}
        new = {key: size for each in sizes.values() for key, size in each.items() if key not in self.claimed}
        self._new[call] = [(weakref.ref(tensor), each) for tensor, each in sizes.items() if each.keys() <= new.keys()]
        self.claimed.update(new)
        return sum(new.values())

    def unsaved_bytes(self, call: int, saved: Container[Any]) -> int:
        """The bytes of inputs that are freed if ``call`` is kept, where calls have ``saved`` these storages."""
        return sum(size for key, size in self._freed.get(call, {}).items() if key not in saved)

    def freed_bytes(self, call: int, own: Container[Any], saved: Container[Any]) -> int:
        """The bytes of inputs that go with the boundary of ``call``, which has saved its ``own`` storages, and that
        other calls hold beyond that if they are kept, as they have ``saved`` these."""
        return sum(size for key, size in self._alone(call).items() if key in saved and key not in own)

    def _alone(self, call: int) -> dict[Any, int]:
        """The storages of inputs that the boundary of ``call`` alone holds now."""
        dead = [item for tensor, sizes in self._new.get(call, []) if alive(tensor) is None for item in sizes.items()]
        return {key: size for key, size in dead if use_count(key) == 1}


class RegionBytes:
    """Counts the bytes that one forward saves, and later the replays of its regions.

    Parameters and buffers do not count, nor do storages that are not new. Each storage counts once. What others hold
    from a forward to its replay, as autocast holds the weights that it casts, is there in each plan, and of no region.

    Args:
        modules: those of the stage.
        is_new: returns whether a storage was made in this step.
    """

    def __init__(self, modules: Iterable[nn.Module], is_new: Callable[[StorageWeakRef], bool]) -> None:
        self._modules, self._is_new, self._is_in_region = tuple(modules), is_new, False
        self._before_bytes = self._after_bytes = 0.0  # outside of regions
        self._boundary_bytes: list[float] = []  # by region, what stays if it is recomputed
        self._inner_bytes: list[float] = []  # by region, what stays beside that if it is kept
        self._inputs = Inputs()
        self._seen: set[StorageWeakRef] = set()
        self._dropped: set[StorageWeakRef] = set()
        """Those that frames of forwards have dropped. A replay that saves one again has found it alive."""
        self._saved: set[StorageWeakRef] = set()
        """Those that are saved even if all regions are kept."""
        self._pass_over_parameters()

    @property
    def stage(self) -> Stage:
        """The bytes of the stage, without seconds. Each region is a block."""
        blocks = []
        for region, (boundary, inner) in enumerate(zip(self._boundary_bytes, self._inner_bytes)):
            freed = max(inner - min(boundary, self._inputs.unsaved_bytes(region, self._saved)), 0.0)
            blocks.append(replace(fixed(), saved_bytes=boundary + freed, boundary_bytes=boundary))
        return Stage(tuple(blocks), fixed(saved_bytes=self._before_bytes), fixed(saved_bytes=self._after_bytes))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context around the forward of the stage."""
        with telling_of_saved(self._note):
            yield
        self._inputs.begin(len(self._boundary_bytes), ())  # for the last region: nothing comes after it

    @contextmanager
    def region(self, arguments: Any) -> Iterator[None]:
        """A context around the forward of a region."""
        self._inputs.begin(len(self._boundary_bytes), tensors_in(arguments))
        self._is_in_region = True
        self._boundary_bytes.append(0.0)
        self._inner_bytes.append(0.0)
        try:
            yield
        finally:
            self._is_in_region = False

    def frame(self, options: Options) -> Frame:
        """A frame for the next region."""
        return CountedFrame(options, self)

    def drop(self, tensor: Tensor) -> None:
        """Note the storages of a tensor that the frame of a region drops."""
        self._dropped |= storage_of(tensor).keys()

    def replayed(self, region: int, frame: Frame) -> None:
        """Count the saved tensors of a region. Call it right after the replay."""
        self._pass_over_parameters()  # which may be gathered from other ranks only now
        tensors = [tensor for saved in frame.recomputed for tensor, _ in saved]
        self._saved.update(storages_of(tensors))
        self._seen |= self._dropped
        self._inner_bytes[region] = self._claimed(tensors)

    def _note(self, tensor: Tensor) -> None:
        whole = tensor if tensor._base is None else tensor._base
        claimed_bytes = 0.0 if isinstance(whole, nn.Parameter) else self._claimed([tensor])
        if self._is_in_region:  # a region's forward saves only its boundary
            self._boundary_bytes[-1] += claimed_bytes
            return
        self._saved.update(storages_of([tensor]))
        if not self._boundary_bytes:
            self._before_bytes += claimed_bytes
        else:
            self._after_bytes += claimed_bytes

    def _pass_over_parameters(self) -> None:
        tensors = (tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers()))
        self._seen |= storages_of(tensors).keys()

    def _claimed(self, tensors: Sequence[Tensor]) -> float:
        """The bytes of the storages of ``tensors`` that were not counted before."""
        sizes = storages_of(tensors).items()
        new = {storage: size for storage, size in sizes if storage not in self._seen and self._is_new(storage)}
        self._seen |= new.keys()
        return float(sum(new.values()))


class CountedFrame(Frame):
    """A frame of a counted step.

    Args:
        saved: counts what it saves. None: nothing does.
        ended: called when its forward has ended.
    """

    def __init__(self, options: Options, saved: RegionBytes | None, ended: Callable[[], object] | None = None) -> None:
        super().__init__(options)
        self._saved, self._ended = saved, ended
        self.note = None if saved is None else saved.drop

    def forward(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with nullcontext() if self._saved is None else self._saved.region((args, kwargs)):
            outputs = super().forward(function, args, kwargs)
        if self._ended is not None:
            self._ended()
        return outputs


class CountingScope(Scope):
    """A scope that has the bytes counted that one forward saves, and later the replays of its regions.

    Args:
        saved: counts them. Its ``replayed()`` is to be called right after each replay.
    """

    def __init__(self, keep: Keep, around: AroundRegion, saved: RegionBytes) -> None:
        super().__init__(keep, around)
        self.saved, self.frame = saved, saved.frame

    @property
    def stage(self) -> Stage:
        """The bytes of the stage, without seconds. A stage that keeps its activations is one block."""
        stage = self.saved.stage
        return Stage((replace(fixed(), saved_bytes=stage.saved_bytes),)) if self.keep else stage

    @contextmanager
    def entered(self) -> Iterator[None]:
        with super().entered(), self.saved.counted():
            yield
