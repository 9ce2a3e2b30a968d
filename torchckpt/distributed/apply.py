"""The calls ``recompute_ahead`` and ``schedule_of``: what they take, and what is wrong with it."""
from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import overload

import torch
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
)
from torch.nn.parallel import DistributedDataParallel

from torchckpt.distributed.ahead import RecomputeAhead
from torchckpt.distributed.faults import GIVEN_SHAPES, splits, traced_faults
from torchckpt.distributed.phases import Plan, plan_for
from torchckpt.distributed.private import (
    Live,
    finds_shapes,
    freed_in_a_step,
    micro_batches_of,
    order_of,
    sends_objects,
    stages_of,
)
from torchckpt.distributed.within import RecomputeWithin
from torchckpt.errors import Fault, called, check, kind
from torchckpt.planning import Schedule, ahead, from_csv, gpipe, one_f_one_b, quickest, with_recompute
from torchckpt.planning.budget import Bytes
from torchckpt.planning.order.schedule import Visit
from torchckpt.planning.work.block import Links, Stages, per_boundary, per_stage
from torchckpt.planning.work.choice import exempt as exempted
from torchckpt.planning.work.choice import free_to_keep, no_such_visit, visit_faults
from torchckpt.regions.moved.copies import goes_from

__all__ = ["recompute_ahead", "schedule_of"]

_WORKS = "recompute_ahead(Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn))"
_EXEMPT = ("auto", "none")


@called("schedule_of()")
def schedule_of(live: Live) -> Schedule:
    """The order that a schedule object of torch runs, on all ranks, as a :class:`~torchckpt.planning.Schedule`.

    Args:
        live: ``ScheduleGPipe``, ``Schedule1F1B``, or any schedule of several stages per rank. For the first two the
            order comes from ``torchckpt.planning``: torch does not run them from a list of actions, and the list that
            ``Schedule1F1B._get_pipeline_order`` gives is off by one on the last rank (torch 2.13).

    Raises:
        ArgumentError: ``live`` is no schedule of torch, or torch does not list its order.
    """
    if isinstance(live, (ScheduleGPipe, Schedule1F1B)):
        make = gpipe if isinstance(live, ScheduleGPipe) else one_f_one_b
        return make(stages_of(live)[0].num_stages, micro_batches_of(live))
    order = order_of(live)
    works = "schedule_of(ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=loss_fn))"
    rule = "the argument is no schedule of torch.distributed.pipelining that lists its order"
    check([] if order else [Fault(rule, type(live).__name__, works)])
    rows = (",".join("" if action is None else str(action) for action in order[rank]) for rank in sorted(order))
    return from_csv("\n".join(rows) + "\n", name=type(live).__name__)


