"""Amounts of memory as one writes them."""
from __future__ import annotations

from fractions import Fraction

import pytest

from tests.numpy_numbers import is_numpy, np
from torchckpt.errors import ArgumentError
from torchckpt.planning.budget import budget_bytes, bytes_per_rank, check_budget, typed, written


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1B", 1),
        ("6GiB", 6 * 2**30),
        ("6 GiB", 6 * 2**30),
        (" 6gib ", 6 * 2**30),
        ("100MB", 100_000_000),
        ("100 mb", 100_000_000),
        ("1.5 KiB", 1536),
        (".5kB", 500),
        ("2.kb", 2000),
        ("1TiB", 2**40),
        ("0.0015kB", 1),
        (np.int64(5), 5),
        (np.uint8(200), 200),
    ],
)
def test_sizes(text, amount):
    check_budget(text)
    assert budget_bytes(text, 7) == amount


@pytest.mark.parametrize(("share", "amount"), [("100%", 999), ("50%", 499), (" 12.5 % ", 124), (".1%", 0)])
def test_percents_are_shares_of_the_eager_peak(share, amount):
    check_budget(share)
    assert budget_bytes(share, 999) == amount


def test_share_is_the_one_that_was_typed():
    """0.29 * 100 is 28.999999999999996."""
    assert [budget_bytes(f"{percent}%", 100) for percent in range(1, 101)] == [*range(1, 101)]


@pytest.mark.parametrize(
    ("budget", "text"),
    [(" 50% ", "50%"), ("6GiB", "6GiB"), (np.float64(6e9), "6000000000.0"), (np.int64(7), "7"),
     (10**12, "1000000000000")],
)
def test_what_was_typed(budget, text):
    assert typed(budget) == text


@pytest.mark.parametrize("number", [1, 10**12, 1.0, 6e9, np.float64(6e9), np.int64(5), Fraction(7, 2)])
def test_numbers_are_bytes(number):
    check_budget(number)
    assert budget_bytes(number, 999) == int(number)


RULE = "the budget is not bytes above 0, a size with a unit such as kB, MiB or GB, or a share in percent\n"
WORKS = 'budget="60GB", budget="50%", budget=6e10'


@pytest.mark.parametrize(
    ("budget", "received"),
    [
        ("6 gigs", "'6 gigs' (gigs is not a unit)"),
        ("6G", "'6G' (G is not a unit)"),
        ("6", "'6' (it has no unit)"),
        ("0.4", "'0.4' (it has no unit)"),
        ("", "''"),
        ("abc", "'abc'"),
        ("GiB", "'GiB'"),
        ("%", "'%'"),
        ("0MB", "'0MB'"),
        ("0%", "'0%'"),
        ("-1MB", "'-1MB'"),
        ("-5%", "'-5%'"),
        ("101%", "'101%' (more than all of it)"),
        ("1e3MB", "'1e3MB'"),
        ("6GiB of memory", "'6GiB of memory'"),
        (0, "0"),
        (-1, "-1"),
        (0.0, "0.0"),
        (-0.5, "-0.5"),
        (10**400, f"{10**400}"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (True, "True"),
        (False, "False"),
        (None, "None"),
        ([1], "[1] (a list)"),
        (b"6GiB", "b'6GiB' (a bytes)"),
        (1j, "1j (a complex)"),
        *([(np.bool_(True), f"{np.bool_(True)!r} (a {type(np.bool_(True)).__name__})")] if is_numpy else []),
        *([(np.array([1, 2]), "array([1, 2]) (a ndarray)")] if is_numpy else []),
    ],
)
def test_what_is_no_budget(budget, received):
    with pytest.raises(ArgumentError) as caught:
        check_budget(budget)
    assert str(caught.value) == f"{RULE}  received: budget={received}\n  works:    {WORKS}"
    with pytest.raises(ArgumentError, match=r"the budget is not bytes above 0"):
        budget_bytes(budget, 100)


@pytest.mark.parametrize(
    ("budget", "percent"),
    [(0.4, "40%"), (0.29, "29%"), (np.float32(0.25), "25%"), (0.999, "99.9%"), (Fraction(1, 2), "50%")],
)
def test_a_number_below_one_may_have_been_meant_as_a_share(budget, percent):
    for refuse in (check_budget, lambda share: bytes_per_rank(share, 2, 100.0)):
        with pytest.raises(ArgumentError) as caught:
            refuse(budget)
        received = f"budget={budget!r} (less than a byte; a share is text)"
        assert str(caught.value) == f'{RULE}  received: {received}\n  works:    budget="{percent}", or {WORKS}'


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0B"), (999, "999B"), (1000, "1kB"), (1001, "1.01kB"), (14_263_812, "14.27MB"), (6 * 2**30, "6.45GB"),
     (10**13, "10000GB"), (10**13 + 1, "10000.01GB")],
)
def test_written_is_a_budget_that_is_enough(amount, text):
    assert written(amount) == text
    assert amount == 0 or budget_bytes(text, 1) >= amount


def test_every_written_amount_is_enough():
    """2.01 is a little less than it seems, as a float; and so may a quotient be."""
    for amount in (*range(1, 3000), *(17**power + more for power in range(2, 15) for more in range(10))):
        assert budget_bytes(written(amount), 1) >= amount
