"""Runtime: torch's runtime of pipeline schedules, with recomputes among its actions.

``_PipelineScheduleRuntime`` of ``torch/distributed/pipelining/schedules.py`` runs lists of actions, but lets no one add
a kind of action, or see where it is. This module ends when it takes a function for an action of the user's.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.distributed.private import (
    OVERLAP,
    Live,
    LiveStage,
    TorchAction,
    TorchKind,
    TorchRuntime,
    order_of,
    raise_unless_supported,
    stages_of,
)
from torchckpt.planning import Action, Kind, Schedule
from torchckpt.planning.step.placement import without
from torchckpt.tensors import tensors_in

__all__ = ["Runtime"]


class _RecomputeKind(str, Enum):
    """A member more than torch's ``_ComputationType``; the runtime looks up its function in the same table."""

    RECOMPUTE = "R"


_RECOMPUTE: Any = _RecomputeKind.RECOMPUTE  # which torch's types know nothing of
_KINDS = tuple(kind.value for kind in Kind)
_CHUNKS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_OF_FORWARDS = "F", "SEND_F", "RECV_F", "WAIT_SEND_F"
_LEFT_BEHIND = ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages", "_deferred_stages")
"""What a step that failed leaves. After one that did not, stages may stay gathered: ``finalize_gradients=False``."""


class _Noted(list[Any]):
    """The actions of a rank; tells ``note`` of each that a loop comes to, and ``end`` that it has ended."""

    def __init__(self, actions: Sequence[Any], note: Callable[[str], None], end: Callable[[], None]) -> None:
        super().__init__(actions)
        self._note, self._end = note, end

    def __iter__(self) -> Iterator[Any]:
        for action in super().__iter__():
            self._note(str(action))
            yield action
        self._end()

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return list(super().__iter__())  # what torch prints where a step fails


