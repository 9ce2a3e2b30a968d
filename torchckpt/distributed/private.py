"""Private: the private names of torch's that this folder uses: of pipeline schedules, and of FSDP2."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
)
from torch.nn import Module

from torchckpt.errors import CheckpointError, Fault
from torchckpt.features import TESTED
from torchckpt.tensors import runs_when_accumulated, tensors_in

__all__ = [
    "OVERLAP", "Live", "LiveStage", "TorchAction", "TorchKind", "TorchRuntime", "drop_handed",
    "finds_shapes", "freed_in_a_step", "handing_over", "hooked_once", "in_backward", "micro_batches_of", "only_whole",
    "order_of", "raise_unless_supported", "sends_objects", "split_at", "stages_of",
]

Live: TypeAlias = "PipelineScheduleSingle | PipelineScheduleMulti"
LiveStage: TypeAlias = Any  # torch's PipelineStage, or another subclass of its private base

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.pipelining.schedules import _Action as TorchAction
    from torch.distributed.pipelining.schedules import _ComputationType as TorchKind
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as TorchRuntime

    OVERLAP = TorchKind.OVERLAP_F_B
except (ImportError, AttributeError) as missing:
    rule = "torchckpt.distributed needs something of torchckpt/distributed/private.py that this torch does not have"
    works = "pip install 'torch>=2.11', or the release of torchckpt that was made for this torch"
    raise CheckpointError(str(Fault(rule, str(missing), works))) from missing

_ATTRIBUTES = ("_comp_type_to_function_map", "bwd_recv_ops", "fwd_recv_ops", "unshard_ops", "unsharded_stages")
_METHODS = ("_prepare_schedule_with_comms", "_step_microbatches", "step", "eval")


def raise_unless_supported(schedule: object) -> None:
    """Raise ``CheckpointError`` if this torch's runtime lacks what ``Runtime`` needs of it."""
    lacking = [name for name in _ATTRIBUTES if not hasattr(schedule, name)]
    lacking += [name for name in _METHODS if not callable(getattr(schedule, name, None))]
    if lacking:
        rule = (
            "this torch does not have the runtime of torch.distributed.pipelining that torch "
            f"{TESTED[0]} to {TESTED[-1]} have"
        )
        works = "the release of torchckpt that was made for this torch"
        raise CheckpointError(str(Fault(rule, f"one without {', '.join(lacking)}", works)))


def stages_of(live: Live) -> list[LiveStage]:
    """The stages of this rank."""
    return [live._stage] if isinstance(live, PipelineScheduleSingle) else list(live._stages)


def sends_objects(stage: LiveStage) -> bool:
    """Whether torch finds out in the first step what ``stage`` takes and gives, and tells other ranks, as objects."""
    if dist.get_world_size(stage.group) == 1:
        return False
    metas = getattr(stage, "_user_meta", None)
    if metas is None:  # of torch before 2.13; or of a stage of pipeline(), whose trace knows
        return getattr(stage, "inputs_meta", ()) is None
    from torch.distributed.pipelining._utils import InferenceMode  # which torch before 2.13 does not have

    return bool(InferenceMode.needs_dynamic(metas, True))


def finds_shapes(stage: LiveStage) -> bool:
    """Whether torch will find out the shapes of ``stage`` by running it: unless it is the first, on whatever is in
    fresh memory."""
    if hasattr(stage, "_user_meta"):
        return not stage._user_meta.is_complete_for_forward()
    return getattr(stage, "inputs_meta", ()) is None  # torch 2.11; the stages of pipeline() know theirs


@contextmanager
def handing_over(stages: Mapping[int, LiveStage]) -> Iterator[None]:
    """A step. If it fails, what stages of this rank handed to each other and nobody took is dropped.

    Since 2.15 torch refuses the next step while it is there: a message between ranks may still be on its way
    (``torch/distributed/pipelining/_recv_buffers.py``). These are no messages. Ends when torch drops them itself.
    """
    try:
        yield
    except BaseException:
        for receive in (*_handed(stages, "args"), *_handed(stages, "grad")):
            if hasattr(receive, "take_buffer"):
                receive.buffer = None
        raise


def drop_handed(stages: Mapping[int, LiveStage]) -> None:
    """Drop what stages of this rank handed to each other in the step before.

    Before 2.15 torch holds it until the next is handed over (``torch/distributed/pipelining/stage.py``): so a step
    would free what was there before it, where a plan does not know of it. Gradients have others in their place, in
    which torch writes zeros for one that is missing. Ends with 2.14.
    """
    for receive in _handed(stages, "args"):
        receive.buffer = None if receive.buffer is None else receive.buffer.new_empty(0)
    for receive in _handed(stages, "grad"):
        receive.buffer = None if receive.buffer is None else torch.empty_like(receive.buffer)


