"""A step that a clock saw, beside the same step on paper."""
from __future__ import annotations

import pytest

from tests.planning.policies import early, late
from tests.planning.step.test_measured import spans_of
from torchckpt.planning import Block, Link, bound, interleaved_one_f_one_b, one_f_one_b, simulate
from torchckpt.planning.step.measured import Span, measured_timeline
from torchckpt.planning.step.simulated import step_of
from torchckpt.planning.step.table import compare

MS = 2**-10  # nearly, and exact in binary
COSTS = Block(16 * MS, 16 * MS, 16 * MS, 16 * MS, saved_bytes=64e6, boundary_bytes=4e6)
LINK = Link(4 * MS)
LAST_KEPT = early(one_f_one_b(4, 8), "last_stage")


def _slower(span, factor):
    return Span(span.action, *(factor * time for time in (span.due_seconds, span.start_seconds, span.end_seconds)))


def slowed(schedule, factor=1.0, costs=COSTS, link=LINK):
    """As measured on a machine that takes ``factor`` as long for everything as ``costs`` say."""
    step = step_of(schedule, costs, link)
    slow = [[_slower(span, factor) for span in spans] for spans in spans_of(step.timeline)]
    return compare(measured_timeline(step, slow), step)


def test_a_step_that_is_as_on_paper():
    found = slowed(LAST_KEPT)
    assert found.deviation == 0
    assert found.measured.events == found.simulated.events
    *_, simulated, measured = found.rows
    assert (measured.overhead, measured.hidden) == (simulated.overhead, simulated.hidden)
    assert found.step == step_of(LAST_KEPT, COSTS, LINK)


def test_what_it_is_compared_with():
    found, plain = slowed(LAST_KEPT, 1.25), one_f_one_b(4, 8)
    assert found.none.schedule == plain
    assert found.arrival == simulate(plain, COSTS, LINK, late(plain), exposed=False)  # of everything
    assert found.simulated == simulate(LAST_KEPT, COSTS, LINK)
    assert found.none.step_seconds == simulate(plain, COSTS, LINK).step_seconds
    assert found.rows[3].bound_seconds == bound(LAST_KEPT, COSTS, LINK).step_seconds


def test_shares():
    found = slowed(early(one_f_one_b(2, 2), "last_stage"), 1.5, Block(), Link())
    assert [row.step_seconds for row in found.rows] == [9, 12, 9, 13.5]
    assert [row.overhead for row in found.rows] == pytest.approx([0, 1 / 3, 0, 1 / 2])
    assert [row.hidden for row in found.rows] == [None, 0, 1, -0.5]
    assert found.deviation == 0.5


def test_the_table():
    assert str(slowed(LAST_KEPT, 1.25)).split("\n") == [
        "                               step  overhead   bound  hidden    peak",
        "none (simulated)           578.1 ms     0.0 %   0.0 %       -  256 MB",
        "at arrival (simulated)       750 ms    29.7 %  14.9 %    0.00   76 MB",
        "this schedule (simulated)  632.8 ms     9.5 %   5.4 %    0.68   76 MB",
        "this schedule (measured)     791 ms    36.8 %   5.4 %   -0.24   76 MB",
        "",
        "stage   forward  backward  recompute  peak of rank",
        "0      15.62 ms  31.25 ms   15.62 ms         76 MB",
        "1      15.62 ms  31.25 ms   15.62 ms         72 MB",
        "2      15.62 ms  31.25 ms   15.62 ms         68 MB",
        "3      15.62 ms  31.25 ms   15.62 ms         64 MB",
    ]


def test_the_table_of_several_stages_a_rank():
    found = slowed(early(interleaved_one_f_one_b(2, 2, 2), (3, 0), (3, 1)))
    assert found.table().split("\n\n")[1].split("\n") == [
        "stage   forward  backward  recompute  peak of rank",
        "0      15.62 ms  31.25 ms   15.62 ms         76 MB",
        "1      15.62 ms  31.25 ms   15.62 ms         72 MB",
        "2      15.62 ms  31.25 ms   15.62 ms         76 MB",
        "3      15.62 ms  31.25 ms   15.62 ms         72 MB",
    ]


def test_nothing_recomputed_hides_nothing_and_exposes_nothing():
    row = slowed(one_f_one_b(4, 8)).rows[3]
    assert (row.overhead, row.bound, row.hidden) == (0, 0, None)


def test_recomputation_that_takes_no_time_hides_nothing():
    _, arrival, _, measured = slowed(LAST_KEPT, costs=Block(recompute_seconds=0.0)).rows
    assert (arrival.overhead, measured.bound, measured.hidden) == (0, 0, None)


def test_a_step_that_takes_no_time():
    found = slowed(LAST_KEPT, costs=Block(0.0, 0.0, 0.0, 0.0), link=Link())
    assert (found.rows[3].overhead, found.rows[3].hidden, found.deviation) == (0, None, 0)
    assert found.table().split("\n")[4] == "this schedule (measured)   0 ms     0.0 %  0.0 %       -  1e-06 MB"


def test_the_picture_has_both_steps_and_lines_at_the_least():
    found = slowed(LAST_KEPT, 1.25)
    drawn = found.draw()
    assert found._repr_svg_() == drawn
    for words in (
        "The step takes 791 ms, 25.0 % longer than on paper",
        ">measured<", ">on paper, with the costs that were measured<",
        "step 633 ms (-20.0 %)", "no recomputation 578 ms", "bound 609 ms", "memory, MB",
    ):  # fmt: skip
        assert words in drawn
    assert "The step takes 633 ms, as on paper" in slowed(LAST_KEPT).draw()
