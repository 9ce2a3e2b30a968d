"""frontier(): the trade of memory for recomputation in one call, from everything kept down to the least memory."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from os import PathLike
from typing import Any, Literal

from torch import nn

from torchckpt.errors import Fault, called, check
from torchckpt.graph.choose.planner import Costs
from torchckpt.graph.progress import Watch
from torchckpt.graph.run.rematerialize import rematerialize
from torchckpt.planning.draw.units import aligned, units_of_bytes
from torchckpt.planning.figures import Drawn
from torchckpt.planning.remat.frontier_svg import draw_frontier
from torchckpt.planning.remat.search.planner import frontier as solutions_of
from torchckpt.planning.remat.table import page

__all__ = ["Frontier", "frontier"]


class Frontier(list[tuple[int, float]], Drawn):
    """A list of ``(peak_bytes, recompute_share)``, by falling peak; the share is of the step's time, from 0.0 on."""

    def draw(
        self,
        path: str | PathLike[str] | None = None,
        others: Mapping[str, Sequence[tuple[int, float]]] | None = None,
        title: str = "Memory and recomputation",
    ) -> str:
        """The curve as SVG text, together with the points of ``others``. It is written to ``path`` if one is given."""
        return self._written(path, draw_frontier(self, others, eager_peak_bytes=self[0][0], title=title))

    def __str__(self) -> str:
        """A table with one row for each plan."""
        of_memory = units_of_bytes(self[0][0]).of_memory
        rows = [(of_memory(peak), f"+{share:.1%}", f"{peak / self[0][0]:.0%}") for peak, share in self]
        return aligned([("peak", "recompute", "of eager's"), *rows])

    def _repr_html_(self) -> str:
        return page(self.draw(), f"Frontier of {len(self)} plans", str(self))


@called("frontier()")
def frontier(
    model: nn.Module,
    *example: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    points: int = 20,
    costs: Costs = "roofline",
    rng: Literal["keep", "replay"] = "keep",
) -> Frontier:
    """The best plans found, for budgets from the peak with everything kept down to the least peak.

    >>> graph.frontier(model, inputs).draw("frontier.svg")

    Args:
        model, example, example_kwargs, costs, rng: as for :func:`~torchckpt.graph.rematerialize`. The model is not run,
            and does not change.
        points: the largest number of plans, at least 2. Default: 20.

    Raises:
        ArgumentError: an argument breaks a rule.
        CaptureError: the call cannot be traced.
    """
    faults = []
    if isinstance(points, bool) or not isinstance(points, Integral) or points < 2:
        faults.append(Fault("points is not an integer of at least 2", f"points={points!r}", "points=20"))
    if not (example or example_kwargs):
        faults.append(Fault("there are no inputs of a call", "no example", "graph.frontier(model, inputs)"))
    check(faults)
    flow = rematerialize(model, *example, example_kwargs=example_kwargs, costs=costs, rng=rng).plan.flow
    with Watch().planning(len(flow.operations)) as tell:
        solutions = solutions_of(flow, int(points), tell=tell)
    return Frontier((plan.peak_bytes, max(0.0, plan.seconds / flow.seconds - 1.0)) for plan in solutions)
