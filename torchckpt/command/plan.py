"""Plan: a pipeline under a byte budget, on paper."""
from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchckpt.command.costs import ORDER, add_model, model_costs, model_faults
from torchckpt.command.job import add_job, job_faults, run_job
from torchckpt.command.shared import (
    Parser,
    Unusable,
    add_command,
    add_schedule,
    amount,
    count,
    file_to_write,
    give,
    line,
    positive,
    schedule_name,
    schedule_of_csv,
    with_unit,
)
from torchckpt.command.target import CONTRACT
from torchckpt.errors import ArgumentError
from torchckpt.planning.budget import WORKS, DeviceMemory, read
from torchckpt.planning.device import device_named, left_to_tensors
from torchckpt.planning.draw.units import units_of_bytes
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.order.schedules import named_schedule
from torchckpt.planning.plan import PipelinePlan, plan_pipeline
from torchckpt.planning.plan.every import Comparison, plan_every
from torchckpt.planning.plan.figures import Rule
from torchckpt.planning.plan.pipeline import plan_of
from torchckpt.planning.work.block import Block, Stage, fixed
from torchckpt.planning.work.host import Host

__all__ = ["add", "run"]

_MOST = 1_000_000
_MOST_BLOCKS = 1000
"""Of a stage."""
_LEAST_SAVED = 1000
"""A block that saves less is not given in bytes."""
_DEFAULTS = {
    "forward": [1.0],
    "backward": [2.0],
    "weight_grad": [1.0],
    "recompute": [1.0],
    "saved": [1.0],
    "boundary": [0.0],
}
_NOTHING = (0.0, 0.0, 0.0)
_ALL = "all"
_OF_JOBS = "zb-2p"
_EXAMPLES = f"""\
times and bytes are in any one unit, of one micro-batch and one block; a list has one for each stage

the budget is what a rank holds for backwards, of every rank or a list with one for each:
  50%                       a share of the peak of the rank that holds most when everything is kept
  60GB, 60GiB               of a model, or where --saved and --boundary are bytes
  16.5                      in the unit of --saved
of a model without a budget: what its --device has beside parameters, gradients and optimizer state
--host and --host-link are in the same units, a list has one for each rank; blocks are sent away where that is shorter

the last line says what the plan is worth, over the step that keeps everything; beside it the bound, which no plan of
this schedule goes below, and what people do without a plan

examples:
  python -m torchckpt plan --schedule 1f1b --stages 4 --microbatches 8 --blocks 8,8,8,7 --boundary 0.06 \\
      --first 0.1,0.2,0 --last 1,2,2 --budget 50%
  python -m torchckpt plan --schedule all --stages 8 --microbatches 32 --blocks 8 --link 0.8 --budget 30%
  python -m torchckpt plan --schedule 1f1b --stages 4 --microbatches 8 --blocks 8 --budget 30% --host 40 --host-link 0.5
  python -m torchckpt plan --model llama3-70b --gpus 64 --device h100 --tp 8 --pp 4 --dp 2 --global-batch 256
  python -m torchckpt plan --model llama3-70b --gpus 64 --device h100 --global-batch 256 --search
  python -m torchckpt plan --csv schedule.csv --blocks 4 --budget 50% --balance --svg plan.svg
  python -m torchckpt plan examples.plan_llama:stages --device h100 --microbatches 32 --schedule all --budget 60GB

{CONTRACT}
A list of modules are the stages, and so are the members of an nn.Sequential; another module is one stage. Nothing is
run or takes memory. Blocks are regions; in a model without any, children of nn.ModuleList and nn.Sequential that
repeat.
"""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    short = "what to keep and what to recompute in a pipeline, under a byte budget"
    description = "Plan what a pipeline keeps, what it recomputes, and when, under a byte budget."
    plan = add_command(commands, "plan", short, description, _EXAMPLES)
    group = add_schedule(
        plan, lambda text: text if text in (_ALL, _OF_JOBS) else schedule_name(text),
        "; all: each that fits, and the table; zb-2p: with --model", required=False,
    )
    group.add_argument("--ranks", type=count, metavar="R", help="default: as many as the schedule deals the stages to")
    _add_stages(plan)
    add_model(plan)
    add_job(plan)
    _add_plan(plan)


