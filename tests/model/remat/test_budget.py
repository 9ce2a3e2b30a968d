"""Amounts of memory as one writes them."""
from __future__ import annotations

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.model.remat.budget import budget_bytes, check_budget, written


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
    ],
)
def test_sizes(text, amount):
    check_budget("f()", text)
    assert budget_bytes(text, 7) == amount


@pytest.mark.parametrize(("share", "amount"), [(1.0, 999), (0.5, 499), (0.001, 0)])
def test_floats_are_shares_of_the_eager_peak(share, amount):
    assert budget_bytes(share, 999) == amount


def test_integers_are_bytes():
    assert budget_bytes(1, 999) == 1
    assert budget_bytes(10**12, 999) == 10**12


@pytest.mark.parametrize(
    "budget",
    ["6 gigs", "6", "", "GiB", "0MB", "-1MB", "1e3MB", "6GiB of memory", 0, -1, 0.0, 1.5, -0.5, float("nan"), True,
     False, None, [1], b"6GiB", 1j],
)
def test_what_is_no_budget(budget):
    with pytest.raises(ArgumentError) as caught:
        check_budget("f()", budget)
    assert str(caught.value) == (
        "f(): a budget is a size with one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB; or bytes, as an int; or a"
        " share of eager's peak in (0, 1], as a float\n"
        f"  received: {budget!r}\n"
        '  works:    budget="6GiB", budget=6 * 2**30, budget=0.4'
    )
    with pytest.raises(ArgumentError, match=r"budget_bytes\(\): a budget is a size"):
        budget_bytes(budget, 100)


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