@overload
def recompute_ahead(
    schedule: Live,
    segments: int | None = None,
    exempt: str | Collection[Visit] = "auto",
    costs: Stages | str | None = None,
    link: Links | None = None,
    *,
    budget: None = None,
    host: None = None,
    plan: None = None,
) -> RecomputeAhead: ...
@overload
def recompute_ahead(
    schedule: Live, *, budget: Bytes | None = None, host: Bytes | None = None, plan: Plan | None = None
) -> RecomputeWithin: ...
@called("recompute_ahead()")
def recompute_ahead(
    schedule: Live,
    segments: int | None = None,
    exempt: str | Collection[Visit] = "auto",
    costs: Stages | str | None = None,
    link: Links | None = None,
    *,
    budget: Bytes | None = None,
    host: Bytes | None = None,
    plan: Plan | None = None,
) -> RecomputeAhead:
    """Have ``schedule`` recompute before gradients arrive. Call it on every rank, with the same arguments.

    >>> stage = PipelineStage(module, index, stages, device)      # whose blocks use torchckpt.checkpoint_module
    >>> schedule = recompute_ahead(Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn))
    >>> schedule.step(x, target=y, losses=losses)
    >>> print(schedule.report())

    Losses and gradients are, to the bit, those of the schedule itself. The order of actions is static, and the same in
    every run: the recompute of a micro-batch stands right before its backward, or where ``costs`` put it.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``, or one read from CSV. It shares its stages with the
            one that is returned, which is to be used instead.
        segments: how many regions of a stage, the last ones, are recomputed early, which hides them. The others are
            recomputed inside the backward, which saves memory. Default: all.
        exempt: the (stage, micro-batch) whose regions keep their activations. ``"auto"``: those that are free to keep
            (:func:`~torchckpt.planning.work.choice.free_to_keep`), such as the last stage of 1F1B; none where only some
            ``segments`` are early. ``"none"``: nothing is kept.
        costs: of every stage, or one per stage: recomputes stand where a simulation has their rank idle; with
            ``segments``, those of the early regions. ``"measured"``: those of the first steps, on which all processes
            of the job then agree (so all of them must be stepping). Default: right before the backward.
        link: beside ``costs``: the seconds of a message between neighbouring stages, or their links. Default: none.
        budget: bytes that a step may take on each rank above what is there before it, or a list with one for each rank:
            a number, a size such as ``"60GiB"``, or a share such as ``"50%"`` of the peak of the rank that takes most
            when everything is kept. The first four steps recompute everything and are measured; of them a plan is made,
            which the others follow: what is kept, recomputed early or late, by region, stage and micro-batch.
            Split weight gradients move. All processes of the job must be stepping.
        host: with ``budget``: bytes of each rank in the memory of its host, or a list with one for each. Then regions
            may also be sent there and back; the first steps measure what each can send, and how fast. Default: none.
        plan: one that was made before, by :func:`~torchckpt.planning.plan.plan_pipeline` or in another run
            (``schedule.plan.to_json()``); JSON, or the path of a file with that, too. Its blocks are the regions.

    Returns:
        A schedule with torch's ``step()``, ``eval()``; ``timeline()``, ``report()``, ``schedule``; planned: ``plan``.

    Raises:
        ArgumentError: all faults of the call; a traced stage has no region: one that is set before is not in it.
        CheckpointError: this version of torch has no runtime that could do it.
        BudgetInfeasible: after the fourth step, ``budget`` is below the least; it says how much that is.
        RegionError: at the first step, a stage that enters no region, or one of ``torch.utils.checkpoint``.
        ScheduleError: at a step, an action failed; it names stage, micro-batch and action, and its ``__cause__`` is
            what was raised. Where the first cause is ``torch.OutOfMemoryError``, that is raised.
    """
    check(_schedule_faults(schedule))
    plain = schedule_of(schedule)
    is_planned = budget is not None or plan is not None
    check((
        *_segments_faults(segments),
        *_exempt_faults(exempt, plain),
        *_cost_faults(segments, costs, link, plain),
        *(_plan_faults(budget, plan, segments, exempt, costs, link) if is_planned else ()),
        *_host_faults(schedule, budget, host),
    ))
    is_early = segments is None and not is_planned  # every region that is recomputed
    kept = _kept(exempt, plain, is_early)
    check((*_traced_faults(schedule, plain, kept), *(() if is_early and not kept else _split_faults(schedule, plain))))
    _warn_of_statistics(schedule)
    _warn_of_replicas(schedule, plain)
    if budget is not None:
        return RecomputeWithin(schedule, plain, budget, host)
    if plan is not None:
        return RecomputeWithin(schedule, plain, plan_for(plan, plain))
    placed = plain if segments == 0 else _placed(plain, kept, None if isinstance(costs, str) else costs, link or 0.0)
    return RecomputeAhead(schedule, placed, segments, kept, is_measuring=costs == "measured")


def _kept(exempt: str | Collection[Visit], schedule: Schedule, is_early: bool) -> frozenset[Visit]:
    """The visits that keep their activations."""
    if isinstance(exempt, str):
        return free_to_keep(schedule) if exempt == "auto" and is_early else frozenset()
    return frozenset(exempt)


def _placed(schedule: Schedule, kept: Collection[Visit], costs: Stages | None, link: Links) -> Schedule:
    """``schedule`` with its recomputes."""
    choices = exempted(schedule, ahead(schedule), *kept)
    return with_recompute(schedule, choices) if costs is None else quickest(schedule, choices, costs, link)


