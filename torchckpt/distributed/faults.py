"""Faults: regions that are not torchckpt's, what split backwards leave out, and where a step has failed."""
from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchckpt.distributed.private import LiveStage, only_whole, split_at
from torchckpt.errors import Fault, RegionError, ScheduleError
from torchckpt.modules import is_compiled
from torchckpt.planning import Kind, Schedule
from torchckpt.regions.core.scope import is_outermost
from torchckpt.regions.private import hooks_in_force
from torchckpt.regions.wrap.mixin import COMPILED
from torchckpt.regions.wrap.module import is_checkpointed
from torchckpt.tensors import node_name, nodes_behind, tensors_in

__all__ = [
    "END", "GIVEN_SHAPES", "PREPARING", "LeftOut", "failure_of", "out_of_memory", "plain_regions_refused",
    "raise_without_regions", "splits", "traced_faults", "warn_of_compiled_regions", "warn_of_whole",
]

_WORKS = "from torchckpt import checkpoint, for: from torch.utils.checkpoint import checkpoint"
_COMPILE = "for block in stage_module.layers: torchckpt.checkpoint_module(block); block.compile()"


@contextmanager
def plain_regions_refused(stage: int, module: nn.Module) -> Iterator[None]:
    """Raise ``RegionError`` at the end if ``torch.utils.checkpoint`` was used within: of that, nothing can be
    recomputed early."""
    named: list[str] = []
    names = {child: name for name, child in module.named_modules()}
    graded = torch.is_grad_enabled()

    def look(child: nn.Module, _: Any) -> None:
        hooks = hooks_in_force(False)
        inside = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        if inside and not named and is_outermost():  # one inside of ours is ours to replay, or to keep
            named.append(f"{type(child).__name__} {names[child]!r}")

    with ExitStack() as stack:
        for child in _uncompiled(module):
            stack.enter_context(child.register_forward_pre_hook(look))
        yield
    if named and graded:
        rule = "a region of torch.utils.checkpoint cannot be recomputed early, only one of torchckpt"
        received = f"stage {stage} runs {named[0]} inside one of torch.utils.checkpoint"
        raise RegionError(str(Fault(rule, received, _WORKS)))


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a hook can be put on: a hook inside of compiled code would be compiled, too."""
    if not is_compiled(module):
        yield module
        for child in () if COMPILED in module.__dict__ else module.children():
            yield from _uncompiled(child)


def warn_of_compiled_regions(stage: int, module: nn.Module) -> None:
    """Regions inside of a graph that Dynamo traces are torch's operators: nothing can recompute them early."""
    inside = list(_in_graphs(module, ""))
    if inside:
        rule = "recompute_ahead: a region inside of compiled code is not recomputed early"
        received = f"stage {stage}, with {inside[0]}{f', and {len(inside) - 1} more' if inside[1:] else ''}"
        warnings.warn(str(Fault(rule, received, _COMPILE)), stacklevel=2)


def _in_graphs(module: nn.Module, name: str) -> Iterator[str]:
    if is_checkpointed(module):
        return
    for path, child in module.named_modules(prefix=name) if is_compiled(module) else ():
        if is_checkpointed(child):
            yield f"{type(child).__name__} {path!r}"
    for path, child in () if is_compiled(module) else module.named_children():
        yield from _in_graphs(child, f"{name}.{path}".lstrip("."))


_TRACERS = ("torch.fx.", "torch.export.", "torch.nn.modules.")
"""The modules of the classes that ``torch.distributed.pipelining.pipeline()`` makes of a model."""

_KNOWN = ("torch", "_operator", "operator", "builtins", "math")
"""The packages of functions that enter no region."""


def traced_faults(stage: int, module: nn.Module) -> Iterator[Fault]:
    """The fault of a stage that was traced, with no region in it: those that were set before are not in a trace.

    A class of the user's own that was put into the stage, or a function that its graph calls (``torch.fx.wrap``), may
    enter regions by itself: the first step tells.
    """
    if not isinstance(module, GraphModule) or any(is_checkpointed(child) for child in module.modules()):
        return
    if all(type(child).__module__.startswith(_TRACERS) and not _calls_others(child) for child in module.modules()):
        yield Fault(
            "a traced stage has no region: the trace leaves out those that were set before it",
            f"stage {stage}, a GraphModule as pipeline() makes one, without a region",
            _traced_works(stage, module),
        )


