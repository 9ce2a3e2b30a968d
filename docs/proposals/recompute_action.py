"""RECOMPUTE, OFFLOAD and LOAD as actions of torch's pipeline schedules: a sketch that runs on the installed torch.

recompute-action.md says where in torch each part would be. Only what ``collect_replays`` calls is torchckpt's.
"""
from __future__ import annotations

import csv
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from torchckpt.regions.core.scope import Scope


class Kind(str, Enum):
    """Three members more for ``_ComputationType``. In a CSV file: ``1R0``, ``1OFFLOAD0``, ``1LOAD0``."""
    RECOMPUTE = "R"
    OFFLOAD = "OFFLOAD"
    LOAD = "LOAD"


_BACKWARDS = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT)
Orders = Mapping[int, Sequence[_Action]]
# 1. an order with the new actions: made, checked, written and read -------------------------------------------

def with_recomputes(orders: Orders, offloads: bool = False) -> dict[int, list[_Action]]:
    """``orders`` where each visit is recomputed right before its backward, and is on the host until then if it
    ``offloads``."""
    return {rank: [part for action in order for part in _around(action, offloads)] for rank, order in orders.items()}


def _around(action: _Action | None, offloads: bool) -> Iterator[_Action]:
    if action is None or action.sub_actions is not None:
        yield from () if action is None else (action,)
        return
    stage, kind, i, _ = action
    if kind in _BACKWARDS:
        yield from [_Action(stage, Kind.LOAD, i)] * offloads
        yield _Action(stage, Kind.RECOMPUTE, i)
    yield action
    if kind is _ComputationType.FORWARD:
        yield from [_Action(stage, Kind.OFFLOAD, i)] * offloads


def validate(orders: Orders) -> None:
    """What ``_validate_schedule`` would check besides. Raises ``AssertionError``, as it does."""
    for rank, order in orders.items():
        done: dict[tuple[int, int | None], list[str]] = {}
        for step, action in enumerate(part for outer in order for part in outer.sub_actions or (outer,)):
            before = done.setdefault((action.stage_index, action.microbatch_index), [])
            if wrong := _fault(action.computation_type, before):
                raise AssertionError(f"Rank {rank}, step {step}: {action} {wrong}")
            before.append(action.computation_type.value)


def _fault(kind: Any, before: Sequence[str]) -> str:
    """What is wrong with an action of this kind, after those of its visit ``before``."""
    if isinstance(kind, Kind):
        if kind.value in before:
            return "stands there twice"
        if "F" not in before or any(backward.value in before for backward in _BACKWARDS):
            return "is not between the forward and the backward of its micro-batch"
        if kind is Kind.LOAD and "OFFLOAD" not in before:
            return "has no OFFLOAD before it"
    needs_bytes = kind is Kind.RECOMPUTE or kind in _BACKWARDS
    return "has no LOAD after the OFFLOAD" if needs_bytes and "OFFLOAD" in before and "LOAD" not in before else ""


def write_csv(path: str, orders: Orders) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(orders[rank] for rank in sorted(orders))


def read_csv(path: str) -> dict[int, list[_Action]]:
    with open(path, newline="") as file:
        return {rank: [_read(cell) for cell in row if cell] for rank, row in enumerate(csv.reader(file))}


def _read(cell: str) -> _Action:
    """``_Action.from_str``; its pattern would have ``R`` behind all that begins with it."""
    new = re.fullmatch(r"(\d+)(R|OFFLOAD|LOAD)(\d+)", cell)
    return _Action.from_str(cell) if new is None else _Action(int(new[1]), Kind(new[2]), int(new[3]))


# 2. a visit: what a stage keeps of one micro-batch -----------------------------------------------------------

@contextmanager
def collect_replays(replays: list[Callable[[], None]]) -> Iterator[None]:
    """Inside the block, each checkpointed call leaves a function that replays it, at any time before its backward. What
    it makes belongs to the nodes of the graph, so I and W of a split backward share it."""
    scope = Scope()
    with scope.entered():
        yield
    replays += [frame.recompute for frame in scope.frames]


class Saved:
    """A saved tensor, on its device or on the host. The node that saved it owns it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.device = tensor.detach() if tensor.grad_fn is not None else tensor, tensor.device

    def unpack(self) -> Tensor:
        return self.tensor


class Visit:
    """One micro-batch on one stage, from its forward to its backward."""

    def __init__(self) -> None:
        self.replays: list[Callable[[], None]] = []
        self._saved: list[weakref.ref[Saved]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, Saved.unpack), collect_replays(self.replays):
            yield

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):  # these stay where they are
            self._saved.append(weakref.ref(saved))
        return saved

    def move(self, to_host: bool) -> None:
        for saved in filter(None, (reference() for reference in self._saved)):
            # torch's would copy on a stream of its own, to pinned memory
            saved.tensor = saved.tensor.to("cpu" if to_host else saved.device, copy=True)

    def recompute(self) -> None:  # the last region first: its backward comes first
        while self.replays:
            self.replays.pop()()


# 3. the runtime ----------------------------------------------------------------------------------------------

class Runtime(_PipelineScheduleRuntime):
    """torch's runtime, which runs ``orders`` of all ranks with the new actions in them."""

    def __init__(self, stages: list[Any], n_microbatches: int, orders: Orders, **options: Any) -> None:
        super().__init__(stages, n_microbatches, **options)
        validate(orders)
        self._visits: dict[tuple[int, int], Visit] = {}
        self._comp_type_to_function_map.update(dict.fromkeys(Kind, self._perform))
        self._prepare_schedule_with_comms({rank: [*filter(_is_old, order)] for rank, order in orders.items()})
        mine = self.pipeline_order_with_comms[self.rank]
        self.pipeline_order_with_comms[self.rank] = list(_put_back(mine, orders[self.rank]))

    def _perform(self, action: _Action, context: Any) -> None:
        visit = self._visits[action.stage_index, action.microbatch_index]
        if action.computation_type is Kind.RECOMPUTE:
            visit.recompute()
        else:
            visit.move(to_host=action.computation_type is Kind.OFFLOAD)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        plain = {stage: stage.forward_one_chunk for stage in self._stages}
        try:
            for stage, forward in plain.items():
                stage.forward_one_chunk = self._visiting(stage.stage_index, forward)
            return super()._step_microbatches(*args, **kwargs)
        finally:
            self._visits.clear()
            for stage in plain:
                del stage.forward_one_chunk

    def _visiting(self, stage: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            visit = self._visits[stage, fwd_chunk_id] = Visit()
            with visit.forward():
                return forward(fwd_chunk_id, *args, **kwargs)

        return run


def _is_old(action: _Action) -> bool:
    return not isinstance(action.computation_type, Kind)


def _put_back(lowered: Iterable[_Action], order: Sequence[_Action]) -> Iterator[_Action]:
    """``lowered``, torch's list with messages, where each new action stands before what follows it in ``order``: a
    recompute behind the RECV_B that was posted, and before the backward that waits for it."""
    before: dict[_Action, list[_Action]] = {}
    pending: list[_Action] = []
    for action in order:
        if _is_old(action):
            before[action], pending = pending, []
        else:
            pending.append(action)
    for action in lowered:
        yield from before.pop(action, ())
        yield action
