"""Testing: count what a step costs, and check that regions do not change results. For this package's tests and yours.

    lines             ``saved_by_line``: what autograd keeps, by line; the storages, and when each is kept
    counts            replays, FLOPs, bytes at the peak; whether a region is as the plain call

>>> with torchckpt.testing.count_recomputes() as recomputes, torchckpt.testing.saved_bytes() as saved:
...     loss = torchckpt.checkpoint(block, x).sum()
>>> saved.total == x.nbytes
True
>>> loss.backward(); recomputes.total
1
"""
from torchckpt.regions.saved import SavedBytes, saved_bytes
from torchckpt.testing.counts import Flops, Recomputes, assert_transparent, count_recomputes, flops, peak_bytes
from torchckpt.testing.lines import SavedByLine, SavedLine, saved_by_line

__all__ = [
    "Flops", "Recomputes", "SavedByLine", "SavedBytes", "SavedLine", "assert_transparent", "count_recomputes", "flops",
    "peak_bytes", "saved_by_line", "saved_bytes",
]
