"""Does a step under a byte budget match the time and bytes of its plan, and how much does it save over simple rules?

    python benchmarks/pipeline/planned.py                          # three cases, 20 rounds, about 12 minutes
    python benchmarks/pipeline/planned.py --cases 1f1b --rounds 10

Blocks sleep, so that processes which share two cores behave as devices. The variants take turns in each round: ours
(``budget="50%"``); everything recomputed inside the backwards; the same k blocks of every stage, the best k that fits.
"""
from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.losses import mean_square
from benchmarks.machine import machine
from benchmarks.options import write
from benchmarks.pipeline.processes import on_processes
from benchmarks.pipeline.sleeping.load import ROW, Embedding, Load, Loaded
from benchmarks.turns import quartiles
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead
from torchckpt.planning import first_blocks
from torchckpt.planning.plan import PipelinePlan

RESULTS = Path(__file__).parents[1] / "results" / "pipeline-planned-cpu.json"
_ROWS, _WARM_UP = 4, 6
SAVED_BYTES = 400_000
BOUNDARY_BYTES = _ROWS * ROW * 4 + _ROWS * ROW  # with the mask of a dropout
DEVIATION, USED = 0.07, 0.85
RATIOS = {("1f1b", "all"): 0.84, ("1f1b", "same"): 0.91}


@dataclass(frozen=True)
class Case:
    """``stages`` of ``blocks`` each, on ``ranks``; the last stage has a head in place of its last block."""

    make: Any
    ranks: int
    stages: int
    blocks: int
    micro_batches: int
    is_folded: bool = False

    def of_rank(self, rank: int) -> list[int]:
        if self.stages == self.ranks:
            return [rank]
        return [rank, 2 * self.ranks - 1 - rank] if self.is_folded else [rank, rank + self.ranks]


CASES = {
    "1f1b": Case(Schedule1F1B, 4, 4, 8, 8),  # case A of the planner's table
    "interleaved": Case(ScheduleInterleaved1F1B, 2, 4, 4, 8),
    "zbv": Case(ScheduleZBVZeroBubble, 2, 4, 4, 8, is_folded=True),
}


class Variant:
    """One way to run ``case`` on this rank. All start with the same parameters and draw the same masks."""

    def __init__(self, case: Case, rank: int, seconds: float, has_regions: bool = True) -> None:
        self.case, self.rank = case, rank
        self.stages = [self._stage(index, seconds, has_regions) for index in case.of_rank(rank)]
        data = torch.Generator().manual_seed(1)
        self._x, self._y = torch.randn(2, case.micro_batches * _ROWS, ROW, generator=data)
        live = self.stages[0] if len(self.stages) == 1 else self.stages
        self.schedule: Any = case.make(live, n_microbatches=case.micro_batches, loss_fn=mean_square)

    def _stage(self, index: int, seconds: float, has_regions: bool) -> PipelineStage:
        torch.manual_seed(index)
        load = Load(seconds, seconds, seconds, SAVED_BYTES - BOUNDARY_BYTES)
        is_last = index == self.case.stages - 1
        blocks: list[nn.Module] = [Loaded(load) for _ in range(self.case.blocks - is_last)]
        for block in blocks if has_regions else ():
            checkpoint_module(block)
        first = [Embedding(0.1 * seconds)] if not index else []
        head = [Loaded(replace(load, saved_bytes=2 * SAVED_BYTES))] if is_last else []
        return PipelineStage(nn.Sequential(*first, *blocks, *head), index, self.case.stages, torch.device("cpu"))

    def step(self, seed: int) -> tuple[tuple[float, float], list[Tensor]]:
        """Run one step; return its start and end, and its losses and gradients."""
        for stage in self.stages:
            stage.submod.zero_grad()
        torch.manual_seed(seed)
        losses: list[Tensor] = []
        inputs = (self._x,) if any(stage.is_first for stage in self.stages) else ()
        target = {"target": self._y} if any(stage.is_last for stage in self.stages) else {}
        gc.collect()
        dist.barrier()
        begin = time.perf_counter()
        self.schedule.step(*inputs, **target, losses=losses, return_outputs=False)
        end = time.perf_counter()
        parameters = [one for stage in self.stages for one in stage.submod.parameters()]
        return (begin, end), [*losses, *(one.grad.clone() for one in parameters if one.grad is not None)]


def same_blocks(plan: PipelinePlan) -> PipelinePlan:
    """The rule that recomputes the first k blocks of every stage inside its backward; the best k within the budget."""
    problem = plan.problem
    choices = first_blocks(problem.schedule, problem.stages, plan.same_recomputed.blocks)
    return PipelinePlan.of(problem, problem.schedule, choices)


