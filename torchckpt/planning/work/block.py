"""Block: a piece of work with its seconds and bytes for one micro-batch; a stage is a list of blocks.

Everywhere in this package ``saved_bytes`` includes the block's input, ``boundary_bytes``: what a block holds if it is
kept is ``saved_bytes``, what it holds if it is recomputed is ``boundary_bytes``.

A collective is one communication between ranks, counted of a model's own code or of a description.
"""
from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

from torchckpt.errors import Fault, brief, called, raise_fault

__all__ = [
    "COLLECTIVE_HEADS", "NOTHING", "Block", "Collective", "Link", "Links", "Stage", "Stages", "fixed", "is_amount",
    "is_number", "per_boundary", "per_stage", "restaged",
]


@dataclass(frozen=True)
class Block:
    """A region that can be recomputed from its input, such as a layer of a transformer. Times in seconds (or any one
    unit), memory in bytes (or any one unit), of one micro-batch."""

    forward_seconds: float = 1.0
    input_grad_seconds: float = 1.0
    weight_grad_seconds: float = 1.0
    recompute_seconds: float = 1.0
    saved_bytes: float = 1.0
    """Everything that a forward saves for the backward, its input included."""
    boundary_bytes: float = 0.0
    """The block's input, which is kept if the block is recomputed."""
    static_bytes: float = 0.0
    """Parameters, gradients, optimizer state. The budget does not count them; they are shown beside the plan."""
    moved_bytes: float | None = None
    """What goes to the host if the block is sent away. Default: all that it saves; of the first block of a stage all
    but its input, which the runtime holds."""

    @property
    def freed_bytes(self) -> float:
        """The bytes that are freed by dropping the block."""
        return self.saved_bytes - self.boundary_bytes


def fixed(
    forward_seconds: float = 0.0,
    input_grad_seconds: float = 0.0,
    weight_grad_seconds: float = 0.0,
    saved_bytes: float = 0.0,
    static_bytes: float = 0.0,
) -> Block:
    """A block that is never recomputed, as dropping it frees nothing: an embedding, a head, a loss.

    >>> fixed(forward_seconds=0.1, saved_bytes=2.0).freed_bytes
    0.0
    """
    seconds = forward_seconds, input_grad_seconds, weight_grad_seconds, 0.0
    return Block(*seconds, saved_bytes, boundary_bytes=saved_bytes, static_bytes=static_bytes)


NOTHING = fixed()
"""No work: what is before and after the blocks of most stages."""


@dataclass(frozen=True)
class Stage:
    """Blocks in the order of the forward, and what comes before and after them.

    >>> stage = Stage((Block(boundary_bytes=0.06),) * 8, before=fixed(forward_seconds=0.1))
    >>> stage.forward_seconds, stage.recompute_seconds
    (8.1, 8.0)
    """

    blocks: tuple[Block, ...]
    before: Block = NOTHING
    after: Block = NOTHING
    message_bytes: float | None = None
    """Bytes of the message from the previous stage, and of its gradient. Default: the boundary of the first block."""
    collective_seconds: float = 0.0
    """Seconds that the stage waits for its own collectives (such as tensor parallelism), in one forward and one
    backward together. The bound of given recomputes counts them as time that can hide some; steps hide none there."""

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Sequence):
            rule, works = "blocks is not a tuple of Block", "Stage((Block(),) * 8)"
            with called("Stage()"):
                raise_fault(Fault(rule, f"blocks={brief(self.blocks)}", works))
        object.__setattr__(self, "blocks", tuple(self.blocks))

    @cached_property
    def forward_seconds(self) -> float:
        return sum(part.forward_seconds for part in self.parts)

    @cached_property
    def input_grad_seconds(self) -> float:
        return sum(part.input_grad_seconds for part in self.parts)

    @cached_property
    def weight_grad_seconds(self) -> float:
        return sum(part.weight_grad_seconds for part in self.parts)

    @cached_property
    def recompute_seconds(self) -> float:
        """The seconds to recompute all blocks."""
        return sum(block.recompute_seconds for block in self.blocks)

    @cached_property
    def saved_bytes(self) -> float:
        """The bytes of a visit that keeps everything."""
        return sum(part.saved_bytes for part in self.parts)

    @property
    def least_bytes(self) -> float:
        """The bytes of a visit that drops every block."""
        return self.saved_bytes - sum(block.freed_bytes for block in self.blocks)

    @cached_property
    def static_bytes(self) -> float:
        return sum(part.static_bytes for part in self.parts)

    def moved_bytes(self, block: int) -> float:
        """The bytes that go to the host if ``block`` is sent away."""
        moved = self.blocks[block].moved_bytes
        if moved is not None:
            return moved
        return self.blocks[block].saved_bytes if block else self.blocks[block].freed_bytes

    @property
    def arriving_bytes(self) -> float:
        """The bytes of the message from the previous stage."""
        if self.message_bytes is not None:
            return self.message_bytes
        return self.blocks[0].boundary_bytes if self.blocks else 0.0

    @property
    def parts(self) -> tuple[Block, ...]:
        """All work of the stage, in the order of the forward."""
        return (self.before, *self.blocks, self.after)


