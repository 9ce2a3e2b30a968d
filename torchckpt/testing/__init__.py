"""Testing: count what a step costs, and check that regions do not change results. For this package's tests and yours.

    lines             ``saved_by_line``: what autograd keeps, by module, operation and line
    script            the same for each backward pass of a script
    kept              each storage that autograd keeps, from when to when, and where it was saved
    peak              ``peak_bytes``: the most bytes that a step takes
    regions           replays, FLOPs, and regions that are as plain calls

>>> with torchckpt.testing.count_recomputes() as recomputes, torchckpt.testing.saved_bytes() as saved:
...     loss = torchckpt.checkpoint(block, x).sum()
>>> saved.total == x.nbytes
True
>>> loss.backward(); recomputes.total
1
"""
from torchckpt.regions.saved import SavedBytes, saved_bytes
from torchckpt.testing.lines import SavedByLine, SavedLine, saved_by_line
from torchckpt.testing.peak import peak_bytes
from torchckpt.testing.regions import Flops, Recomputes, assert_transparent, count_recomputes, flops

__all__ = [
    "Flops",
    "Recomputes",
    "SavedByLine",
    "SavedBytes",
    "SavedLine",
    "assert_transparent",
    "count_recomputes",
    "flops",
    "peak_bytes",
    "saved_by_line",
    "saved_bytes",
]
