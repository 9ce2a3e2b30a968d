"""Skips: tensors that go directly from one layer of a Sequential to a later layer, also across stages.

>>> class Down(torch.nn.Module):
...     def forward(self, x):
...         stash("features", x)
...         return torch.nn.functional.avg_pool1d(x, 2)
>>> class Up(torch.nn.Module):
...     def forward(self, x):
...         return torch.nn.functional.interpolate(x, scale_factor=2) + pop("features")

Works in a plain ``nn.Sequential`` and in a :class:`~torchckpt.Pipe`, which copies the tensor directly from the stage
that stashes it to the stage that pops it. The idea comes from torchgpipe (Kim et al., 2020, section 3.2.2).
"""
from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from torchckpt.errors import Fault, RecomputationError, raise_fault
from torchckpt.regions.flags import local
from torchckpt.tensors import tensors_of, version_of

__all__ = ["Name", "Namespace", "Skips", "StageSkips", "pop", "stash"]


class Namespace:
    """Keeps apart the skips of blocks that use the same names.

    >>> class Level(torch.nn.Sequential):
    ...     def __init__(self):
    ...         space = Namespace()
    ...         super().__init__(Down(space), Up(space))
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Namespace:
        copied: Namespace = memo.setdefault(id(self), Namespace())
        return copied


Name: TypeAlias = "tuple[Namespace | None, str]"


def stash(name: str, tensor: Tensor, namespace: Namespace | None = None) -> None:
    """Keep ``tensor`` for the layer that pops ``name``.

    Raises:
        ArgumentError: ``tensor`` is no tensor, or, in a ``Pipe``, ``name`` is stashed already.
    """
    if not isinstance(tensor, Tensor):
        received = f"{name!r}: {type(tensor).__name__}"
        raise_fault(Fault("a skip is not a tensor", received, "stash(name, tensor)"), "stash()")
    _holder().stash((namespace, name), tensor)


def pop(name: str, namespace: Namespace | None = None) -> Tensor:
    """Remove and return the tensor that was stashed under ``name`` in this forward.

    Raises:
        ArgumentError: no tensor is stashed under that name, or it was popped already.
    """
    return _holder().pop((namespace, name))


class _Plain:
    """The skips of this thread outside a pipe. Each stays until it is popped, or until the next forward replaces it."""

    def __init__(self) -> None:
        self._kept: dict[Name, Tensor] = {}

    def stash(self, name: Name, tensor: Tensor) -> None:
        replay = local.thread.flags[2]
        if replay is None:
            self._kept[name] = tensor
        else:  # kept with the replay, which may end before it pops them
            replay.skips = {**getattr(replay, "skips", {}), name: tensor}

    def pop(self, name: Name) -> Tensor:
        replay = local.thread.flags[2]
        if replay is not None:
            replayed: dict[Name, Tensor] = getattr(replay, "skips", {})
            if name in replayed:
                return replayed.pop(name)
            rule = "a layer that pops a skip is a region by itself, and at its replay the skip is gone"
            layer = "a layer that pops, and then calls checkpoint(block, x, skip)"
            works = f"Pipe(..., checkpoint='always'), whose regions are stages; or {layer}"
            raise RecomputationError(str(Fault(rule, f"pop({name[1]!r}) in a replay", works)))
        if name not in self._kept:
            rule = "a skip is popped that no earlier layer has stashed, or that was popped before"
            raise_fault(Fault(rule, f"pop({name[1]!r})", f"stash({name[1]!r}, tensor) in an earlier layer"), "pop()")
        return self._kept.pop(name)


def _holder() -> _Plain | StageSkips:
    thread = local.thread
    if thread.skips is None:
        thread.skips = _Plain()
    return thread.skips  # type: ignore[no-any-return]


@dataclass
class _Stashed:
    """A stashed skip, until the end of the forward."""

    layer: str
    tensor: Tensor | None = None
    transfer: Any = None
    version: int | None = None
    popped_by: str | None = None
    place: int | None = None
    """Its index among the tensors of the next stage, where the skip is also an argument of that stage."""
    argument: Tensor | None = None
    """That argument, for the later parts of the stage: to them it is the same tensor as to the first."""


class Skips:
    """The skips of one micro-batch: which layer stashed each, and which layer popped it."""

    def __init__(self, later: Callable[[Name, str], str | None]) -> None:
        self._stashed: dict[Name, _Stashed] = {}
        self._later = later
        """Maps a name and the layer that pops it to a later layer that stashes it, or None if none is found."""

    def sent(self, name: Name, tensor: Tensor, transfer: Any) -> None:
        """Note that the skip ``tensor`` left its stage, packed as ``transfer``."""
        skip = self._stashed[name]
        skip.tensor, skip.transfer, skip.version = tensor, transfer, version_of(tensor)

    @property
    def are_any(self) -> bool:
        return bool(self._stashed)

    def in_flight(self) -> list[Tensor]:
        """The skips that have left their stage and have not been popped."""
        return [stashed.tensor for stashed in self._stashed.values() if stashed.tensor is not None]

    def place_of(self, name: Name) -> int | None:
        return self._stashed[name].place if name in self._stashed else None

    def enter(self, arrived: Sequence[Tensor]) -> frozenset[int]:
        """Note that a stage in several parts begins with the tensors ``arrived``, or that it ends, with none. Return
        the indices of those that are skips, too."""
        passed = set()
        for skip in self._stashed.values():
            skip.argument = None
            if arrived and skip.place is not None:
                skip.argument = arrived[skip.place]
                passed.add(skip.place)
        return frozenset(passed)

    def leave(self, arrived: Sequence[Tensor], kept: dict[Name, Tensor], leaving: Sequence[Tensor]) -> None:
        """Note the end of a stage that got ``arrived``, stashed ``kept`` and returns ``leaving``."""
        numbers = {id(tensor): number for number, tensor in enumerate(leaving)}
        for name, stashed in self._stashed.items():
            passed = None if stashed.place is None or not arrived else arrived[stashed.place]
            stashed.place = numbers.get(id(kept.get(name, passed)))

    def stashed(self, name: Name, layer: str) -> None:
        """Note that ``layer`` stashes ``name``."""
        before = self._stashed.get(name)
        if before is not None:
            rule, works = "a skip is stashed twice in a forward", f"stash({name[1]!r}, tensor, namespace)"
            raise_fault(Fault(rule, f"{name[1]!r}, by {before.layer} and by {layer}", works))
        self._stashed[name] = _Stashed(layer)

    def popped(self, name: Name, layer: str) -> tuple[Any, Tensor | None]:
        """Note that ``layer`` pops ``name``. Return the ``transfer`` that was sent, and the skip where it came as an
        argument of the stage."""
        skip = self._stashed.get(name)
        if skip is None:
            later = self._later(name, layer)
            who = f"{name[1]!r}, popped by {layer}, stashed by {later or 'no layer before it'}"
            works = "the layer that stashes before the layer that pops"
            raise_fault(Fault("a skip is popped before it is stashed", who, works))
        if skip.popped_by is not None:
            who, works = f"by {skip.popped_by} and by {layer}", f"stash({name[1]!r}, ...) under a second name"
            raise_fault(Fault("a skip is popped twice in a forward", f"{name[1]!r}, {who}", works))
        skip.popped_by = layer
        transfer, tensor, argument = skip.transfer, skip.tensor, skip.argument
        skip.transfer = skip.tensor = skip.argument = None
        if tensor is not None and version_of(tensor) != skip.version:
            rule = "a skip was changed in place between the layer that stashes it and the one that pops it"
            who = f"{name[1]!r}, stashed by {skip.layer}, popped by {layer}, changed by a stage between"
            works = f"stash({name[1]!r}, x.clone()), or the operation out of place"
            raise_fault(Fault(rule, who, works))
        return transfer, argument

    def faults(self) -> Iterator[Fault]:
        """A fault for each skip that no layer popped."""
        for (_, name), stashed in self._stashed.items():
            if stashed.popped_by is None:
                received = f"{name!r}, stashed by {stashed.layer}, popped by no layer"
                works = f"pop({name!r}) in a later layer, or no stash"
                yield Fault("a skip is stashed, and popped by no later layer", received, works)


class StageSkips:
    """The skips of one micro-batch in one stage, in its forward and in its replays.

    It drops its references to the skips of other stages after the forward. Otherwise a skip that is never popped would
    be in a reference cycle: its graph holds the frame of an earlier stage, which holds this object, which holds the
    skip. The garbage collector does not see cycles through the autograd graph.
    """

    def __init__(self, skips: Skips, fetch: Callable[[Any], Tensor]) -> None:
        self._skips: Skips | None = skips
        self._fetch: Callable[[Any], Tensor] | None = fetch
        self._fetched: dict[Name, tuple[Tensor, int | None]] = {}
        self._places: dict[Name, int] = {}  # of skips that are also arguments of the stage
        self._entered = False
        # of the run under way, which is a replay inside of the forward if a layer runs a backward:
        self._is_forward = False
        self._kept: dict[Name, Tensor] = {}
        self._arguments: Sequence[Tensor] = ()
        self.layer: object = ""
        """The layer that runs now; ``str()`` of it names it in errors."""

    @property
    def are_any(self) -> bool:
        return self._skips is not None and self._skips.are_any

    def run(self, function: Callable[[], Any], arguments: Sequence[Tensor] = ()) -> tuple[Any, dict[Name, Tensor]]:
        """Run the stage once; the first run is the forward. Return its output, and the skips that it stashed and did
        not pop itself.

        Args:
            arguments: the tensors that the layers get, each once. A skip may be one of them.
        """
        # is_recomputing() also holds in a forward inside the replay of an outer region.
        is_forward, self._entered = not self._entered, True
        thread, outer = local.thread, (self._is_forward, self._kept, self._arguments)
        holder = thread.skips
        try:
            thread.skips = self  # inside: an interrupt may come right after it
            self._is_forward, self._kept, self._arguments = is_forward, {}, arguments
            output = function()
            if self._skips is not None and is_forward and self._skips.are_any:
                self._skips.leave(arguments, self._kept, tensors_of(output)[0])
            return output, self._kept
        finally:
            thread.skips = holder
            self._is_forward, self._kept, self._arguments = outer
            if is_forward:
                self._skips = self._fetch = None

    def stash(self, name: Name, tensor: Tensor) -> None:
        if self._skips is not None and self._is_forward:
            self._skips.stashed(name, str(self.layer))
        self._kept[name] = tensor

    def pop(self, name: Name) -> Tensor:
        """A skip of this stage, or one from another stage. In a replay, the same tensor that the forward got."""
        transfer = argument = None
        if self._skips is not None and self._is_forward:
            place = self._skips.place_of(name) if self._arguments and name not in self._kept else None
            if place is not None:
                self._places[name] = place
            transfer, argument = self._skips.popped(name, str(self.layer))
        if name in self._kept:
            return self._kept.pop(name)
        if name in self._places:
            return self._arguments[self._places[name]]
        if name not in self._fetched and self._is_forward and self._fetch is not None:
            tensor = self._fetch(transfer) if argument is None else argument
            self._fetched[name] = tensor, version_of(tensor)
        if name not in self._fetched:
            rule, received = "a replay pops a skip that its forward did not", f"pop({name[1]!r}), by {self.layer}"
            raise RecomputationError(str(Fault(rule, received, "a forward that pops the same names each time")))
        tensor, version = self._fetched[name]
        if version_of(tensor) != version:
            rule = "a popped skip was changed in place: the replay would start from the changed tensor"
            received = f"{name[1]!r} at version {version_of(tensor)}; expected version {version}"
            works = f"the operation out of place, such as x = pop({name[1]!r}) + 1"
            raise RecomputationError(str(Fault(rule, received, works)))
        return tensor


# for errors -----------------------------------------------------------------------------------------------------------


def stasher_behind(layers: Sequence[Any], name: Name, popper: str) -> str | None:
    """The first of ``layers``, from ``popper`` on, whose source code stashes ``name``; None if there is none."""
    words = [str(layer) for layer in layers]
    first = words.index(popper) if popper in words else 0
    for layer in layers[first:]:
        if any(name[1] in _stashed_by(module) for module in layer.module.modules()):
            return str(layer)
    return None


def _stashed_by(module: nn.Module) -> Iterator[str]:
    """The names that the forward of ``module`` stashes, if they are literals or attributes of ``module``."""
    forward: Any = type(module).forward
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "stash" and node.args:
            name = _read(node.args[0], module)
            if name is not None:
                yield name


def _read(node: ast.expr, module: nn.Module) -> str | None:
    """The value of ``"a"``, of ``self.name``, or of an f-string of these; None for other expressions."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return str(module.__dict__[node.attr]) if node.attr in module.__dict__ else None
    if isinstance(node, ast.JoinedStr):
        parts = [_read(part.value if isinstance(part, ast.FormattedValue) else part, module) for part in node.values]
        return None if None in parts else "".join(map(str, parts))
    return None
