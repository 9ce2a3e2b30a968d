"""Which counts are thrown away."""
from __future__ import annotations

from torchckpt.measuring.remembered import Discarded


def test_a_count_that_frees_what_others_made_is_thrown_away_unless_steps_go_on_so():
    discarded = Discarded()
    assert not discarded.discards("one", [100.0, 100.0], [0.0, 1.0])
    assert not discarded.discards("one", [0.0], [0.0])
    assert discarded.discards("one", [100.0, 100.0], [0.0, 80.0])
    assert not discarded.discards("one", [100.0, 100.0], [0.0, 70.0])
    assert discarded.discards("other", [100.0], [70.0])
    assert discarded.discards("one", [100.0, 100.0], [20.0, 0.0])
