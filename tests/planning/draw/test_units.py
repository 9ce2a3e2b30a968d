from __future__ import annotations

import pytest

from tests.planning.steps import several_stages_a_rank, step
from torchckpt.planning.draw.units import Units, aligned, label, number, percent, prefix, row_name, units_of_bytes
from torchckpt.planning.order.schedule import Action, Kind


@pytest.mark.parametrize(
    ("value", "text"),
    [(33.0, "33"), (0.25, "0.25"), (1234.5, "1234"), (2.5e7, "2.5e+07"), (1 / 3, "0.3333"), (0, "0")],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_percent_knows_no_minus_zero() -> None:
    shown = [percent(share) for share in (0.125, 0.0, -0.0, -1e-9, -0.1)]
    assert shown == ["12.5 %", "0.0 %", "0.0 %", "0.0 %", "-10.0 %"]


def test_units() -> None:
    assert Units().of_time(33) == "33"
    assert Units().of_memory(1.5) == "1.5 A"
    assert Units("ms", 1e-3, "GiB", 2**30).of_time(0.0425) == "42.5 ms"
    assert Units("ms", 1e-3, "GiB", 2**30).of_memory(3 * 2**30) == "3 GiB"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("", "step", "peak"), ("arrival", "12", "1 A"), ("none", "9", ""), ("a long name", "1234.5", "2 A")]
    assert aligned(rows).split("\n") == [
        "               step  peak",
        "arrival          12   1 A",
        "none              9",
        "a long name  1234.5   2 A",
    ]


def test_one_column_and_no_rows() -> None:
    assert aligned([("one",), ("three",)]) == "one\nthree"
    assert aligned([]) == ""


def test_rows_are_stages_where_each_rank_has_one() -> None:
    action = Action(1, Kind.FORWARD, 3)
    single, several = step(2, 2).schedule, several_stages_a_rank()["zbv"].schedule
    assert (row_name(single, 1), label(single, action)) == ("stage 1", "F3")
    assert (row_name(several, 1), label(several, action)) == ("rank 1", "1F3")


@pytest.mark.parametrize(
    ("largest", "letter"), [(0, ""), (0.5, ""), (999, ""), (1000, "k"), (10**6, "M"), (10**9, "G"), (10**16, "T")]
)
def test_the_prefix_leaves_a_number_of_at_least_one(largest: float, letter: str) -> None:
    assert prefix(largest)[0] == letter


def test_memory_is_written_in_bytes_and_time_as_asked_for() -> None:
    units = units_of_bytes(2_000, "ms", 1e-3)
    assert (units.of_memory(2_500), units.of_time(0.0425)) == ("2.5 kB", "42.5 ms")
