"""Moving: the blocks of a step that go to the host, as a plan has it, and what is measured before there is a plan."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from torchckpt.planning import Action, Choice
from torchckpt.planning.order.schedule import BACKWARDS, Kind, Visit
from torchckpt.planning.plan import PipelinePlan
from torchckpt.regions.core.scope import AroundRegion, Scope
from torchckpt.regions.moved.order import Driven
from torchckpt.regions.moved.region import Moved
from torchckpt.tensors import tensors_in
from torchckpt.typing import Function

__all__ = ["AllMoved", "Boundaries", "BoundaryScope", "Going"]

Going: TypeAlias = "Sequence[Mapping[int, int]]"
"""For each region of a stage, the bytes of its storages that can go, by number."""


class Boundaries:
    """The boundaries of one step of a rank, each an action and a block, and what is released and issued there.

    An action begins when the runtime comes to it, before it waits for a message. In a forward, the boundary before a
    block is the end of the block before it; in a backward, it is where the first gradient of the block arrives.
    """

    def __init__(self, plan: PipelinePlan, rank: int) -> None:
        order, stages = plan.schedule.ranks[rank], plan.problem.stages
        uses = {action.visit: index for index, action in enumerate(order) if action.kind in BACKWARDS}
        self._driven = Driven(
            ((place.action, place.boundary.block), move[:3], is_issued)
            for place in chain.from_iterable(plan.step.places[rank])
            for move, is_issued in place.moves
        )
        self._backwards = {visit: order[index] for visit, index in uses.items()}
        self._starts = {
            str(action): (action, len(stages[action.stage].blocks) if action.kind in BACKWARDS else 0)
            for action in order
        }

    def action(self, text: str) -> Action | None:
        """The action of the plan that the runtime comes to, such as ``0F1``; None of a message."""
        return self._starts[text][0] if text in self._starts else None

    def begins(self, action: Action) -> None:
        """``action`` begins, before it waits for a message."""
        self._driven.reaches(self._starts[str(action)])

    def scope(self, choice: Choice, going: Going, around: AroundRegion, visit: Visit) -> BoundaryScope:
        """The scope of the forward of ``visit``. ``going`` is of its stage."""
        actions = Action(visit[0], Kind.FORWARD, visit[1]), self._backwards[visit]
        return BoundaryScope(choice, going, around, self._driven, actions)


class BoundaryScope(Scope):
    """A scope whose regions are kept, recomputed or sent away, and which tells of each boundary.

    Args:
        going: for each region, the numbers of its storages that go to the host if it is away.
        actions: the forward and the backward of the visit.
    """

    def __init__(
        self, choice: Choice, going: Going, around: AroundRegion, driven: Driven, actions: tuple[Action, Action]
    ) -> None:
        super().__init__(frozenset((*choice.kept, *choice.away)), around)
        self._away, self._going, self._driven, self._actions = choice.away, going, driven, actions
        self.ended.append(self._tell)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._driven.entered(), super().entered():
            yield

    def wrapped(self, number: int, function: Function) -> Function:
        if number not in self._away:
            return function
        region = Moved(going=self._going[number])
        self._driven.moves((*self._actions[0].visit, number), region)
        return partial(_moved, region, function)

    def _tell(self, number: int, outputs: Any) -> None:
        """Tell of the end of a region, and of the begin of its backward."""
        forward, backward = self._actions
        self._driven.reaches((forward, number + 1))
        if self._driven.happens_at((backward, number)):
            for node in dict.fromkeys(tensor.grad_fn for tensor in tensors_in(outputs)):
                if node is not None:
                    node.register_prehook(partial(self._driven.reaches, (backward, number)))


def _forward(region: Moved, function: Function, *args: Any, **kwargs: Any) -> Any:
    return region.forward(function, args, kwargs)


def _moved(region: Moved, function: Function, *args: Any, **kwargs: Any) -> Any:
    outputs = region.forward(function, args, kwargs)
    region.send()
    return outputs


class AllMoved(Scope):
    """A scope whose regions all go to the host, by an order of their own: it shows what each can send."""

    def __init__(self) -> None:
        super().__init__(keep=True)
        self._moving: list[Moved] = []

    def wrapped(self, number: int, function: Function) -> Function:
        self._moving.append(Moved())
        return partial(_forward, self._moving[-1], function)

    def sent(self) -> list[dict[int, int]]:
        """The bytes of the storages that each region has sent, by number. Call it where the outputs of the stage are
        held as in a step."""
        for region in self._moving:
            region.release()
        return [region.away_bytes for region in self._moving]
