"""The table beside the figures of the closed forms, and the names of policies."""
from __future__ import annotations

import json
import re

import pytest

from tests.planning.policies import early, late, placed
from torchckpt.errors import ArgumentError
from torchckpt.planning import Block, gpipe, one_f_one_b
from torchckpt.planning.draw.units import Units
from torchckpt.planning.figures import Row
from torchckpt.planning.step.simulated import step_of
from torchckpt.planning.step.table import AS_GIVEN, POLICIES, in_words, policy_faults, report, step_named, table_of


def rows(p: int, m: int, link: float) -> dict[str, Row]:
    found = report(one_f_one_b(p, m), link=link, names=("none", "arrival", "ahead", "ahead/last_stage"))
    return {row.name: row for row in found.rows}


def cells(row: Row) -> list[str]:
    return re.split("  +", table_of([row], Units()).splitlines()[1])


@pytest.mark.parametrize(
    ("p", "m", "link", "at_arrival", "one_ahead", "least", "hidden"),
    [
        (2, 2, 0, "33.3", "0.0", "0.0", "1.00"),
        (2, 8, 0, "33.3", "22.2", "18.5", "0.33"),
        (2, 8, 1, "25.7", "2.9", "0.0", "0.89"),
        (4, 4, 0, "33.3", "9.5", "4.8", "0.71"),
        (4, 4, 0.25, "29.8", "4.3", "0.0", "0.86"),
        (4, 16, 1, "22.4", "0.0", "0.0", "1.00"),
        (8, 8, 0, "33.3", "13.3", "11.1", "0.60"),
        (8, 32, 0.25, "29.1", "12.3", "11.2", "0.58"),
        (8, 32, 1, "21.1", "0.0", "0.0", "1.00"),
    ],
)
def test_overheads_to_the_printed_digit(
    p: int, m: int, link: float, at_arrival: str, one_ahead: str, least: str, hidden: str
) -> None:
    found = rows(p, m, link)
    assert cells(found["arrival"])[2] == f"{at_arrival} %"
    assert cells(found["ahead/last_stage"])[2:5] == [f"{one_ahead} %", f"{least} %", hidden]


def test_the_table() -> None:
    found = report(one_f_one_b(2, 2), names=("none", "arrival", "ahead", "ahead/last_stage"))
    assert found.table().split("\n") == [
        "recompute         step  overhead   bound  hidden  peak",
        "none                 9     0.0 %   0.0 %       -   2 A",
        "arrival             12    33.3 %  22.2 %    0.00   1 A",
        "ahead               11    22.2 %  22.2 %    0.33   1 A",
        "ahead/last_stage     9     0.0 %   0.0 %    1.00   1 A",
    ]


def test_the_table_in_units_of_the_user() -> None:
    costs = Block(0.004, 0.004, 0.004, 0.004, saved_bytes=3 * 2**30)
    table = report(one_f_one_b(2, 2), costs, names=("none",)).table(Units("ms", 1e-3, "GiB", 2**30))
    assert table.split("\n") == [
        "recompute   step  overhead  bound  hidden   peak",
        "none       36 ms     0.0 %  0.0 %       -  6 GiB",
    ]


def test_json_says_the_same() -> None:
    found = report(gpipe(2, 4), names=("none", "arrival"))
    assert json.loads(json.dumps(found.as_json())) == {
        "schedule": "gpipe",
        "ranks": 2,
        "stages": 2,
        "micro_batches": 4,
        "rows": [
            {
                "recompute": "none",
                "step_seconds": 15.0,
                "overhead": 0.0,
                "bound": 0.0,
                "hidden": None,
                "idle": pytest.approx(0.2),
                "peak_bytes": [4.0, 4.0],
            },
            {
                "recompute": "arrival",
                "step_seconds": 20.0,
                "overhead": pytest.approx(1 / 3),
                "bound": pytest.approx(4 / 15),
                "hidden": 0.0,
                "idle": pytest.approx(0.2),
                "peak_bytes": [1.0, 1.0],
            },
        ],
    }