class Runtime(TorchRuntime):
    """torch's runtime on the stages of ``live``, with recomputes among its actions.

    A subclass says what happens around them. ``step()`` and ``eval()`` are torch's.
    """

    def __init__(self, live: Live, schedule: Schedule) -> None:
        name = "_backward_requires_autograd"  # which not every release has
        options = {name[1:]: getattr(live, name)} if hasattr(live, name) else {}
        super().__init__(  # type: ignore[no-untyped-call]  # in torch
            stages=stages_of(live),
            n_microbatches=live._n_microbatches,
            loss_fn=live._loss_fn,
            args_chunk_spec=live._args_chunk_spec,
            kwargs_chunk_spec=live._kwargs_chunk_spec,
            output_merge_spec=live._output_merge_spec,
            scale_grads=live.scale_grads,
            **options,
        )
        raise_unless_supported(self)
        self._defer_pp_recv = getattr(live, "_defer_pp_recv", False)
        self._comp_type_to_function_map = dict(getattr(live, "_comp_type_to_function_map", {}))
        self._comp_type_to_function_map[_RECOMPUTE] = _recompute
        self._plain_schedule = without(schedule)
        self._sends: list[object] = []  # of each stage, where it sends to: torch makes this anew when it prepares one
        self.pipeline_order = dict(order_of(live)) or _listed(schedule)
        prepared = getattr(live, "pipeline_order_with_comms", None)  # which may have been read from a file
        form: dict[str, Any] = {"format": "compute_comms"} if prepared else {}
        self._prepare_schedule_with_comms(prepared or self.pipeline_order, **form)
        self._given = dict(self.pipeline_order), dict(self.pipeline_order_with_comms)
        self.schedule = self.follow(schedule)
        """The order that is run, on all ranks."""

    # what a subclass does -------------------------------------------------------------------------------------------

    running: Callable[[], AbstractContextManager[None]]
    """A context around all actions of a step, or of ``eval()``."""
    reaches: Callable[[str], None]
    """Called right before each action, such as ``1F0`` or ``1RECV_B3``."""
    ends: Callable[[], None]
    """Called after the last action, before torch waits for what it has sent, and lists the losses."""
    computing: Callable[[Action, list[object]], AbstractContextManager[None]]
    """A context around the computation of an action, when its input is there. At the end the list has what it returned.
    """
    recompute: Callable[[Action], None]
    """Replay the regions of the action's stage and micro-batch."""

    # the order ------------------------------------------------------------------------------------------------------

    def follow(self, schedule: Schedule) -> Schedule:
        """From the next step on, run ``schedule``, which has the same forwards and backwards on the same ranks. If it
        has them in another order, torch puts messages between them anew.

        Returns:
            ``schedule`` as it will run: what it has inside a pair that torch runs as one action stands before the pair.
        """
        listed, self._plain = self._given
        self.pipeline_order = dict(listed)
        if without(schedule).ranks != self._plain_schedule.ranks:
            everything = (action for actions in self._plain.values() for action in actions)
            pairs = {tuple(_parts(action)): action for action in everything if action.computation_type is OVERLAP}
            self.pipeline_order = {rank: list(_paired(order, pairs)) for rank, order in _listed(schedule).items()}
            self._prepare_schedule_with_comms({rank: list(order) for rank, order in self.pipeline_order.items()})
            self._plain = self.pipeline_order_with_comms
        ranks = [list(_with_recomputes(self._plain[rank], order)) for rank, order in enumerate(schedule.ranks)]
        self.pipeline_order_with_comms = {**self._plain, self.rank: ranks[self.rank]}
        self._training = ranks[self.rank]
        return replace(schedule, ranks=tuple(tuple(_computations(actions)) for actions in ranks))

    @property
    def pairs(self) -> frozenset[tuple[Action, Action]]:
        """The actions of all ranks that torch runs as one."""
        computed = (list(_computations([action])) for actions in self._given[1].values() for action in actions)
        return frozenset((pair[0], pair[1]) for pair in computed if len(pair) == 2)

    # what torch calls -----------------------------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        return bool(self._has_backward)

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """torch's own, which clears gradients of what FSDP2 shards: in ``_post_metadata_inference_cleanup`` of
        ``torch/distributed/pipelining/stage.py`` (2.13), before the first step, and in and after each ``eval()``. Ends
        when it clears those of its search for shapes alone.

        Stages that another schedule has prepared since, as for an evaluation, are prepared anew: they would take no
        gradients, and nothing would be said. Ends when torch does so itself."""
        if any(stage.act_send_info is not sends for stage, sends in zip(self._stages, self._sends)):
            self._stages_forward_initialized = self._stages_backward_initialized = False
        gradients = {x: x.grad for stage in self._stages for x in stage.submod.parameters() if x.grad is not None}
        for parameter in gradients:
            parameter.grad = None  # to which the search would add
        try:
            super()._initialize_stages(*args, **kwargs)
            self._sends = [stage.act_send_info for stage in self._stages]
        except BaseException:  # some stages are for eval() by now, and others for steps
            self._stages_forward_initialized = self._stages_backward_initialized = False
            raise
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        # Not in the stack, whose frame and an error that running() raises in place of another would hold each other.
        with self.running(), ExitStack() as stack:
            stack.push(self._forget)
            actions = self._training if self.is_training else _forwards_of(self._plain[self.rank])
            self.pipeline_order_with_comms[self.rank] = _Noted(actions, self.reaches, self.ends)
            for stage in self._stages:
                stack.enter_context(self._watched(stage))
            return super()._step_microbatches(*args, **kwargs)

    def _forget(self, failed: type[BaseException] | None, *_: object) -> None:
        self.pipeline_order_with_comms[self.rank] = self._training  # and no reference to self, which would be a cycle
        self._internal_losses.clear()
        if failed is not None:
            for name in _LEFT_BEHIND:
                getattr(self, name, set()).clear()

    @contextmanager
    def _watched(self, stage: LiveStage) -> Iterator[None]:
        """Inside the block, the computations of ``stage`` are inside of :meth:`computing`."""
        index = stage.stage_index
        plain = [getattr(stage, name) for name in _CHUNKS]
        places: dict[int, int] = {}  # of the outputs of micro-batches among those that the last stage keeps
        before = {name: stage.__dict__[name] for name in _CHUNKS if name in stage.__dict__}

        def computed(action: Action, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outputs: list[Any] = []
            with self.computing(action, outputs):
                outputs.append(call(*args, **kwargs))
            return outputs.pop()

        # With the names of torch's parameters: functions of the user's may call them, too.
        def forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            places[fwd_chunk_id] = len(stage.output_chunks)
            return computed(Action(index, Kind.FORWARD, fwd_chunk_id), plain[0], fwd_chunk_id, *args, **kwargs)

        def backward(bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any) -> Any:
            action = Action(index, Kind.BACKWARD if full_backward else Kind.INPUT_GRAD, bwd_chunk_id)
            split = action._replace(kind=Kind.INPUT_GRAD)
            if full_backward and isinstance(loss, (tuple, list)) and split in self._plain_schedule.ranks[self.rank]:
                loss = sum(loss)  # torch's split backwards go through each of several (2.13), whole ones through none
            gradients = computed(action, plain[1], bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)
            _let_go(stage, places.pop(bwd_chunk_id, None))
            return gradients

        def weights(bwd_chunk_id: int, **kwargs: Any) -> Any:
            return computed(Action(index, Kind.WEIGHT_GRAD, bwd_chunk_id), plain[2], bwd_chunk_id, **kwargs)

        stage.__dict__.update(zip(_CHUNKS, (forward, backward, weights)))
        try:
            yield
        finally:
            for name in _CHUNKS:
                del stage.__dict__[name]
            stage.__dict__.update(before)


def _let_go(stage: LiveStage, place: int | None) -> None:
    """Take the graph off the outputs at ``place`` of those that the last ``stage`` keeps for the end of the step.

    ``backward_one_chunk`` of ``torch/distributed/pipelining/stage.py`` (2.11 to 2.15) detaches them in place, which
    leaves views and the outputs of the only stage as they are: their graph would hold what the forward saved, after an
    I until the next step. Ends when torch keeps detached copies.
    """
    if place is not None and place < len(stage.output_chunks):
        kept = stage.output_chunks[place]
        if any(output.grad_fn is not None for output in tensors_in(kept)):
            stage.output_chunks[place] = pytree.tree_map_only(Tensor, Tensor.detach, kept)


def _recompute(action: Any, context: Any) -> None:
    """The function that the runtime calls for our kind of action."""
    context.schedule_ref.recompute(Action(action.stage_index, Kind.RECOMPUTE, action.microbatch_index))


# lists of actions -----------------------------------------------------------------------------------------------------


def _to_torch(action: Action) -> Any:
    stage, kind, i = action
    return TorchAction(stage, _RECOMPUTE if kind is Kind.RECOMPUTE else TorchKind.from_str(kind.value), i)


def _listed(schedule: Schedule) -> dict[int, list[Any]]:
    return {rank: list(map(_to_torch, order)) for rank, order in enumerate(without(schedule).ranks)}


def _parts(action: Any) -> list[Any]:
    return list(action.sub_actions or ()) if action.computation_type is OVERLAP else [action]


def _paired(actions: Sequence[Any], pairs: Mapping[tuple[Any, ...], Any]) -> Iterator[Any]:
    """``actions``, where one of ``pairs`` stands in place of its two parts."""
    place = 0
    while place < len(actions):
        pair = pairs.get(tuple(actions[place : place + 2]))
        yield actions[place] if pair is None else pair
        place += 1 if pair is None else 2


def _with_recomputes(actions: Sequence[Any], order: Sequence[Action]) -> Iterator[Any]:
    """``actions``, with each recompute of ``order`` right before the computation that it precedes there."""
    pending: list[Action] = []
    before: dict[Action, list[Action]] = {}
    for computation in order:
        if computation.kind is Kind.RECOMPUTE:
            pending.append(computation)
        else:
            before[computation], pending = pending, []
    for action in actions:
        for computation in _computations([action]):
            yield from map(_to_torch, before.get(computation, ()))
        yield action


def _computations(actions: Sequence[Any]) -> Iterator[Action]:
    for part in (part for action in actions for part in _parts(action)):
        if part.computation_type.value in _KINDS:
            yield Action(part.stage_index, Kind(part.computation_type.value), part.microbatch_index)


def _forwards_of(actions: Sequence[Any]) -> list[Any]:
    """The actions of ``eval()``: forwards and their messages, with the parameters of each stage gathered meanwhile.

    ``_PipelineSchedule.eval`` of ``torch/distributed/pipelining/schedules.py`` (2.13) is a step in which backwards do
    nothing, but gradients are divided, and V-shaped schedules fail. Ends when it runs forwards alone.
    """
    kept = [part for action in actions for part in _parts(action) if part.computation_type.value in _OF_FORWARDS]
    forwards = [part for part in kept if part.computation_type.value == "F"]
    first = {part.stage_index: part for part in reversed(forwards)}
    last = {part.stage_index: part for part in forwards}
    evaluated = []
    for part in kept:
        stage = part.stage_index
        evaluated += [TorchAction(stage, TorchKind.UNSHARD, None)] if part is first[stage] else []
        evaluated.append(part)
        evaluated += [TorchAction(stage, TorchKind.RESHARD, None)] if part is last[stage] else []
    return evaluated
