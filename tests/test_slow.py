"""Which cases of a test make test leaves out."""
from __future__ import annotations

import pytest

from tests.slow import few, leave_out


class Case:
    """A collected case of a test."""

    def __init__(self, test, name, *marks):
        self.nodeid, self.marks = f"{test}[{name}]", {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark


def those_that_stay(test, count):
    cases = {name: Case(test, name, few(count).mark) for name in "abcdef"}
    leave_out(cases.values())
    return "".join(name for name, case in cases.items() if "slow" not in case.marks)


@pytest.mark.parametrize(
    ("count", "choices"), [(1, "abcdef"), (2, ["ad", "be", "cf"]), (3, ["ace", "bdf"]), (6, ["abcdef"])]
)
def test_cases_that_stay_are_evenly_spread_and_others_in_other_tests(count, choices):
    assert {those_that_stay(f"test_{test}", count) for test in range(30)} == set(choices)


def test_what_has_no_mark_stays_and_what_is_slow_is_not_counted():
    slow, quick = Case("test", "a", few(1).mark, pytest.mark.slow.mark), Case("test", "b", few(1).mark)
    cases = [Case("test", "plain"), slow, quick]
    leave_out(cases)
    assert ["slow" in case.marks for case in cases] == [False, True, False]