def _calls_others(module: nn.Module) -> bool:
    """Whether the graph of ``module``, if it has one, calls functions that are not torch's or Python's."""
    graph = getattr(module, "graph", None)
    calls = (node.target for node in getattr(graph, "nodes", ()) if node.op == "call_function")
    modules = (getattr(function, "__module__", None) or "torch" for function in calls)
    return any(name.partition(".")[0] not in _KNOWN for name in modules)


def _traced_works(stage: int, module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules()]
    repeated = next((name.rpartition(".")[0] for name in names if name.rpartition(".")[2].isdigit()), None)
    pattern = next(iter(names[1:]), "layers.*") if repeated is None else f"{repeated}.*".lstrip(".")
    return (
        f'torchckpt.checkpoint_layers(pipe.get_stage_module({stage}), "{pattern}"), '
        f"and then pipe.build_stage({stage}, device)"
    )


def raise_without_regions(stage: int, module: nn.Module, outputs: object, is_planned: bool = False) -> None:
    """Raise ``RegionError``: the forward of ``stage`` that made ``outputs`` entered no region. A stage that
    ``is_planned`` may have none, unless they are inside of compiled code."""
    inside = list(_in_graphs(module, ""))
    if is_planned and not inside:
        return
    if inside:
        received, works = f"stage {stage}, with {inside[0]} inside of compiled code", _COMPILE
    elif any("CheckpointFunction" in node_name(node) for node in nodes_behind(tensors_in(outputs))):  # reentrant
        received = f"stage {stage}, with regions of torch.utils.checkpoint(use_reentrant=True)"
        works = _WORKS
    elif traced := list(traced_faults(stage, module)):
        received, works = traced[0].received, traced[0].works
    else:
        received = f"stage {stage}, whose forward entered none"
        works = (
            "for block in stage_module.layers: torchckpt.checkpoint_module(block); or "
            f"recompute_ahead(schedule, exempt={{({stage}, micro_batch), ...}})"
        )
    raise RegionError(str(Fault("a stage that is to be recomputed has no region", received, works)))


# split backwards ------------------------------------------------------------------------------------------------------


class LeftOut:
    """Warns, once for each stage, of what is trained and gets no gradient: tensors that are no parameters of it, and
    all its parameters where no input needs a gradient.

    ``stage_backward_weight`` of ``torch/distributed/pipelining/_backward.py`` (2.11 to 2.15) asks for the gradients of
    the stage's parameters alone, and ``stage_backward_input`` there finds these between inputs that need a gradient and
    outputs. Where a plan does the backward of a visit in one, all have a gradient of that visit. Ends when torch
    accumulates into all.

    A leaf that is made in a forward, as a dummy that has torch record a graph, is nobody's to train: so a leaf counts
    that is behind two micro-batches.
    """

    def __init__(self) -> None:
        self._behind_first: dict[int, list[weakref.ref[Tensor]]] = {}

    def look(self, stage: LiveStage, micro_batch: int, losses: Sequence[Tensor]) -> None:
        """Look at what is behind the output of ``stage``, or its loss, right before a split backward."""
        first = self._behind_first.get(stage.stage_index)
        if first == []:
            return
        outputs, received = split_at(stage, micro_batch, losses)
        nodes: Iterator[Any] = nodes_behind(outputs)  # whose types know no variables
        leaves = [node.variable for node in nodes if node_name(node).endswith("AccumulateGrad")]
        known = {id(tensor) for tensor in (*stage.submod.parameters(), *received)}
        if leaves and received and not any(tensor.requires_grad for tensor in tensors_in(received)):
            self._behind_first[stage.stage_index] = []
            self._warn(
                "a stage whose inputs need none",
                f"stage {stage.stage_index}, behind frozen ones",
                "ScheduleInterleaved1F1B(stages, ...), whose backwards are whole; or train what is before this stage",
            )
            return
        left_out = [leaf for leaf in leaves if id(leaf) not in known]
        if first is None:
            self._behind_first[stage.stage_index] = [weakref.ref(leaf) for leaf in left_out]
            return
        self._behind_first[stage.stage_index] = []
        again = {id(leaf()) for leaf in first}
        shapes = [list(leaf.shape) for leaf in left_out if id(leaf) in again]
        if shapes:
            more = f", and {len(shapes) - 1} more" if shapes[1:] else ""
            self._warn(
                "what is no parameter of the stage",
                f"stage {stage.stage_index}, with a tensor of shape {shapes[0]}{more}",
                "stage_module.scale = torch.nn.Parameter(scale), and stage_module.scale where it is used",
            )

    def _warn(self, what: str, received: str, works: str) -> None:
        rule = (
            f"recompute_ahead: split backwards, as in torch, give no gradient to {what}; whole ones, which a plan may "
            "do in their place, give it"
        )
        warnings.warn(str(Fault(rule, received, works)), stacklevel=3)