def _traced_faults(live: Live, schedule: Schedule, kept: Collection[Visit]) -> Iterator[Fault]:
    """The faults of the stages of this rank that are to be recomputed."""
    for stage in stages_of(live):
        if any((stage.stage_index, i) not in kept for i in range(schedule.micro_batches)):
            yield from traced_faults(stage.stage_index, stage.submod)


def _split_faults(live: Live, schedule: Schedule) -> Iterator[Fault]:
    """torch splits a backward by the nodes of parameters, in ``torch/distributed/pipelining/_backward.py`` (2.15).
    FSDP2 makes others where it gathers again, and gradients are lost or wrong. A replay before the backward has those
    of the backward. Ends when torch says so itself."""
    for stage in stages_of(live) if splits(schedule) else ():
        freed = freed_in_a_step(stage.submod)
        if freed:
            yield Fault(
                "a backward that is split loses gradients of parameters that FSDP2 frees within a step",
                f"{schedule.name}, and stage {stage.stage_index} with {freed[0] or type(stage.submod).__name__!r}"
                f"{f' and {len(freed) - 1} more' if freed[1:] else ''}",
                "for block in stage_module.layers: fully_shard(block, reshard_after_forward=False), then "
                "fully_shard(stage_module); or a schedule with whole backwards, such as ScheduleInterleaved1F1B",
            )


def _warn_of_replicas(live: Live, schedule: Schedule) -> None:
    """DDP hears of no backward that torch splits. Ends when it does."""
    for stage in stages_of(live) if splits(schedule) else ():
        if any(isinstance(module, DistributedDataParallel) for module in stage.submod.modules()):
            rule = "recompute_ahead: DistributedDataParallel does not reduce the gradients of split backwards"
            works = (
                "fully_shard(block, reshard_after_forward=False) and fully_shard(stage_module); or after a step, "
                "for x in module.parameters(): dist.all_reduce(x.grad, group=replicas), and divide"
            )
            fault = Fault(rule, f"{schedule.name}, and stage {stage.stage_index}", works)
            warnings.warn(str(fault), stacklevel=4)
            return


def _warn_of_statistics(live: Live) -> None:
    """torch's search for shapes is a forward: running statistics take in what was in memory, NaN as well. It is in
    ``_forward_metadata_inference`` of ``torch/distributed/pipelining/stage.py`` (2.13). Ends when that changes none."""
    for stage in stages_of(live):
        if stage.is_first or not finds_shapes(stage):
            continue
        for name, module in stage.submod.named_modules():
            if module.training and getattr(module, "track_running_stats", False):
                rule = (
                    "recompute_ahead: torch finds the shapes of a later stage by running it on uninitialised memory, "
                    "which running statistics take in"
                )
                received = f"stage {stage.stage_index}, with {type(module).__name__} {name!r}"
                example = "torch.empty(rows, ..., requires_grad=True) of one micro-batch"
                works = f"{GIVEN_SHAPES}, on every rank, with example = {example}"
                warnings.warn(str(Fault(rule, received, works)), stacklevel=4)
                return


def _schedule_faults(schedule: object) -> Iterator[Fault]:
    if isinstance(schedule, RecomputeAhead):
        works = "schedule.step(x, target=y)"
        yield Fault("the schedule recomputes ahead already", "what recompute_ahead() returned", works)
    elif not isinstance(schedule, (PipelineScheduleSingle, PipelineScheduleMulti)):
        yield Fault("the schedule is none of torch.distributed.pipelining", kind(schedule), _WORKS)
    else:
        yield from _numpy_faults(schedule)


def _numpy_faults(live: Live) -> Iterator[Fault]:
    """torch's ``send_object_list`` needs NumPy. In a step, the ranks that fail leave others waiting."""
    stage = next((stage for stage in stages_of(live) if sends_objects(stage)), None)
    if stage is not None and not _has_numpy():
        i, stages = stage.stage_index, stage.num_stages
        yield Fault(
            "NumPy is missing: with it, torch tells each rank the shapes that its stages take and give",
            f"no NumPy, and stage {i} of {stages} without input_args and output_args",
            "pip install numpy, which comes with 'torchckpt[distributed]'; or "
            f"PipelineStage(module, {i}, {stages}, device, input_args=x, output_args=y) on all ranks, with tensors of "
            "one micro-batch that require gradients where those of a step do",
        )