def run(options: argparse.Namespace) -> None:
    job_faults(options)
    if options.model is not None:
        run_job(options, _host(options))
        return
    if options.schedule is None and options.csv is None:
        works = "python -m torchckpt plan --schedule 1f1b --stages 4 --microbatches 8 --blocks 8 --budget 50%"
        works = works if options.target is None else f"plan {options.target} --device h100 {ORDER}"
        raise Unusable(f"one of the arguments --schedule --csv --model is required; works: {works}")
    model_faults(options)
    host = _host(options)
    costs = None if options.target is None else model_costs(options)
    schedule, stages = _asked(options, None if costs is None else costs.stages)
    budget = _budget(options) if options.device_memory is None else DeviceMemory(options.device_memory)
    latency, balance = options.link or 0.0, bool(options.balance)
    link = latency if costs is None else replace(costs.link, latency_seconds=latency)
    compared, stop = None, None
    more: dict[str, Any] = {"balance": balance, "host": host}
    try:
        if schedule is None:
            ranks = options.ranks or len(stages)
            compared = plan_every(stages, options.microbatches, budget, link, ranks=ranks, **more)
            plan = compared.best
        else:
            plan = plan_pipeline(schedule, stages, budget, link, **more)
    except KeyboardInterrupt as interrupt:
        if (plan := plan_of(stop := interrupt)) is None:
            raise
    except ArgumentError as error:
        if _is_in_bytes(options):
            raise
        raise ArgumentError(str(error).replace(WORKS, 'budget="50%", budget=16.5')) from error
    over = _over_device(plan, options)
    counted = {} if costs is None else {"costs": costs.as_json()}
    more = {**counted, **({"does_not_fit": over} if over else {})}
    give(options, lambda: {**_as_json(plan, compared), **more}, over, costs, compared, plan, svg=plan.draw)
    if stop is not None:
        raise stop


def _over_device(plan: PipelinePlan, options: argparse.Namespace) -> str:
    """The line that says that a device cannot hold the plan; empty if it can, or if there is none."""
    if options.device is None:
        return ""
    device, units = device_named(options.device), units_of_bytes(max(plan.problem.budget_bytes))
    memory = options.device_memory or device.memory_bytes
    other = 0.0 if options.device_memory else memory - left_to_tensors(memory)
    totals = [static + peak for static, peak in zip(plan.static_bytes, plan.peak_bytes)]
    rank = max(range(len(totals)), key=totals.__getitem__)
    if totals[rank] + other <= memory:
        return ""
    beside = f"{units.of_memory(other)} of context, buffers and margin, " if other else ""
    static, peak = units.of_memory(plan.static_bytes[rank]), units.of_memory(plan.peak_bytes[rank])
    return (
        f"this does not fit: {device.name} has {units.of_memory(memory)}, and rank {rank} holds "
        f"{beside}{static} of parameters, gradients and optimizer state beside {peak} of activations"
    )


def _as_json(plan: PipelinePlan, compared: Comparison | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_figures(plan),
        "keep_all": plan.keep_all_seconds,
        "recompute_all": _rule_as_json(plan, plan.all_recomputed),
        "same_blocks": _rule_as_json(plan, plan.same_recomputed),
        "plan": json.loads(plan.to_json()),
    }
    if plan.alone is not None:
        found |= dict(zip(("recompute_alone", "offload_alone"), plan.alone))
        found |= {"host_bytes": list(plan.problem.host_bytes), "host_peak_bytes": list(plan.step.host_peak_bytes)}
    if compared is not None:
        found["schedules"] = [
            {**_figures(row), "stages": row.schedule.stages, "overhead": compared.overhead(row.step_seconds)}
            for row in compared.plans
        ]
        found["too_small_for"] = list(compared.too_small)
    return found


def _figures(plan: PipelinePlan) -> dict[str, Any]:
    return {
        "schedule": plan.schedule.name,
        "step": plan.step_seconds,
        "bound": plan.bound_seconds,
        "budget_bytes": list(plan.problem.budget_bytes),
        "peak_bytes": list(plan.peak_bytes),
        "recomputed_share": plan.recomputed_share,
        "balance": list(plan.balance),
    }


def _rule_as_json(plan: PipelinePlan, rule: Rule) -> dict[str, Any]:
    """The numbers of a rule, named as those of the plan; without a step where it does not fit."""
    fits = math.isfinite(rule.step_seconds)
    asked = plan.asked or plan.problem
    stages = asked.stages
    every = sum(stage.recompute_seconds for stage in stages)
    recomputed = sum(block.recompute_seconds for stage in stages for block in stage.blocks[: rule.blocks])
    return {
        "blocks": rule.blocks,
        "step": rule.step_seconds,
        "bound": asked.bound_seconds,
        "keep_all": plan.keep_all_seconds,
        "budget_bytes": list(plan.problem.budget_bytes),
        "peak_bytes": list(rule.peak_bytes) if fits else None,
        "recomputed_share": recomputed / every if every else 0.0,
        "balance": [len(stage.blocks) for stage in stages],
    }


