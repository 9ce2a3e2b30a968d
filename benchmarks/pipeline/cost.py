"""What does each way to recompute cost, in time and in memory? Draws docs/cost.svg.

    python benchmarks/pipeline/cost.py        # a second: from the results of planned.py, which are stored

Times and ours' peak were measured by ``planned.py``; the peaks of the others, and recomputing all ahead without a plan,
are on paper, of the same stages.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.pipeline.planned import BOUNDARY_BYTES, CASES, RESULTS, SAVED_BYTES
from torchckpt.planning import Block, Stage, ahead, exempt, fixed, named_schedule, with_recompute
from torchckpt.planning.draw.canvas import STYLE, Axis, Canvas
from torchckpt.planning.plan import PipelinePlan, plan_pipeline

PICTURE = Path(__file__).parents[2] / "docs" / "cost.svg"
_NAME = "1f1b"
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 640.0, 78.0, 620.0, 152.0, 520.0
_LINE = 21.0
_STYLE = STYLE + """
text{font-size:17px} .title{font-size:22px} .dot{stroke-width:2.5} .ours{font-weight:700;fill:#0072b2}
.bound{stroke:#111827;stroke-width:1.2;stroke-dasharray:4 3}
"""
_BUDGET = 0.5
_AT_ARRIVAL = "all when the gradient arrives,\nas torch.utils.checkpoint does"
_AHEAD = "torchckpt, all ahead\nof the gradient (on paper)"
_BLACK, _ORANGE, _BLUE, _WHITE = "#374151", "#d55e00", "#0072b2", "#fff"


class Way(NamedTuple):
    """Shares of the step that keeps everything: the time beyond it, and the peak of the rank that needs most."""

    name: str
    more_time: float
    peak: float
    colour: str
    is_measured: bool = True


def plan_on_paper() -> PipelinePlan:
    """Of the stages of ``planned.py``; a forward of a block takes one unit, and saves one."""
    case = CASES[_NAME]
    block = Block(1.0, 1.0, 1.0, 1.0, 1.0, BOUNDARY_BYTES / SAVED_BYTES)
    each = [Stage((block,) * case.blocks) for _ in range(case.stages)]
    each[0] = Stage(each[0].blocks, before=fixed(0.1))
    each[-1] = Stage(each[-1].blocks[1:], after=fixed(1.0, 1.0, 1.0, 2.0))
    return plan_pipeline(named_schedule(_NAME, case.stages, case.micro_batches), each, f"{_BUDGET:.0%}")


def all_ahead(plan: PipelinePlan) -> PipelinePlan:
    """Everything recomputed ahead, but for the last stage, as ``recompute_ahead(schedule)`` does."""
    plain = plan.problem.schedule
    choices = exempt(plain, ahead(plain), "last_stage")
    return PipelinePlan.of(plan.problem, with_recompute(plain, choices), choices)


def ways(row: dict[str, Any]) -> list[Way]:
    plan = plan_on_paper()
    most = max(plan.problem.keep_all.peak_bytes)
    seconds = {name: quartiles[1] for name, quartiles in row["seconds"].items()}
    early = all_ahead(plan)
    own = _BUDGET * max(row["measured_peak_bytes"]) / max(row["budget_bytes"])
    same = f"the same {row['same blocks']} blocks\nof each stage"

    def measured(name: str, key: str, peak: float, colour: str) -> Way:
        return Way(name, seconds[key] / seconds["none"] - 1, peak, colour)

    return [
        measured("everything kept", "none", 1.0, _BLACK),
        measured(_AT_ARRIVAL, "all", max(plan.all_recomputed.peak_bytes) / most, _ORANGE),
        measured(same, "same", max(plan.same_recomputed.peak_bytes) / most, _ORANGE),
        Way(_AHEAD, plan.overhead(early.step_seconds), max(early.peak_bytes) / most, _BLUE, False),
        measured("torchckpt, planned", "ours", own, _BLUE),
    ]


def drawn(row: dict[str, Any], rounds: int) -> str:
    found, case = ways(row), CASES[_NAME]
    ours, every = found[-1], found[1]
    time = Axis(max(way.more_time for way in found) * 1.03, _LEFT, _RIGHT)
    memory = Axis(1.06, _BOTTOM, _TOP)
    title = f"{ours.peak:.0%} of the memory for {ours.more_time:.0%} more time"
    canvas = Canvas(_WIDTH)
    canvas.words(20, 34, title, class_="title")
    first = f"Recomputing all: {every.more_time:.0%}. 1F1B, {case.stages} stages that sleep, a process each"
    second = f"on 2 CPU cores; {case.micro_batches} micro-batches, medians of {rounds} steps"
    _lines(canvas, 20, 62, f"{first}\n{second}")
    _axes(canvas, time, memory)
    bound = row["bound"] / row["seconds"]["none"][1] - 1
    canvas.line(time(bound), memory(0), time(bound), memory(0.8), class_="bound")
    _lines(canvas, time(bound) + 8, memory(0.8) + 14, f"bound {bound:.1%}: no plan\nwithin the budget is quicker")
    canvas.line(_LEFT, memory(_BUDGET), _RIGHT, memory(_BUDGET), class_="budget")
    canvas.words(_RIGHT, memory(_BUDGET) - 8, f"the plan's budget, {_BUDGET:.0%}", class_="end")
    for way in found:
        _dot(canvas, way, time(way.more_time), memory(way.peak))
    return canvas.text(_BOTTOM + 66, title, _STYLE)


def _axes(canvas: Canvas, time: Axis, memory: Axis) -> None:
    for tick in memory.ticks(6, 0.01):
        canvas.line(_LEFT, memory(tick), _RIGHT, memory(tick), class_="grid")
        canvas.words(_LEFT - 14, memory(tick) + 6, f"{tick:.0%}", class_="end")
    for tick in time.ticks(8, 0.01):
        canvas.line(time(tick), _BOTTOM, time(tick), _BOTTOM + 4, class_="axis")
        canvas.words(time(tick), _BOTTOM + 24, f"+{tick:.0%}", class_="middle")
    canvas.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, class_="axis")
    canvas.words(20, _TOP - 20, "peak memory of activations, of the step that keeps everything")
    canvas.words((_LEFT + _RIGHT) / 2, _BOTTOM + 52, "step time beyond it", class_="middle")


def _dot(canvas: Canvas, way: Way, x: float, y: float) -> None:
    fill = way.colour if way.is_measured else _WHITE
    canvas.rectangle(x - 7, y - 7, 14, 14, rx=7, fill=fill, stroke=way.colour, class_="dot")
    classes = ["ours"] * (way.colour == _BLUE) + ["end"] * (x > _RIGHT - 60)  # a name is not cut
    at_budget = abs(way.peak - _BUDGET) < 0.05
    start = x - 16 if "end" in classes else x + 16
    middle = 6 - _LINE / 2 * way.name.count("\n")
    _lines(canvas, start, y + (30 if at_budget else middle), way.name, class_=" ".join(classes))


def _lines(canvas: Canvas, x: float, y: float, text: str, class_: str = "") -> None:
    for line, words in enumerate(text.split("\n")):
        canvas.words(x, y + _LINE * line, words, **({"class_": class_} if class_ else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE, help="file for the picture")
    path = parser.parse_args().out
    stored = json.loads(RESULTS.read_text())
    row = next(row for row in stored["cases"] if row["case"] == _NAME)
    path.write_text(drawn(row, row["rounds"]), encoding="utf-8")
    print(f"The picture of {row['rounds']} rounds is {path}")
    for way in ways(row):
        print(f"{' '.join(way.name.split()):60} {way.more_time:+.1%} time, {way.peak:.1%} memory")


if __name__ == "__main__":
    main()