def restaged(stages: Sequence[Stage], counts: Sequence[int]) -> tuple[Stage, ...]:
    """The same blocks in the same order, so many on each stage."""
    blocks = iter([block for stage in stages for block in stage.blocks])
    return tuple(replace(stage, blocks=tuple(next(blocks) for _ in range(n))) for stage, n in zip(stages, counts))


@dataclass(frozen=True)
class Link:
    """A full-duplex link between neighbouring stages on different ranks. A message occupies one direction of the link
    for ``latency_seconds + bytes / bandwidth``, and then arrives."""

    latency_seconds: float = 0.0
    bandwidth: float = float("inf")
    """Bytes per second."""


_T = TypeVar("_T")

Stages: TypeAlias = "Block | Stage | Sequence[Block | Stage]"
"""What each stage does: one for every stage, or a list with one for each. A Block stands for a stage of that block."""

Links: TypeAlias = "float | Link | Sequence[Link]"
"""Between any two neighbouring stages on different ranks: the seconds of a message, a Link, or a list of Links."""


def per_stage(stages: Stages, count: int, is_planned: bool = False) -> tuple[list[Stage], list[Fault]]:
    """The stages of a schedule that has ``count`` of them, and their faults; with what keeps them from being planned,
    if they are to be. Default: False."""
    rule = f"stages is not a Stage or a Block, or a list with one for each of the schedule's {count}"
    listed, faults = _spread("stages", (Stage, Block), stages, count, rule, f"[Stage((Block(),) * 8)] * {count}")
    for stage, place in _first_places(listed).items():
        where = f"stages[{place}]" if isinstance(stages, Sequence) else "stages"
        faults.extend(_stage_faults(where, stage) if isinstance(stage, Stage) else _numbers(where, stage))
    each = {block: Stage((block,)) for block in _first_places(listed) if isinstance(block, Block)}
    if faults:
        return [], faults
    whole = [each[stage] if isinstance(stage, Block) else stage for stage in listed]
    return whole, _unplannable(whole) if is_planned else []


def _unplannable(stages: Sequence[Stage]) -> list[Fault]:
    """What keeps ``stages``, which have no faults, from being planned."""
    places = _first_places(stages)
    faults = [fault for stage in places for fault in _idle_faults(f"stages[{places[stage]}]", stage)]
    if not faults and not any(stage.blocks for stage in stages):
        works = "[Stage((Block(),) * 8)] * 4"
        faults.append(Fault("no stage has blocks, and only blocks are recomputed", "none", works))
    return faults


def per_boundary(link: Links, stages: int) -> tuple[list[Link], list[Fault]]:
    """The link of every pair of neighbouring stages, and their faults."""
    if isinstance(link, (int, float)) and not isinstance(link, bool):
        link = Link(link)
    rule = f"link is not one Link, or one for each of {stages - 1} pairs of neighbouring stages"
    listed, faults = _spread("link", (Link,), link, stages - 1, rule, f"Link(), or a list of {stages - 1}")
    for place, each in enumerate(listed):
        where = "link" if isinstance(link, Link) else f"link[{place}]"
        if not is_amount(each.latency_seconds):
            faults.append(_no_amount(where, "latency_seconds", each.latency_seconds))
        if not (is_number(each.bandwidth) and each.bandwidth > 0):
            rule = "a bandwidth is not a number of bytes per second, above 0"
            faults.append(Fault(rule, f"{where}.bandwidth={each.bandwidth!r}", "bandwidth=float('inf')"))
        if isinstance(link, Link):
            break
    return listed, faults


def _spread(
    name: str, types: tuple[type, ...], values: Any, count: int, rule: str, works: str
) -> tuple[list[Any], list[Fault]]:
    if isinstance(values, types):
        return [values] * count, []
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [], [Fault(rule, f"{name}={brief(values)}", works)]
    wrong = [place for place, value in enumerate(values) if not isinstance(value, types)]
    faults = [Fault(rule, f"{name}[{place}]={brief(values[place])}", works) for place in wrong]
    if len(values) != count:
        faults.append(Fault(rule, f"{len(values)} of {count}", works))
    return ([] if faults else list(values)), faults