def test_recomputes_of_the_schedule_itself_are_the_first_row() -> None:
    given = early(one_f_one_b(2, 2), "last_stage")
    found = report(given, names=("none", "ahead"))
    assert [row.name for row in found.rows] == [AS_GIVEN, "none", "ahead"]
    assert [row.timeline.step_seconds for row in found.rows] == [9, 9, 11]
    assert found.rows[0].timeline.schedule == given
    assert found.schedule == one_f_one_b(2, 2)


def test_recomputation_that_costs_nothing_hides_nothing() -> None:
    found = report(one_f_one_b(2, 2), Block(recompute_seconds=0))
    assert [(row.overhead, row.bound, row.hidden) for row in found.rows] == [(0, 0, None)] * 3


def test_names_of_policies() -> None:
    schedule = one_f_one_b(3, 6)
    plain = step_of(schedule, Block(2.0), 0.5)
    assert step_named(plain, "none") == plain
    assert step_named(plain, "arrival").choices == late(schedule)
    assert step_named(plain, "arrival/last_micro_batch").choices == late(schedule, "last_micro_batch")
    assert step_named(plain, "ahead").schedule == placed(schedule, Block(2.0), 0.5)
    three = step_named(plain, "ahead:3/first_backward")
    assert three.schedule == placed(schedule, Block(2.0), 0.5, "first_backward", k=3)
    assert not any(policy_faults(name) for name in POLICIES)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("ahed", "ahead"), ("last_stage", "ahead/last_stage"), ("arrival:2", "arrival"), ("", "none"), ("Ahead", "ahead")],
)
def test_an_unknown_policy_names_the_known_ones_and_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        report(one_f_one_b(2, 2), names=[name])
    assert str(raised.value) == (
        "report(): the policy is not none, arrival, ahead or ahead:K; the last three also with /last_stage, "
        f"/last_micro_batch, /first_backward\n  received: {name!r}\n  works:    {nearest!r}"
    )


def test_policies_in_words() -> None:
    names = ("none", "ahead", "ahead:2", "arrival/last_stage", "ahead:3/first_backward")
    assert [in_words(name) for name in names] == [
        "nothing recomputed",
        "recomputed ahead of the gradient",
        "recomputed ahead, up to 2 micro-batches",
        "recomputed at arrival, last stage kept",
        "recomputed ahead, up to 3 micro-batches, first backward kept",
    ]
    assert in_words(AS_GIVEN) == AS_GIVEN
    assert all("/" not in in_words(name) and "_" not in in_words(name) for name in POLICIES)


@pytest.mark.parametrize(
    ("names", "finding"),
    [
        (("arrival", "ahead/last_stage"), "Recomputing ahead of gradients makes the step 15.6 % shorter"),
        (("none", "arrival", "ahead"), "Recomputing ahead of gradients makes the step 11.5 % shorter"),
        (("none", "ahead"), "Recomputing ahead of gradients makes the step 14.9 % longer"),
        (("arrival",), "Recomputing when gradients arrive makes the step 29.7 % longer"),
        (("arrival", "none"), "Recomputing nothing makes the step 22.9 % shorter"),
    ],
)
def test_the_picture_says_what_it_shows(names: tuple[str, ...], finding: str) -> None:
    drawn = report(one_f_one_b(4, 8), link=0.25, names=names).draw(subtitle="of what")
    assert f">{finding}</text>" in drawn
    assert ">of what</text>" in drawn
    assert drawn.count(">no recomputation 37</text>") == len(names)


def test_the_picture_counts_memory_in_words() -> None:
    drawn = report(one_f_one_b(4, 8), names=("none", "arrival")).draw(budget_bytes=3)
    assert "peak 4 micro-batches<" in drawn
    assert "peak 1 micro-batch<" in drawn
    assert ">budget 3 micro-batches<" in drawn


def test_the_picture_of_a_schedule_with_recomputes_of_its_own() -> None:
    found = report(early(one_f_one_b(2, 2)), names=())
    assert ">Recomputing as given makes the step 22.2 % longer<" in found.draw()