def _asked(options: argparse.Namespace, counted: Sequence[Stage] | None) -> tuple[Schedule | None, Sequence[Stage]]:
    """The schedule, None for every one, and its stages; ``counted`` are the stages of a model."""
    if counted is not None and options.csv is None:
        options.stages = len(counted)
    schedule = schedule_of_csv(options, "ranks", _MOST)
    if counted is not None and schedule is not None and schedule.stages != len(counted):
        received = f"{len(counted)} stages of the model, {schedule.stages} of {options.csv}"
        works = f"a file of {len(counted)}, or --schedule gpipe --microbatches {schedule.micro_batches}"
        raise Unusable(f"the model has another number of stages than the file; received: {received}; works: {works}")
    stages = counted or _stages(options, schedule.stages if schedule else options.stages)
    if schedule is None and options.schedule != _ALL:
        schedule = _schedule(options)
    return schedule, stages


def _schedule(options: argparse.Namespace) -> Schedule:
    """Stages dealt to ``--ranks``; by default as the schedule deals them: one or two a rank."""
    name, stages = options.schedule, options.stages
    each = named_schedule(name, 1, 2).stages
    ranks = stages // each if options.ranks is None else options.ranks
    if ranks < 1 or stages % ranks or (options.ranks is None and stages % each):
        works = f"--stages {max(1, ranks) * each}" + ("" if options.ranks is None else f" --ranks {ranks}")
        received = f"--stages {stages}" + ("" if options.ranks is None else f" --ranks {ranks}")
        raise Unusable(f"the stages do not divide among the ranks of {name}; received: {received}; works: {works}")
    chunks = stages // ranks
    if chunks == each:
        return named_schedule(name, ranks, options.microbatches)
    try:
        return named_schedule(name, ranks, options.microbatches, chunks)
    except ArgumentError as error:
        if named_schedule(name, 1, 2).stages == each and "fixes its number" in str(error):
            raise Unusable(
                f"{name} takes {each} stage{'s' * (each > 1)} on each rank, not {chunks}; "
                f"received: --stages {stages} --ranks {ranks}; works: --stages {ranks * each} --ranks {ranks}"
            ) from error
        raise


def _stages(options: argparse.Namespace, count: int) -> list[Stage]:
    def listed(name: str) -> list[float]:
        values: list[float] = getattr(options, name) or _DEFAULTS[name]
        if len(values) not in (1, count):
            flag = f"--{name.replace('_', '-')}"
            works = ",".join(f"{value:g}" for value in (values * count)[:count])
            raise Unusable(f"{flag} has {len(values)} numbers for {count} stages; works: "
                           f"{flag} {works}")
        return values * count if len(values) == 1 else values

    names = ("blocks", "forward", "backward", "weight_grad", "recompute", "saved", "boundary")
    rows = zip(*(listed(name) for name in names))
    stages = []
    for stage, (blocks, forward, backward, weight, recompute, saved, boundary) in enumerate(rows):
        if weight > backward:
            raise Unusable(
                f"--weight-grad is more than --backward; received: {weight:g} of {backward:g} on stage {stage}; "
                f"works: --weight-grad {backward / 2:g}"
            )
        if boundary > saved:
            raise Unusable(
                f"--boundary is more than --saved; received: {boundary:g} of {saved:g} on stage {stage}; "
                f"works: --boundary {saved / 4:g}"
            )
        block = Block(forward, backward - weight, weight, recompute, saved, boundary)
        before = _fixed(options.first or _NOTHING, 1.0) if stage == 0 else fixed()
        after = _fixed(options.last or _NOTHING, weight / backward) if stage == count - 1 else fixed()
        if not blocks and not before.forward_seconds + after.forward_seconds:
            works = ",".join(f"{max(1.0, each):g}" for each in listed("blocks"))
            raise Unusable(f"stage {stage} has no blocks, no --first and no --last; received: --blocks with 0 for it; "
                           f"works: --blocks {works}")
        stages.append(Stage((block,) * int(blocks), before, after))
    return stages


def _fixed(parts: Sequence[float], weight_share: float) -> Block:
    """A part of a stage beside its blocks: forward, backward, bytes. The first has no input that needs a gradient."""
    forward, backward, saved = parts
    return fixed(forward, backward * (1 - weight_share), backward * weight_share, saved)


def _budget(options: argparse.Namespace) -> str | float | list[str | float]:
    """The budget, or one for each rank. A number is one in the unit of ``--saved``; of a model, one of bytes."""
    parts = [_amount_of(part, options) for part in options.budget.split(",")]
    return parts if len(parts) > 1 else parts[0]