def _measure(rank: int, tell: Callable[[Any], None], name: str, rounds: int, seconds: float) -> None:
    case = CASES[name]
    torch.set_num_threads(1)
    variants = {one: Variant(case, rank, seconds, one != "none") for one in ("ours", "all", "same", "none")}
    ours = variants["ours"]
    ours.schedule = recompute_ahead(ours.schedule, budget="50%")
    variants["all"].schedule = recompute_ahead(variants["all"].schedule, segments=0, exempt="none")
    for turn in range(_WARM_UP):
        ours.step(turn)
    plan = ours.schedule.plan
    variants["same"].schedule = recompute_ahead(variants["same"].schedule, plan=same_blocks(plan))
    spans: dict[str, list[tuple[float, float]]] = {one: [] for one in variants}
    equal = True
    for turn in range(2 + rounds):
        made = []
        for one, variant in variants.items():
            span, tensors = variant.step(100 * turn + rank)
            spans[one].append(span)
            made.append(tensors)
        equal &= all(len(one) == len(made[0]) and all(map(torch.equal, one, made[0])) for one in made)
    said: list[Any] = [None] * case.ranks
    dist.all_gather_object(said, (spans, equal))
    report = ours.schedule.report()
    if rank == 0:
        steps = {one: _lengths([own[one] for own, _ in said])[2:] for one in variants}
        tell((name, steps, all(own for _, own in said), report))


def _lengths(ranks: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    return [max(end for _, end in step) - min(begin for begin, _ in step) for step in zip(*ranks)]


def row_of(name: str, steps: dict[str, list[float]], equal: bool, report: Any) -> dict[str, Any]:
    plan = report.plan
    ratios = {one: [a / b for a, b in zip(steps["ours"], steps[one])] for one in ("all", "same")}
    return {
        "case": name,
        "seconds": {one: quartiles(each) for one, each in steps.items()},
        "planned": plan.step_seconds,
        "bound": plan.bound_seconds,
        "deviation": median(steps["ours"]) / plan.step_seconds - 1,
        "ratios": {one: quartiles(each) for one, each in ratios.items()},
        "planned ratios": {"all": _over(plan, plan.all_recomputed), "same": _over(plan, plan.same_recomputed)},
        "same blocks": plan.same_recomputed.blocks,
        "budget_bytes": report.budget_bytes,
        "planned_peak_bytes": report.planned_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "gradients bit-equal": equal,
        "rounds": len(steps["ours"]),
    }


def _over(plan: PipelinePlan, rule: Any) -> float:
    return float(plan.step_seconds / rule.step_seconds)


def failures(row: dict[str, Any]) -> list[str]:
    """Messages for the requirements that do not hold."""
    name, found = row["case"], []
    if abs(row["deviation"]) > DEVIATION:
        found.append(f"{name}: {row['deviation']:+.1%} from the plan, not within {DEVIATION:.0%}")
    for (of, other), most in RATIOS.items():
        if of == name and row["ratios"][other][1] > most:
            found.append(f"{name}: ours / {other} {row['ratios'][other][1]:.3f}, not at most {most}")
    shares = [peak / budget for peak, budget in zip(row["measured_peak_bytes"], row["budget_bytes"])]
    if max(shares) > 1:
        found.append(f"{name}: {max(shares):.1%} of the budget")
    if name == "1f1b" and max(shares) < USED:
        found.append(f"{name}: only {max(shares):.1%} of the budget is used")
    return found + ([] if row["gradients bit-equal"] else [f"{name}: gradients differ"])


def line(row: dict[str, Any]) -> str:
    middle = " / ".join(f"{row['seconds'][one][1] * 1e3:.0f}" for one in ("none", "ours", "same", "all"))
    spreads = {of: " ".join(f"{one:.3f}" for one in values) for of, values in row["ratios"].items()}
    ratios = [f"{spread} ({row['planned ratios'][of]:.3f})" for of, spread in spreads.items()]
    peaks = zip(row["measured_peak_bytes"], row["planned_peak_bytes"], row["budget_bytes"])
    bytes_ = ", ".join(f"{a / 1e6:.2f} {b / 1e6:.2f} {c / 1e6:.2f}" for a, b, c in peaks)
    planned = f"plan {row['planned'] * 1e3:.0f}, bound {row['bound'] * 1e3:.0f}, {row['deviation']:+.1%}"
    equal = "equal" if row["gradients bit-equal"] else "DIFFER"
    return (
        f"{row['case']}: none / ours / same {row['same blocks']} / all, ms: {middle} ({planned})\n"
        f"  ours / all {ratios[0]}; ours / same {ratios[1]}; quartiles (planned)\n"
        f"  measured, planned peak, budget by rank, MB: {bytes_}; gradients {equal}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=20, help="with the variants in turn (default: 20)")
    parser.add_argument("--block-ms", type=float, default=8.0, help="forward of a block (default: 8)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the results")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.cases:
        case = CASES[name]
        (said,) = on_processes(case.ranks, _measure, name, arguments.rounds, arguments.block_ms / 1e3)
        rows.append(row_of(*said))
        print(line(rows[-1]), flush=True)
    wrong = [fault for row in rows for fault in failures(row)]
    settings = {"rounds": arguments.rounds, "block_ms": arguments.block_ms}
    write({"machine": machine(), "settings": settings, "cases": rows}, arguments.json)
    print("\n".join(wrong) or "all of what is required holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
