"""Block: a piece of work with its seconds and bytes for one micro-batch; a stage is a list of blocks.

Everywhere in this package ``saved_bytes`` includes the block's input, ``boundary_bytes``: what a block holds if it is
kept is ``saved_bytes``, what it holds if it is recomputed is ``boundary_bytes``.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchckpt.errors import Fault, brief, called, raise_fault

__all__ = ["NOTHING", "Block", "Link", "Stage", "fixed", "restaged"]

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
    backward together. Only the bound of given recomputes counts them as room; the simulation does not fill them."""

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