def _host(options: argparse.Namespace) -> Host | None:
    """The host; None if there is none. Numbers are as those of the budget."""
    room, rate, other = ("200GB", "25GB", "20GB") if _is_in_bytes(options) else ("40", "0.5", "0.25")
    names, works = ("host", "host_link", "host_half_duplex"), f"works: --host {room} --host-link {rate}"
    given = [f"--{name.replace('_', '-')} {getattr(options, name)}".removesuffix(" True") for name in names
             if getattr(options, name)]
    received = f"received: {' '.join(given)}"
    if options.host is None or options.host_link is None:
        if given:
            raise Unusable(f"a host is given without its bytes, or without those of its link; {received}; {works}")
        return None
    sizes = [_amount_of(part, options, "host") for part in options.host.split(",")]
    out, *back = [_amount_of(part, options, "host-link") for part in options.host_link.split(",")]
    if len(back) > 1:
        raise Unusable(f"the link to a host has two directions; {received}; works: --host-link {rate},{other}")
    try:
        host = Host(sizes if len(sizes) > 1 else sizes[0], out, half_duplex=options.host_half_duplex)
        return replace(host, back=back[0]) if back else host
    except ArgumentError as error:
        raise Unusable(f"{line(error).partition('; received: ')[0]}; {received}; {works}") from None


def _is_in_bytes(options: argparse.Namespace) -> bool:
    """Whether budgets are in bytes: those of a model are, and of numbers those that are as large."""
    return _is_of_model(options) or min(options.saved or _DEFAULTS["saved"]) >= _LEAST_SAVED


def _is_of_model(options: argparse.Namespace) -> bool:
    return options.target is not None or options.model is not None


def _amount_of(text: str, options: argparse.Namespace, name: str = "budget") -> str | float:
    what = {"budget": "the budget", "host": "the memory of the host", "host-link": "the link to the host"}[name]
    if _is_of_model(options):
        try:
            return with_unit(text)
        except Unusable as error:
            works = f"{text}GB" if float(text) else "25GB" if name == "host-link" else "200GB"
            raise Unusable(f"{what} is no size; received: --{name} {error}; works: --{name} {works}") from None
    try:
        return float(text)
    except ValueError:
        saved, works = min(options.saved or _DEFAULTS["saved"]), "--budget 50%, or " * (name == "budget")
        if not text.endswith("%") and read(text) and not _is_in_bytes(options):
            raise Unusable(
                f"{what} is in bytes, and --saved is not; received: --{name} {text} and --saved "
                f"{saved:g}; works: {works}--saved 34e6 --boundary 2e6 --{name} {text}"
            ) from None
        return text


def _listed(text: str, each: Callable[[str], float]) -> list[float]:
    try:
        return [each(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        rule = str(error).partition("; received: ")[0]
        raise argparse.ArgumentTypeError(f"{rule}; received: {text}") from None


def _counts(text: str) -> list[float]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or not any(map(int, parts)):
        raise argparse.ArgumentTypeError(f"not blocks of each stage, such as 8 or 8,8,8,7; received: {text}")
    if max(map(int, parts)) > _MOST_BLOCKS:
        raise argparse.ArgumentTypeError(f"more than {_MOST_BLOCKS} blocks of a stage; received: {text}")
    return [float(part) for part in parts]


def _three(text: str) -> list[float]:
    amounts = _listed(text, amount)
    if len(amounts) != 3:
        raise argparse.ArgumentTypeError(f"not forward, backward and bytes, such as 1,2,2; received: {text}")
    return amounts


def _add_stages(parser: argparse.ArgumentParser) -> None:
    amounts, positives = partial(_listed, each=amount), partial(_listed, each=positive)
    group = parser.add_argument_group("stages", "one number, or a list with one for each stage; of one block:")
    group.add_argument("--blocks", type=_counts, metavar="N", help="of a stage")
    group.add_argument("--forward", type=positives, metavar="TIME", help="default: 1")
    group.add_argument("--backward", type=positives, metavar="TIME", help="default: 2")
    group.add_argument("--weight-grad", type=amounts, metavar="TIME", help="of it, default: 1")
    group.add_argument("--recompute", type=positives, metavar="TIME", help="default: 1")
    group.add_argument("--saved", type=positives, metavar="BYTES", help="default: 1")
    group.add_argument("--boundary", type=amounts, metavar="BYTES", help="its input; default: 0")
    for name, what in (("--first", "before all blocks: an embedding"), ("--last", "after them: a head, a loss")):
        text = f"never recomputed, {what}"
        group.add_argument(name, type=_three, metavar="F,B,BYTES", help=text)
    group.add_argument("--link", type=amount, metavar="TIME", help="of one message; default: 0")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    group.add_argument("--budget", metavar="BYTES", help="of a rank: 50%%, 60GB, or a number")
    group.add_argument("--host", metavar="BYTES", help="memory of a rank on its host, to send blocks to: 200GB")
    group.add_argument("--host-link", metavar="BYTES[,BACK]", help="a second to the host, and back if that differs")
    group.add_argument("--host-half-duplex", action="store_true", help="the link copies one way at a time")
    group.add_argument("--balance", action="store_true", default=None, help="also move blocks between stages")
    group.add_argument("--svg", type=file_to_write(".svg"), metavar="FILE", help="draw the step and the memory")
    group.add_argument("--json", action="store_true", help="print JSON instead of the tables")