def splits(schedule: Schedule) -> bool:
    """Whether backwards are split."""
    return any(action.kind is Kind.WEIGHT_GRAD for order in schedule.ranks for action in order)


def warn_of_whole(stages: Iterable[LiveStage], schedule: Schedule, stacklevel: int) -> bool:
    """Warn, and say so, where gradients of ``stages`` differ once a plan does whole backwards in place of split ones:
    FSDP2 and hooks of parameters see no end of a split one. Ends when they do."""
    for stage in stages if splits(schedule) else ():
        if what := only_whole(stage.submod):
            rule = (
                "recompute_ahead: a plan may do whole backwards in place of split ones, and gradients differ: in whole "
                f"ones alone, in torch, {what}"
            )
            works = "a schedule with whole backwards, such as ScheduleInterleaved1F1B; or none of that"
            fault = Fault(rule, f"{schedule.name}, and stage {stage.stage_index}", works)
            warnings.warn(str(fault), stacklevel=stacklevel)
            return True
    return False


# a step that failed ---------------------------------------------------------------------------------------------------

END = "the end of the step"
"""Where a step is after its last action."""

PREPARING = "the preparation of its stages"
"""Where a step is while torch has ranks tell each other what stages take and give, before its first action."""

GIVEN_SHAPES = "PipelineStage(module, index, stages, device, input_args=example, output_args=example)"

_LINES, _LINE = 8, 1000  # of the reason that a failed step quotes, and of each line of it
_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward (inputs)",
    "W": "backward (weights)",
    "R": "recompute",
    "SEND_F": "send of the activation",
    "RECV_F": "receive of the activation",
    "SEND_B": "send of the gradient",
    "RECV_B": "receive of the gradient",
    "UNSHARD": "gathering of parameters",
    "RESHARD": "release of gathered parameters",
    "REDUCE_GRAD": "reduction of gradients",
    "WAIT_SEND_F": "wait for the end of the send of the activation",
    "WAIT_SEND_B": "wait for the end of the send of the gradient",
    "WAIT_REDUCE_GRAD": "wait for the end of the reduction of gradients",
}


def failure_of(error: Exception, rank: str, action: str | None, finds_shapes: bool, remedy: str) -> ScheduleError:
    """The error about a step that failed with ``error``.

    Args:
        rank: such as ``"0 of 4"``.
        action: the one that had begun, such as ``"1RECV_B3"``; ``PREPARING`` or None before the first; ``END``.
        finds_shapes: whether torch was finding the shapes of a stage by running it.
        remedy: what else may help, at the end of the message.
    """
    where, match = "preparing its stages, before the first action", _ACTION.match(action or "")
    if match is not None:
        stage, kind, micro_batch = match.groups()
        of_stage = f", micro-batch {micro_batch}" if micro_batch else ""
        where = f"stage {stage}{of_stage}, {_WORDS.get(kind, kind)} ({action})"
    elif action == END:
        where = "after its last action, where torch waits for the end of its sends, and lists the losses"
    shapes = f"; torch runs later stages on uninitialised memory to find their shapes, unless {GIVEN_SHAPES}"
    first = _first_cause(error)
    rule = f"a step of the pipeline failed on rank {rank}: {where}"
    works = (
        "the step without that error; if it is one of communication, another rank failed before, and says at what "
        f"itself{shapes if finds_shapes else ''}{remedy}"
    )
    return ScheduleError(str(Fault(rule, f"{type(first).__name__}: {_shown(first)}", works)))


def out_of_memory(error: Exception) -> str | None:
    """What the device said where the first cause is a lack of memory: the error itself, in a local variable of a frame
    that it passes, would keep that frame with all tensors until the garbage collector runs."""
    cause = _first_cause(error)
    return str(cause) if isinstance(cause, torch.OutOfMemoryError) else None


def _first_cause(error: BaseException) -> BaseException:
    """The error that a stage raised, which torch wraps."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _shown(error: BaseException) -> str:
    """The first lines of its message, those behind the first indented; of all of them, ranks would print pages."""
    lines = [line.rstrip() for line in str(error).strip().splitlines() if line.strip()]
    lines = [line if len(line) <= _LINE else f"{line[:_LINE]}... (all of it in __cause__)" for line in lines]
    more = [f"({len(lines) - _LINES} more lines in __cause__)"] if len(lines) > _LINES else []
    return "\n              ".join([*lines[:_LINES], *more])
