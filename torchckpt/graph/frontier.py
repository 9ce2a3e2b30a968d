"""frontier(): what time buys in memory for one call, from the step that keeps everything to the least memory."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import nn

from torchckpt.errors import Fault, raise_faults
from torchckpt.graph.choose import Costs
from torchckpt.graph.rematerialize import rematerialize
from torchckpt.model.remat.draw_frontier import draw_frontier
from torchckpt.model.remat.frontier import frontier as solutions_of

__all__ = ["Frontier", "frontier"]


class Frontier(list[tuple[int, float]]):
    """Pairs of bytes at the peak and recomputation as a share of the step's time: one falls, the other rises."""

    def draw(
        self,
        path: str | PathLike[str] | None = None,
        others: Mapping[str, Sequence[tuple[int, float]]] | None = None,
        title: str = "Memory and recomputation",
    ) -> str:
        """The curve, as SVG, with the points of ``others`` in it. Written to ``path``, if one is given."""
        text = draw_frontier(self, others, eager_peak_bytes=self[0][0], title=title)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def frontier(
    model: nn.Module,
    *example: Any,
    points: int = 20,
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
) -> Frontier:
    """The best plans that were found for budgets from the peak of everything kept to the least peak.

    >>> graph.frontier(model, inputs).draw("frontier.svg")

    Args:
        model, example, costs, rng: as of :func:`~torchckpt.graph.rematerialize`. Nothing is run, and nothing changes.
        points: at most so many, from 2 on.

    Raises:
        ArgumentError: an argument breaks a rule.
        CaptureError: the call cannot be traced.
    """
    faults = []
    if points < 2:
        faults.append(Fault("a frontier has two points at least", f"points={points}", "points=20"))
    if not example:
        faults.append(Fault("a frontier is that of one call", "no example", "graph.frontier(model, inputs)"))
    raise_faults("frontier()", faults)
    flow = rematerialize(model, *example, costs=costs, rng=rng).plan.flow
    found = solutions_of(flow, points)
    return Frontier((one.peak_bytes, max(0.0, one.seconds / flow.seconds - 1.0)) for one in found)
