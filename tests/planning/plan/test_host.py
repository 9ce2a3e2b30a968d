"""A plan with a host, made by hand: its figures, tables, line, picture and JSON."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.planning.draw.picture import Picture
from tests.planning.plan.away_by_hand import first_blocks_away
from tests.planning.plan.recount_moves import recount
from torchckpt.errors import ArgumentError
from torchckpt.planning import Block, Host, Stage, one_f_one_b
from torchckpt.planning.plan import PipelinePlan, plan_pipeline
from torchckpt.planning.plan.figures import Alone
from torchckpt.planning.plan.problem import problem_of

STAGES = [Stage((Block(saved_bytes=1.0, boundary_bytes=0.25),) * 4)] * 2


@pytest.fixture(scope="module")
def plan():
    """Of each visit two blocks are away, one is late, one is kept."""
    problem = problem_of(one_f_one_b(2, 3), STAGES, 6.0, 0.0, Host(["5kB", 4], out=1.0, back=2.0))
    return replace(first_blocks_away(problem, away=2, late=1), alone=Alone(54.0, float("inf")))


def test_the_line_that_people_quote(plan):
    assert plan.keep_all_seconds == 48.0
    begin, _, end = plan.summary.partition(" (bound ")
    assert begin == "step 52.0, +8.3 %"
    assert end.endswith("recomputing alone +12.5 %, offloading alone does not fit")


def test_the_tables(plan):
    _, stages, legend, ranks, _ = str(plan).split("\n\n")
    assert stages == (
        "stage  rank  blocks  bytes  recomputed  seconds  kept/early/late/away\n"
        "0         0       4      4      25.0 %        3  1/0/1/2 x3\n"
        "1         1       4      4      25.0 %        3  1/0/1/2 x3"
    )
    assert legend == (
        "blocks kept/early/late/away by micro-batch: kept; recomputed before the gradient arrives; inside the "
        "backward; away on the host"
    )
    assert ranks == (
        "rank  peak  budget    idle  on host  host  waits\n"
        "0     3.75       6  25.0 %      3.5  5000      0\n"
        "1     2.25       6  25.0 %     1.75     4      0"
    )


def test_what_fits_needs_no_host():
    plan = plan_pipeline(one_f_one_b(2, 3), STAGES, "100%", host=Host(10, out=1.0))
    assert not plan.moves
    assert plan.summary.endswith("(bound +0.0 %); everything fits, so nothing need be recomputed")
    assert PipelinePlan.from_json(plan.to_json()) == plan


def test_json_and_back(plan):
    text = plan.to_json()
    stored = json.loads(text)
    assert stored["choices"][0][0] == [[3], [], [2], [0, 1]]
    assert stored["moves"][:2] == [[0, 0, 0, [0, 2], [2, 1], 0], [0, 0, 1, [0, 3], [2, 2], 0]]
    assert stored["host"] == {"bytes": [5000, 4], "out": 1, "back": 2, "half_duplex": False, "drag": 0}
    assert stored["alone"] == [54.0, None]
    again = PipelinePlan.from_json(text)
    assert again == plan
    assert (again.to_json(), str(again), again.timeline) == (text, str(plan), plan.timeline)


def test_json_without_a_host_says_nothing_of_one():
    plan = plan_pipeline(one_f_one_b(2, 3), STAGES, "60%")
    stored = json.loads(plan.to_json())
    assert {"host", "moves", "alone"}.isdisjoint(stored)
    assert {len(choice) for stage in stored["choices"] for choice in stage} == {3}
    assert all("moved_bytes" not in block for stage in stored["stages"] for block in stage["blocks"])


def test_what_moves_of_a_block_comes_back(plan):
    block = Block(boundary_bytes=0.25, moved_bytes=0.5)
    problem = problem_of(one_f_one_b(2, 3), [Stage((block,) * 4)] * 2, 6.0, 0.0, Host(5, out=1.0))
    made = first_blocks_away(problem, away=2)
    assert PipelinePlan.from_json(made.to_json()) == made
    assert {copy.bytes for copy in made.timeline.copies} == {0.5}


def without_a_move(stored):
    del stored["moves"][0]


def with_a_move_twice(stored):
    stored["moves"].append(stored["moves"][0])


def with_a_move_of_a_kept_block(stored):
    stored["moves"][0][2] = 3


def with_a_release_before_its_forward(stored):
    stored["moves"][0][3] = [0, 0]


def with_an_issue_before_its_release(stored):
    stored["moves"][0][4] = [0, 1]


def with_a_boundary_that_is_none(stored):
    stored["moves"][0][4] = [0, 9]


def with_a_small_host(stored):
    stored["host"]["bytes"] = [3, 4]


def with_a_late_release(stored):
    for move in stored["moves"]:
        move[3] = move[4]


def without_a_host(stored):
    del stored["host"]


FIRST = "stage 0, micro-batch 0, block 0:"


@pytest.mark.parametrize(
    ("edit", "received"),
    [
        (without_a_move, "11 moves of 12 blocks that are away"),
        (with_a_move_twice, "13 moves of 12 blocks that are away"),
        (with_a_move_of_a_kept_block, "12 moves of 12 blocks that are away"),
        (with_a_release_before_its_forward, rf"{FIRST} released at \[0, 0\], issued at \[2, 1\]"),
        (with_an_issue_before_its_release, rf"{FIRST} released at \[0, 2\], issued at \[0, 1\]"),
        (with_a_boundary_that_is_none, rf"{FIRST} released at \[0, 2\], issued at \[0, 9\]"),
        (with_a_small_host, "rank 0 holds 3.5 bytes on its host, which has 3"),
        (with_a_late_release, "rank 0 holds 6.5 bytes, its budget is 6"),
        (without_a_host, "12 moves of 12 blocks that are away"),
    ],
)
def test_what_does_not_add_up_is_refused(plan, edit, received):
    stored = json.loads(plan.to_json())
    edit(stored)
    with pytest.raises(ArgumentError, match=rf"the text is no plan that to_json\(\) wrote\n  received: {received}"):
        PipelinePlan.from_json(json.dumps(stored))


@pytest.mark.parametrize("value", [3, [3], {"bytes": 3}, {"bytes": 0, "out": 1}, {"bytes": [3], "out": 1}])
def test_a_host_that_is_none_is_refused(plan, value):
    stored = {**json.loads(plan.to_json()), "host": value}
    with pytest.raises(ArgumentError):
        PipelinePlan.from_json(json.dumps(stored))


@pytest.mark.parametrize("value", [3, [3], [[0, 0, 0]], [[9, 0, 0, [0, 1], [0, 1]]], [["a", 0, 0, [0, 1], [0, 1]]]])
def test_moves_that_are_none_are_refused(plan, value):
    with pytest.raises(ArgumentError, match="the text is no plan"):
        PipelinePlan.from_json(json.dumps({**json.loads(plan.to_json()), "moves": value}))


def test_the_picture_has_both_engines_under_each_rank_and_the_bytes_on_hosts(plan):
    picture = Picture(plan.draw())
    out, back = picture.boxes(("out",)), picture.boxes(("in",))
    assert len(out) == len(back) == len(plan.moves) == 12
    assert {box.y for box in out}.isdisjoint(box.y for box in back)
    assert len({box.y for box in out}) == len({box.y for box in back}) == 2
    rows = sorted({box.y for box in picture.boxes(("F",))})[2:]
    assert [sum(low < box.y < low + 50 for box in out) for low in rows] == [6, 6]
    assert len(picture.of("path", "host")) == 2
    assert picture.texts("end").count("host") == 2
    assert [picture.texts().count(text) for text in ("host 0", "host 1", "3.5", "1.75")] == [1, 1, 1, 1]
    assert {"a block on its way to the host", "on its way back", "bytes on the host"} <= set(picture.texts())
    assert picture.texts("title") == ["Peak memory 3.75 in place of 8, for 8.3 % more time"]


def test_a_picture_without_copies_has_no_rows_for_them():
    picture = Picture(plan_pipeline(one_f_one_b(2, 3), STAGES, "60%").draw())
    assert not picture.boxes(("out", "in"))
    assert "host" not in picture.texts()


def test_copies_take_no_room_for_other_names(plan):
    """Between ranks and to hosts, each has its rows."""
    both = Picture(plan.timeline.draw(copies=True))
    assert both.texts("end").count("copies") == both.texts("end").count("host") == 2
    assert not {box.y for box in both.boxes(("there", "back"))} & {box.y for box in both.boxes(("out", "in"))}


def test_its_step_is_counted_again(plan):
    counted = recount(plan.step)
    assert plan.step_seconds == pytest.approx(counted.step_seconds)
    assert list(plan.step.host_peak_bytes) == counted.host_bytes


def test_more_than_its_budget_is_its_budget():
    """The order was given, so what it holds is what it may."""
    problem = problem_of(one_f_one_b(2, 3), STAGES, 3.5, 0.0, Host(9, out=1.0))
    plan = first_blocks_away(problem, away=2)
    assert (plan.peak_bytes, plan.problem.budget_bytes) == ((4.5, 2.25), (4.5, 3.5))
    assert plan.over_budget == []
    assert plan.moves