def _handed(stages: Mapping[int, LiveStage], what: str) -> Iterator[Any]:
    """What torch has of each of the ``"args"`` or gradients that ``stages`` of this rank hand to each other."""
    for stage in stages.values():
        for receive in chain(*getattr(stage, f"{what}_recv_info").values()):
            if getattr(receive, "source", None) in stages:
                yield receive


def split_at(stage: LiveStage, micro_batch: int, losses: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What a split backward of ``stage`` begins and ends at: its loss of ``micro_batch``, or what its forward returned,
    or nodes of that; and what it got from the stage before. Nothing where torch does all of the backward in one."""
    if stage.is_first or stage.dw_builder:
        return [], []
    if hasattr(stage, "_forward_chunk_states"):  # since torch 2.15
        state = stage._forward_chunk_states[micro_batch]
        outputs, inputs = state.stage_output_for_backward(), state.input_values
    else:
        outputs, inputs = stage.fwd_cache[micro_batch]
    roots = tensors_in(losses[micro_batch]) if stage.is_last else outputs  # a loss may be several
    return [getattr(root, "node", root) for root in roots], inputs[: len(stage.args_recv_info[micro_batch])]


@contextmanager
def hooked_once(stage: LiveStage, micro_batch: int) -> Iterator[None]:
    """The weight gradients of a split backward. Hooks of tensors run in it again; here their effect is not there twice.

    ``stage_backward_weight`` of ``torch/distributed/pipelining/_backward.py`` (2.11 to 2.15) goes on from gradients
    that have passed these hooks, and from 2.13 on sets them right where parameters are behind several nodes. Ends when
    it always does."""

    def as_it_was(group: dict[str, Any]) -> Any:  # not the gradients themselves, which torch frees group by group
        return lambda _: group["grads"][0]

    _, groups, *_ = getattr(stage, "backward_state", {}).get(micro_batch) or ((), ())
    alone = [group for group in groups or () if len(group["intermediates"]) == 1]
    handles = [next(iter(group["intermediates"])).register_prehook(as_it_was(group)) for group in alone]  # 2.12: a set
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def micro_batches_of(live: Live) -> int:
    """How many micro-batches a step of ``live`` has."""
    return int(live._n_microbatches)


def order_of(live: Live) -> dict[int, list[Any]]:
    """The actions that ``live`` lists, by rank; empty where it lists none, or others than it runs."""
    if isinstance(live, (ScheduleGPipe, Schedule1F1B)):
        return {}
    return getattr(live, "pipeline_order", None) or getattr(live, "pipeline_order_with_comms", None) or {}


@contextmanager
def in_backward(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Inside the block, FSDP2 takes a forward of ``modules`` for a replay: parameters stay gathered. It knows replays
    by this state alone (``torch/distributed/fsdp/_fully_shard/_fsdp_state.py``). Ends when it has a public way."""
    states = [module._get_fsdp_state() for module in modules]
    before = [state._training_state for state in states]
    for state in states:
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        yield
    finally:
        for state, training_state in zip(states, before):
            state._training_state = training_state


def freed_in_a_step(module: Module) -> list[str]:
    """The names in ``module``, of a stage, of modules whose parameters FSDP2 frees within a step.

    It frees them after a backward, unless the stage itself is under FSDP2, where torch has it keep them
    (``torch/distributed/pipelining/stage.py``). It frees them after a forward, those of the outermost module only where
    it is told so."""
    sharded = {name: child for name, child in module.named_modules() if isinstance(child, FSDPModule)}
    return [name for name, child in sharded.items() if "" not in sharded or _frees(child._get_fsdp_state(), not name)]


def only_whole(module: Module) -> str:
    """What torch does in whole backwards of ``module``, of a stage, and not in split ones; or nothing."""
    for child in module.modules():
        state: Any = child._get_fsdp_state() if isinstance(child, FSDPModule) else None
        own = [each.sharded_param for group in _groups_of(state) for each in getattr(group, "fsdp_params", ())]
        for parameter in own:
            policy = state._mp_policy
            computed = policy.param_dtype or parameter.dtype
            if parameter.requires_grad and policy.reduce_dtype not in (None, computed):
                return "FSDP2 casts gradients to reduce_dtype before it adds them up"
    hooked = any(map(runs_when_accumulated, module.parameters()))
    return "hooks of register_post_accumulate_grad_hook() and their like run" if hooked else ""


def _groups_of(state: Any) -> list[Any]:
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]  # before 2.15


def _frees(state: Any, is_outermost: bool) -> bool:
    frees = any(getattr(group, "post_forward_mesh_info", None) is not None for group in _groups_of(state))
    return frees and not (is_outermost and state._auto_reshard_after_forward)
