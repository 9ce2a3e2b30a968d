"""Stage: the blocks of a pipeline stage, with seconds and bytes for one micro-batch."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from torchckpt.errors import Fault, brief, raise_faults
from torchckpt.model.schedule.costs import StageCosts

__all__ = ["Block", "Fixed", "Stage", "restaged", "stage_faults"]

_T = TypeVar("_T")


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

    @property
    def freed_bytes(self) -> float:
        """The bytes that are freed by dropping the block."""
        return self.saved_bytes - self.boundary_bytes


@dataclass(frozen=True)
class Fixed:
    """What a stage does beside its blocks and never recomputes: an embedding, a head, a loss."""

    forward_seconds: float = 0.0
    input_grad_seconds: float = 0.0
    weight_grad_seconds: float = 0.0
    saved_bytes: float = 0.0
    static_bytes: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Blocks in the order of the forward, and what comes before and after them.

    >>> stage = Stage((Block(boundary_bytes=0.06),) * 8, before=Fixed(forward_seconds=0.1))
    >>> stage.forward_seconds, stage.recompute_seconds
    (8.1, 8.0)
    """

    blocks: tuple[Block, ...]
    before: Fixed = Fixed()
    after: Fixed = Fixed()
    message_bytes: float | None = None
    """Bytes of the message from the previous stage, and of its gradient. Default: the boundary of the first block."""

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Sequence):
            rule, works = "the blocks of a stage are a tuple of Block", "Stage((Block(),) * 8)"
            raise_faults("Stage()", [Fault(rule, f"blocks={brief(self.blocks)}", works)])
        object.__setattr__(self, "blocks", tuple(self.blocks))

    @property
    def forward_seconds(self) -> float:
        return sum(part.forward_seconds for part in self._parts)

    @property
    def input_grad_seconds(self) -> float:
        return sum(part.input_grad_seconds for part in self._parts)

    @property
    def weight_grad_seconds(self) -> float:
        return sum(part.weight_grad_seconds for part in self._parts)

    @property
    def recompute_seconds(self) -> float:
        """Of all blocks."""
        return sum(block.recompute_seconds for block in self.blocks)

    @property
    def saved_bytes(self) -> float:
        """Where everything is kept."""
        return sum(part.saved_bytes for part in self._parts)

    @property
    def least_bytes(self) -> float:
        """Where every block is dropped."""
        return self.saved_bytes - sum(block.freed_bytes for block in self.blocks)

    @property
    def static_bytes(self) -> float:
        return sum(part.static_bytes for part in self._parts)

    def costs(self) -> StageCosts:
        """As the simulator counts; ``boundary_bytes`` are those of the message to this stage."""
        first = self.blocks[0].boundary_bytes if self.blocks else 0.0
        return StageCosts(
            self.forward_seconds,
            self.input_grad_seconds,
            self.weight_grad_seconds,
            self.recompute_seconds,
            self.saved_bytes,
            first if self.message_bytes is None else self.message_bytes,
        )

    @property
    def _parts(self) -> tuple[Fixed | Block, ...]:
        return (self.before, *self.blocks, self.after)


def restaged(stages: Sequence[Stage], counts: Sequence[int]) -> tuple[Stage, ...]:
    """The same blocks in the same order, so many on each stage."""
    blocks = iter([block for stage in stages for block in stage.blocks])
    return tuple(replace(stage, blocks=tuple(next(blocks) for _ in range(n))) for stage, n in zip(stages, counts))


_POSITIVE = ("forward_seconds", "recompute_seconds", "saved_bytes")


def stage_faults(stages: object, count: int) -> list[Fault]:
    """What is wrong with ``stages``, of a schedule that has ``count`` of them."""
    rule = f"stages are a list of Stage, one for each of the schedule's {count}"
    works = f"[Stage((Block(),) * 8)] * {count}"
    if not isinstance(stages, Sequence) or isinstance(stages, str):
        return [Fault(rule, brief(stages), works)]
    strangers = [f"stages[{at}]={brief(one)}" for at, one in enumerate(stages) if not isinstance(one, Stage)]
    if len(stages) != count:
        strangers.append(f"{len(stages)} of {count}")
    if strangers:
        return [Fault(rule, received, works) for received in strangers]
    faults = [fault for stage, at in _first_places(stages).items() for fault in _faults_of(f"stages[{at}]", stage)]
    if not faults and not any(stage.blocks for stage in stages):
        faults.append(Fault("some stage has blocks, for only blocks are recomputed", "none", works))
    return faults


def _first_places(values: Sequence[_T]) -> dict[_T, int]:
    """For each distinct value, the first place where it is."""
    found: dict[_T, int] = {}
    for at, value in enumerate(values):
        found.setdefault(value, at)
    return found


def _faults_of(where: str, stage: Stage) -> Iterator[Fault]:
    places = _first_places(stage.blocks)
    wrong = [fault for block, at in places.items() for fault in _block_faults(f"{where}.blocks[{at}]", block)]
    for name in ("before", "after"):
        wrong += _fixed_faults(f"{where}.{name}", getattr(stage, name))
    if stage.message_bytes is not None and not _is_amount(stage.message_bytes):
        wrong.append(_no_amount(f"{where}.message_bytes", stage.message_bytes))
    yield from wrong
    if not wrong and not stage.forward_seconds:
        works = "Stage((), after=Fixed(forward_seconds=1.0))"
        yield Fault("the forward of a stage takes time", f"{where}: 0 seconds", works)


def _block_faults(where: str, block: object) -> Iterator[Fault]:
    if not isinstance(block, Block):
        yield Fault("the blocks of a stage are Blocks", f"{where}={block!r}", "Stage((Block(),) * 8)")
        return
    wrong = [*_numbers(where, block, _POSITIVE)]
    yield from wrong
    if wrong:
        return
    if not block.input_grad_seconds + block.weight_grad_seconds:
        yield Fault("the backward of a block takes time", f"{where}: 0 seconds", "Block(input_grad_seconds=1.0)")
    if block.boundary_bytes > block.saved_bytes:
        received = f"{where}: saved_bytes={block.saved_bytes!r}, boundary_bytes={block.boundary_bytes!r}"
        works = "Block(saved_bytes=34e6, boundary_bytes=2e6)"
        yield Fault("what a block saves includes its boundary", received, works)


def _fixed_faults(where: str, part: object) -> Iterator[Fault]:
    if isinstance(part, Fixed):
        yield from _numbers(where, part, ())
    else:
        works = "Stage(blocks, after=Fixed(forward_seconds=1.0))"
        yield Fault("what comes before and after the blocks of a stage is a Fixed", f"{where}={part!r}", works)


def _numbers(where: str, part: Block | Fixed, positive: Sequence[str]) -> Iterator[Fault]:
    for field in fields(part):
        value = getattr(part, field.name)
        if not _is_amount(value):
            yield _no_amount(f"{where}.{field.name}", value)
        elif field.name in positive and not value:
            rule = "the forward and the recompute of a block take time, and it saves something"
            yield Fault(rule, f"{where}.{field.name}={value!r}", f"{field.name}=1.0")


def _no_amount(what: str, value: object) -> Fault:
    return Fault("seconds and bytes are finite numbers >= 0", f"{what}={value!r}", f"{what.rpartition('.')[2]}=1.0")


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
