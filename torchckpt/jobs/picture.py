"""Picture: the memory of each rank as layers under the line of its device, and below it the step."""
from __future__ import annotations

from torchckpt.jobs.plan import BUFFERS, MARGIN, JobPlan
from torchckpt.planning.draw.canvas import STYLE, Axis, Canvas

__all__ = ["drawn"]

_COLOURS = {
    "weights": "#0b6e99", "gradients": "#4f9cb8", "optimizer": "#a3cbdb", "gathered": "#8450a6",
    "activations": "#c7511f", "working": "#e59b72", "buffers": "#8a8a8a",
}  # fmt: skip
_STYLE = STYLE + " ".join(f".{name}{{fill:{colour}}}" for name, colour in _COLOURS.items())
_WIDTH, _LEFT, _RIGHT, _HEIGHT, _GB = 960.0, 84.0, 24.0, 300.0, 1e9


def drawn(plan: JobPlan) -> str:
    """An SVG: a bar for each rank of the pipeline, its parts from below, the device's memory and its margin; then who
    does what when. Where the plan recomputes or sends away, the step that keeps everything stands above it."""
    ranks = [{**memory.parts, "buffers": BUFFERS} for memory in plan.memory]
    canvas, right = Canvas(_WIDTH), _WIDTH - _RIGHT
    speed = f"{plan.step_seconds:.4g} s a step, {plan.tokens_per_second:,.0f} tokens a second and GPU"
    top = canvas.headed(_LEFT, plan.job.model.name, speed) + 24
    most = max(plan.device_bytes, *(sum(parts.values()) for parts in ranks)) * 1.05
    axis = Axis(most, top + _HEIGHT, top)
    canvas.grid(axis, _LEFT, right, _GB, 6, " GB")
    wide = (right - _LEFT) / len(ranks)
    for rank, parts in enumerate(ranks):
        x, below = _LEFT + rank * wide, 0.0
        for name, size in parts.items():
            above = below + size
            box = x + 0.1 * wide, axis(above), 0.8 * wide, axis(below) - axis(above)
            canvas.bar(*box, f"rank {rank}: {name} {size / _GB:.1f} GB", name)
            below = above
        canvas.words(x + wide / 2, axis.start + 18, str(rank), class_="middle")
    for share, words, under in ((1.0, "device", -4), (1 - MARGIN, "less the margin", 14)):
        y = axis(share * plan.device_bytes)
        canvas.line(_LEFT, y, right, y, class_="budget")
        canvas.words(right, y + under, f"{words} {share * plan.device_bytes / _GB:.0f} GB", class_="end")
    height = canvas.legend(((name, name) for name in _COLOURS), _LEFT, axis.start + 44)
    is_compared = plan.pipeline is not None and plan.recomputed_share + plan.away_share > 0
    step = plan.pipeline if plan.pipeline is not None and is_compared else plan.step.timeline
    return canvas.text(canvas.insert(step.draw(), height), plan.summary, _STYLE)
