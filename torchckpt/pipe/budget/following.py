"""Following: one step of a pipe within a budget: the parts of its visits, and what is counted of it."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from torchckpt.pipe.budget.count import Count
from torchckpt.pipe.partition import Stage
from torchckpt.pipe.run.regions import Part, Regions, Replay
from torchckpt.pipe.run.step import Order
from torchckpt.planning import Action, Choice, Kind, State
from torchckpt.planning.plan import PipelinePlan
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.options import Options

__all__ = ["Following"]


class Following(Regions):
    """The regions of one step.

    Args:
        order: what ``Pipe.step`` runs; the graph of ``loss.backward()`` has its own.
        in_graph: whether recomputes are nodes of the graph.
        blocks: of each stage, each as a stage of its own.
        plan: None: every block is recomputed in its backward.
        count: what counts the step; None: nothing does.
    """

    def __init__(
        self,
        order: Order,
        in_graph: bool,
        blocks: Sequence[Sequence[Stage]],
        plan: PipelinePlan | None,
        count: Count | None,
        options: Options,
    ) -> None:
        super().__init__(lambda j, i: True, options)
        self.order, self.count = order, count
        self._in_graph, self._blocks, self._plan = in_graph, blocks, plan

    def parts(self, stage: Stage, i: int) -> tuple[list[Part], Replay | None]:
        blocks, visit = self._blocks[stage.number], (stage.number, i)
        choice = Choice.all(State.LATE, len(blocks)) if self._plan is None else self._plan.step.choice(visit)
        frames = [self._frame(stage.number, i, n) if n in choice.recomputed else None for n in range(len(blocks))]
        early = [frame for n, frame in enumerate(frames) if frame is not None and n in choice.early]
        action = Action(stage.number, Kind.RECOMPUTE, i)
        around = partial(self.acting, action) if self._in_graph else nullcontext
        return list(map(Part, blocks, frames)), _Early(early, around) if early else None

    def acting(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self.count is None else self.count.acting(action)

    def forwarded(self, j: int, i: int, arrived: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self.count is not None:
            self.count.forwarded((j, i), arrived, outputs)

    def finish(self) -> None:
        if self.count is not None:
            self.count.finish()

    def _frame(self, j: int, i: int, block: int) -> Frame:
        return Frame(self._options) if self.count is None else self.count.frame((j, i), block, self._options)


class _Early:
    """The regions of a visit that an R replays, the last one first."""

    def __init__(self, frames: list[Frame], around: Callable[[], AbstractContextManager[None]]) -> None:
        self._frames, self._around = frames, around

    def recompute(self) -> None:
        with self._around():
            while self._frames:
                self._frames.pop().recompute()