def _has_numpy() -> bool:
    try:
        torch.empty(0).numpy()
    except RuntimeError:
        return False
    return True


def _segments_faults(segments: object) -> Iterator[Fault]:
    is_count = isinstance(segments, int) and not isinstance(segments, bool) and segments >= 0
    if segments is not None and not is_count:
        wrong = "segments is not a number of regions, 0 or more, or None for all"
        yield Fault(wrong, f"segments={segments!r}", "segments=1")


def _exempt_faults(exempt: object, schedule: Schedule) -> Iterator[Fault]:
    rule = "exempt is not 'auto', 'none', or a set of (stage, micro-batch)"
    works = f"exempt={{({schedule.stages - 1}, 0)}}"
    if isinstance(exempt, str):
        if exempt not in _EXEMPT:
            close = get_close_matches(exempt, _EXEMPT, n=1, cutoff=0.0)[0]
            yield Fault(rule, repr(exempt), f"exempt={close!r}")
    elif not isinstance(exempt, Collection):
        yield Fault(rule, repr(exempt), works)
    else:
        wrong = [visit for visit in exempt if any(visit_faults(schedule, [visit]))]
        if wrong:
            yield Fault(no_such_visit(schedule), f"exempt with {', '.join(map(repr, wrong))}", works)


def _cost_faults(segments: object, costs: object, link: object, schedule: Schedule) -> Iterator[Fault]:
    if isinstance(costs, str):
        if costs != "measured":
            yield Fault("costs is neither 'measured' nor blocks or stages", repr(costs), "costs='measured'")
    elif costs is not None:
        yield from per_stage(costs, schedule.stages)[1]  # type: ignore[arg-type]  # which is what it checks
        if link is not None:
            yield from per_boundary(link, schedule.stages)[1]  # type: ignore[arg-type]  # likewise
    if link is not None and (costs is None or isinstance(costs, str)):
        rule = "link is given without costs in numbers"
        yield Fault(rule, f"link={link!r}, costs={costs!r}", "costs=Block(1.0, 1.0, 1.0, 1.0), link=0.5")
    if costs is not None and segments == 0:
        received = f"costs={costs!r}, segments=0"
        yield Fault("costs are given, but no segments to recompute early", received, "segments=1, or no costs")


def _host_faults(live: Live, budget: object, host: object) -> Iterator[Fault]:
    if host is None:
        return
    if budget is None:
        rule = "a host is given without a budget, and with no limit on the device nothing has to leave it"
        yield Fault(rule, f"host={host!r}", 'budget="60GiB", host="200GiB"')
    for stage in stages_of(live)[:1]:
        if not goes_from(torch.device(stage.device)):
            rule = "there is nothing to send to a host: what the stage saves is there already"
            yield Fault(rule, f"host={host!r}, and a stage on {stage.device}", 'budget="60GiB" alone')


def _plan_faults(
    budget: object, plan: object, segments: object, exempt: object, costs: object, link: object
) -> Iterator[Fault]:
    """The faults of arguments beside a budget or a plan, which decides those itself."""
    if budget is not None and plan is not None:
        yield Fault("both a budget and a plan are given", f"budget={budget!r} and a plan", "budget=... or plan=...")
    named = {"segments": segments, "exempt": None if exempt == "auto" else exempt, "costs": costs, "link": link}
    others = {name: value for name, value in named.items() if value is not None}
    if others:
        received = ", ".join(f"{name}={value!r}" for name, value in others.items())
        decider = "a budget" if plan is None else "a plan"
        rule = f"{', '.join(others)} cannot go with {decider}, which decides what is kept and what is recomputed early"
        yield Fault(rule, f"{decider} and {received}", 'recompute_ahead(schedule, budget="60GiB")')