def _first_places(values: Sequence[_T]) -> dict[_T, int]:
    """For each distinct value, the first place where it is."""
    places: dict[_T, int] = {}
    for place, value in enumerate(values):
        places.setdefault(value, place)
    return places


def _stage_faults(where: str, stage: Stage) -> Iterator[Fault]:
    for block, place in _first_places(stage.blocks).items():
        if isinstance(block, Block):
            yield from _numbers(f"{where}.blocks[{place}]", block)
        else:
            yield Fault(
                "a block of a stage is not a Block", f"{where}.blocks[{place}]={brief(block)}", "Stage((Block(),) * 8)"
            )
    for name in ("before", "after"):
        part = getattr(stage, name)
        wrong = list(_numbers(f"{where}.{name}", part)) if isinstance(part, Block) else []
        yield from wrong
        if not wrong and not (isinstance(part, Block) and part.freed_bytes == 0):
            rule = "what comes before or after the blocks of a stage was not made by fixed()"
            works = "Stage(blocks, after=fixed(forward_seconds=1.0))"
            yield Fault(rule, f"{where}.{name}={brief(part)}", works)
    for name in ("message_bytes", "collective_seconds"):
        value = getattr(stage, name)
        if value is not None and not is_amount(value):
            yield _no_amount(where, name, value)


def _numbers(where: str, block: Block) -> Iterator[Fault]:
    names = [field.name for field in fields(Block) if field.name != "moved_bytes" or block.moved_bytes is not None]
    wrong = [name for name in names if not is_amount(getattr(block, name))]
    for name in wrong:
        yield _no_amount(where, name, getattr(block, name))
    if not wrong and block.boundary_bytes > block.saved_bytes:
        received = f"{where}: saved_bytes={block.saved_bytes!r}, boundary_bytes={block.boundary_bytes!r}"
        works = "Block(saved_bytes=34e6, boundary_bytes=2e6)"
        yield Fault("a block saves less than its boundary", received, works)
    if not wrong and (block.moved_bytes or 0.0) > block.saved_bytes:
        received = f"{where}: saved_bytes={block.saved_bytes!r}, moved_bytes={block.moved_bytes!r}"
        yield Fault("a block saves less than it moves", received, "Block(saved_bytes=34e6, moved_bytes=32e6)")


_POSITIVE = ("forward_seconds", "recompute_seconds", "saved_bytes")


def _idle_faults(where: str, stage: Stage) -> Iterator[Fault]:
    """Blocks that take no time or no memory: there is nothing to plan."""
    for block, place in _first_places(stage.blocks).items():
        for name in _POSITIVE:
            if not getattr(block, name):
                rule = "the forward or the recompute of a block takes no time, or it saves nothing"
                yield Fault(rule, f"{where}.blocks[{place}].{name}={getattr(block, name)!r}", f"{name}=1.0")
        if not block.input_grad_seconds + block.weight_grad_seconds:
            rule, received = "the backward of a block takes no time", f"{where}.blocks[{place}]: 0 seconds"
            yield Fault(rule, received, "Block(input_grad_seconds=1.0)")
    if not stage.forward_seconds:
        works = "Stage((), after=fixed(forward_seconds=1.0))"
        yield Fault("the forward of a stage takes no time", f"{where}: 0 seconds", works)


def _no_amount(where: str, name: str, value: object) -> Fault:
    return Fault("seconds or bytes are not a finite number >= 0", f"{where}.{name}={value!r}", f"{name}=1.0")


_LARGEST = sys.float_info.max


def is_amount(value: object) -> bool:
    return is_number(value) and 0 <= value < math.inf


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number; an integer above all floats is none."""
    return isinstance(value, float) or (type(value) is not bool and isinstance(value, int) and abs(value) <= _LARGEST)


COLLECTIVE_HEADS = ("a block", "collective", "over", "bytes", "times")
"""Those of a table of collectives."""


class Collective(NamedTuple):
    """A collective of one rank, and how often it occurs.

    >>> gather = Collective("all_gather", 134217728, 8, "tp", "forward", 2)
    >>> gather.bytes * gather.count
    268435456
    """

    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``permute`` (to one rank)."""
    bytes: int
    """Bytes of one rank: the larger of its input and its output."""
    ranks: int
    """The size of the group."""
    dimension: str
    """The name of the mesh's dimension; empty if it is unknown."""
    phase: str
    """``forward``, ``backward``, ``replay`` or ``step``."""
    count: int = 1  # type: ignore[assignment]  # a tuple counts
    """How often it occurs in the phase, of one micro-batch."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in a table."""
        return self.phase, self.kind, f"{self.dimension} ({self.ranks})", f"{self.bytes / 1e6:.4g} MB", f"{self.count}"
