"""Amounts: one reader for all who take bytes."""
from __future__ import annotations

from fractions import Fraction

import pytest

from tests.numpy_numbers import np
from torchckpt.planning.budget import Amount, enough, read, trouble, whole


@pytest.mark.parametrize(
    ("written", "amount"),
    [
        ("1.5 KiB", Amount(Fraction(1536))),
        (" 12.5 % ", Amount(Fraction(1, 8), is_share=True)),
        (1.29, Amount(Fraction(129, 100))),
        (np.float64(6e9), Amount(Fraction(6_000_000_000))),
        (np.int32(7), Amount(Fraction(7))),
        (10**400, Amount(Fraction(10**400))),
    ],
)
def test_what_is_read(written, amount):
    assert read(written) == amount


@pytest.mark.parametrize(
    "written",
    ["", "abc", "5", "0B", "0%", "-1%", "1 %%",
     0, -1, 0.0, -0.5, 0.29, Fraction(1, 2), float("nan"), float("inf"), True, None, 1j],
)
def test_what_is_none(written):
    assert read(written) is None
    assert trouble(written).startswith(repr(written))


def test_share_of_a_peak():
    share, size = read("50%"), read("1kB")
    assert (share.of(8001), size.of(8001)) == (Fraction(8001, 2), 1000)


@pytest.mark.parametrize(
    ("amount_bytes", "most", "least"),
    [
        (15800217.6, "15800217", "15800218"),
        (Fraction(15800217), "15800217", "15800217"),
        (3.5e13 + 0.5, "35000000000000", "35000000000001"),
        (4.5, "4.5", "4.5"),
    ],
)
def test_people_read_no_part_of_a_byte(amount_bytes: float, most: str, least: str) -> None:
    assert (whole(amount_bytes), enough(amount_bytes)) == (most, least)
