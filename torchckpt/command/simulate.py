"""Simulate: one step of a pipeline schedule on paper, with ways to recompute side by side."""
from __future__ import annotations

import argparse
from collections.abc import Mapping

from torchckpt.command.shared import (
    Parser,
    Unusable,
    add_command,
    add_schedule,
    amount,
    comma_list,
    count,
    file_to_write,
    give,
    line,
    positive,
    schedule_name,
    schedule_of_csv,
)
from torchckpt.errors import ArgumentError
from torchckpt.planning.draw.gantt import gantt
from torchckpt.planning.draw.trace import trace
from torchckpt.planning.draw.units import number
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.order.schedules import named_schedule
from torchckpt.planning.step.table import Report, policy_faults, report
from torchckpt.planning.work.block import Block

__all__ = ["add", "run"]

_MOST = 4_000_000
_EXAMPLES = """\
times are in any one unit, memory counts in A: all that one micro-batch saves on one stage

columns:
  overhead   of the step over the one in which nothing is recomputed
  bound      the least overhead that any placement of these recomputes can have
  hidden     of the seconds that recompute at arrival adds, the share that this row saves
  peak       of the rank that needs most

ways to recompute, for --compare:
  none                      keep everything
  arrival                   when the gradient arrives, as torch.utils.checkpoint does
  ahead, ahead:2            before it arrives, at most 1 (2) micro-batches ahead
  ahead/last_stage          but keep what the last stage saves; so /last_micro_batch, and /first_backward:
                            of each stage the micro-batch that goes back first

examples:
  python -m torchckpt simulate --schedule 1f1b --stages 8 --microbatches 32 --link 0.25
  python -m torchckpt simulate --schedule 1f1b --stages 2 --microbatches 2 \\
      --compare none,arrival,ahead/last_stage --gantt
  python -m torchckpt simulate --schedule zbv --stages 8 --microbatches 8 --svg step.svg --trace step.json
  python -m torchckpt simulate --csv schedule.csv --json
"""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    short = "simulate one step, and compare ways to recompute"
    description = "Simulate one step of a pipeline schedule, and compare ways to recompute."
    simulate = add_command(commands, "simulate", short, description, _EXAMPLES)
    _add_schedule(simulate)
    _add_costs(simulate)
    _add_output(simulate)


def run(options: argparse.Namespace) -> None:
    if options.boundary > 1:
        received, works = f"--boundary {options.boundary:g}", "--boundary 0.25"
        raise Unusable(f"--boundary is above 1, all of A; received: {received}; works: {works}")
    schedule = _schedule(options)
    half = options.backward / 2
    block = Block(options.forward, half, half, options.recompute, 1.0, options.boundary)
    comparison = report(schedule, block, options.link, options.compare)
    schedule = comparison.schedule
    described = f"{schedule.name}: {_described(schedule, _costs(options))}"
    shown = [f"{row.name}\n{gantt(row.timeline)}" for row in comparison.rows if options.gantt]
    give(
        options,
        lambda: {**comparison.as_json(), "costs": _costs(options)},
        described, comparison.table(), *shown,
        svg=lambda: _picture(comparison, options),
        trace=lambda: trace(*(row.timeline for row in comparison.rows), names=[row.name for row in comparison.rows]),
    )  # fmt: skip


def _costs(options: argparse.Namespace) -> dict[str, float]:
    names = ("forward", "backward", "recompute", "link", "boundary")
    return {name: getattr(options, name) for name in names}


def _schedule(options: argparse.Namespace) -> Schedule:
    schedule = schedule_of_csv(options, "chunks", _MOST)
    if schedule is not None:
        return schedule
    each = named_schedule(options.schedule, 1, 2, options.chunks).stages  # on one rank
    if options.stages % each:
        works = max(each, round(options.stages / each) * each)
        raise Unusable(
            f"the stages do not divide among ranks of {each}, as {options.schedule} has them; "
            f"received: --stages {options.stages}; works: --stages {works}"
        )
    return named_schedule(options.schedule, options.stages // each, options.microbatches, options.chunks)


def _described(schedule: Schedule, costs: Mapping[str, float]) -> str:
    return f"{schedule.counts}; {', '.join(f'{name} {number(value)}' for name, value in costs.items())}"


def _picture(comparison: Report, options: argparse.Namespace) -> str:
    costs = {name: cost for name, cost in _costs(options).items() if cost}
    subtitle = f"{comparison.schedule.name} on paper: {_described(comparison.schedule, costs)}"
    return comparison.draw(budget_bytes=options.budget, subtitle=subtitle)


def _policies(text: str) -> list[str]:
    names = comma_list(text)
    for fault in (fault for name in names for fault in policy_faults(name)):
        raise argparse.ArgumentTypeError(line(ArgumentError(str(fault))).replace("k=", "ahead:"))
    return names


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = add_schedule(parser, schedule_name)
    group.add_argument("--chunks", type=count, metavar="N", help="stages per rank, where the schedule leaves that open")
    text = "ways to recompute, a row and a picture each (default: %(default)s)"
    group.add_argument("--compare", type=_policies, default="none,arrival,ahead", metavar="LIST", help=text)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs of one micro-batch on one stage")
    group.add_argument("--forward", type=positive, default=1.0, metavar="TIME", help="default: 1")
    group.add_argument("--backward", type=positive, default=2.0, metavar="TIME", help="default: 2; halves are equal")
    group.add_argument("--recompute", type=amount, default=1.0, metavar="TIME", help="default: 1")
    group.add_argument("--link", type=amount, default=0.0, metavar="TIME", help="of one message; default: 0")
    group.add_argument("--boundary", type=amount, default=0.0, metavar="A", help="of it, its input; default: 0")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--gantt", action="store_true", help="also print the steps as text")
    group.add_argument("--svg", type=file_to_write(".svg"), metavar="FILE", help="draw the steps one over the other")
    group.add_argument("--budget", type=amount, metavar="A", help="draw a line at so much memory")
    group.add_argument("--trace", type=file_to_write(".json"), metavar="FILE", help="write the steps for https://ui.perfetto.dev")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
