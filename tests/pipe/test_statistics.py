"""Mean and variance of parts are those of the whole."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import in_threads
from tests.slow import few
from torchckpt.pipe.batchnorm import Statistics


def statistics_of(*parts: Tensor) -> Statistics:
    statistics = Statistics()
    for part in parts:
        statistics.add(part)
    return statistics


def assert_those_of(values: Tensor, statistics: Statistics, tolerance: float = 1e-6) -> None:
    exact = values.double().transpose(0, 1).flatten(1)
    largest = float(exact.abs().max())
    assert statistics.count == exact.shape[1]
    torch.testing.assert_close(statistics.mean().double(), exact.mean(1), rtol=0.0, atol=tolerance * largest)
    torch.testing.assert_close(statistics.variance().double(), exact.var(1), rtol=tolerance, atol=0.0)


@few(33)
@pytest.mark.parametrize("shape", [(24, 3), (24, 3, 5), (24, 3, 4, 4), (24, 3, 2, 3, 2)])
@pytest.mark.parametrize("parts", [[24], [1] * 24, [1, 20, 3], [12, 12]])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
def test_parts(device: torch.device, shape: tuple[int, ...], parts: list[int], offset: float) -> None:
    values = torch.randn(shape, device=device) + offset
    assert_those_of(values, statistics_of(*values.split(parts)))


@pytest.mark.parametrize("first", [0.0, 1e4])
def test_parts_that_are_far_from_each_other(device: torch.device, first: float) -> None:
    parts = [torch.randn(4, 3, device=device) + first, *torch.randn(400, 3, device=device).split(8)]
    assert_those_of(torch.cat(parts), statistics_of(*parts), 5e-6)  # rounded 50 times


def test_the_naive_sum_of_squares_would_fail() -> None:
    values = torch.randn(64, 3) + 1e4
    naive = (values.square().sum(0) - values.sum(0).square() / 64) / 63
    assert (naive / values.double().var(0) - 1).abs().max() > 0.1


@pytest.mark.parametrize(
    ("values", "sums"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_kept_in_float32_at_least(device: torch.device, values: Any, sums: Any) -> None:
    batch = (torch.randn(512, 3, device=device) + 3).to(values)
    statistics = statistics_of(*batch.split(100))
    assert statistics.mean().dtype == statistics.variance().dtype == sums
    assert_those_of(batch, statistics, 1e-12 if sums is torch.float64 else 1e-6)


def test_a_part_without_values_adds_nothing() -> None:
    values = torch.randn(4, 3)
    assert_those_of(values, statistics_of(torch.empty(0, 3), values, torch.empty(0, 3)))


def test_parts_from_two_threads() -> None:
    values, statistics = torch.randn(400, 3), Statistics()
    halves = values.split(200)
    in_threads(*(lambda half=half: [statistics.add(part) for part in half.split(2)] for half in halves))
    assert_those_of(values, statistics)


def test_no_graph_is_kept() -> None:
    statistics = statistics_of(torch.randn(4, 3, requires_grad=True))
    assert not statistics.mean().requires_grad
    assert not statistics.variance().requires_grad
