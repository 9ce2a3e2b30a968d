"""Text pictures, letter for letter."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.steps import COSTS, EMPTY, measured, several_stages_a_rank, step
from tests.slow import few
from torchckpt.planning.draw.gantt import gantt


def test_a_step_without_recomputation() -> None:
    assert gantt(step(2, 2, recompute=False)).split("\n") == [
        "stage 0 | F0 F1 .  .  B0--- .  B1---",
        "stage 1 | .  F0 B0--- F1 B1--- .  .",
    ]


def test_recomputation_stands_where_it_runs() -> None:
    assert gantt(step(2, 3)).split("\n") == [
        "stage 0 | F0 F1 R0 .  B0--- F2 R1 B1--- R2 B2---",
        "stage 1 | .  F0 B0--- F1 B1--- F2 B2--- .  .  .",
    ]


def test_quarters_of_a_forward_have_a_column_each() -> None:
    assert gantt(step(2, 2, link=0.25)).split("\n") == [
        "stage 0 | F0- F1- R0- ......B0----- R1- B1-----",
        "stage 1 | .....F0- B0----- F1- B1----- .........",
    ]


def test_two_stages_a_rank_say_the_stage() -> None:
    lines = gantt(several_stages_a_rank()["zbv"]).split("\n")
    assert lines[0].startswith("rank 0 | 0F0 0F1 0F2 ..3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 ")
    assert lines[1].startswith("rank 1 | .....1F0 2F0 1F1 2F1 ..2I0 2W0 1F2 1I0 1W0 2F2 2I1 ")


def test_where_it_gets_narrow_the_numbers_go() -> None:
    assert gantt(step(4, 8), width=60).split("\n") == [
        "stage 0 | FFFFR.....B-FRB-FRB-FRB-FRB-R.B-R.B-RB-",
        "stage 1 | .FFFR...B-FRB-FRB-FRB-FRB-FRB-R.B-RB-..",
        "stage 2 | ..FFR.B-FRB-FRB-FRB-FRB-FRB-FRB-RB-....",
        "stage 3 | ...FB-FB-FB-.FB-.FB-.FB-.FB-.FB-.......",
    ]


def test_where_it_gets_crowded_letters_get_the_columns_that_their_time_is_worth() -> None:
    lines = gantt(step(16, 64), width=100).split("\n")
    assert len(lines) == 16
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("stage 0  | FFFFF")
    assert lines[15].startswith("stage 15 | ....")
    counts = {letter: lines[0].split(" | ")[1].count(letter) for letter in "FBR"}
    assert counts["B"] == pytest.approx(2 * counts["F"], abs=3) == pytest.approx(2 * counts["R"], abs=3)


def test_measured_times_are_drawn_to_scale() -> None:
    assert gantt(measured(), width=50).split("\n") == [
        "stage 0 | F0--- .....................B0----------",
        "stage 1 | .......F0--- B0---------- ..............",
    ]


@few(4)
@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("link", [0.0, 0.25, 0.37, 1.0])
@pytest.mark.parametrize("width", [40, 80, 160])
def test_rows_begin_and_end_together_and_keep_to_the_width(p: int, link: float, width: int) -> None:
    lines = gantt(step(p, 2 * p, link), width).split("\n")
    assert len(lines) == p
    assert len({line.index("|") for line in lines}) == 1
    assert max(map(len, lines)) <= width


def test_of_an_empty_step_there_are_the_names() -> None:
    assert gantt(EMPTY) == "stage 0 |\nstage 1 |"


def test_actions_that_take_no_time_are_not_drawn() -> None:
    assert "R" not in gantt(step(2, 2, costs=replace(COSTS, recompute_seconds=0)))
