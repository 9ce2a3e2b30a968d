"""Choosing a kept set: the figures of TensorFlow's memory-saving gradients, and what they rest on."""
from __future__ import annotations

import pytest

from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.late import evenly, every_sqrt, falling, late, least_peak, separating_storages
from torchckpt.planning.remat.flow.memory import simulate

MEGABYTE = 1_000_000


def step(values: list[tuple[tuple[int, ...], bool]], sizes: list[int] | None = None) -> Dataflow:
    """The gradient of the input 0 through values 1, 2, ..., each as (what it reads, whether it is a tanh or a sum).

    Every value has the gradient of the one after it for its own, which is that of the output at last: that of a sum
    passes on as it is, that of tanh reads what tanh returned. Storages follow on the values: the gradients.
    """
    number = len(values)
    operations = [Operation(f"a{value}", reads, (value,), 1.0) for value, (reads, _) in enumerate(values, 1)]
    gradient = number + 1
    for value in range(number, 0, -1):
        if values[value - 1][1]:
            operations.append(Operation(f"g{value}", (gradient, value), (gradient + 1,), 1.0))
            gradient += 1
    all_sizes = (MEGABYTE, *(sizes or [MEGABYTE] * number), *[MEGABYTE] * (gradient - number))
    given, results = frozenset({0, number + 1}), frozenset({number, gradient})
    return Dataflow(tuple(operations), all_sizes, number, given, results)


def tanh_chain(number: int, sizes: list[int] | None = None) -> Dataflow:
    return step([((value,), True) for value in range(number)], sizes)


def residual_chain(blocks: int) -> Dataflow:
    """Of x + tanh(x): the odd values are the tanh, the even ones the sums."""
    pairs = [[((value,), True), ((value, value + 1), False)] for value in range(0, 2 * blocks, 2)]
    return step([value for pair in pairs for value in pair])


def names_of_repeats(flow: Dataflow, schedule) -> list[str]:
    seen, repeats = set(), []
    for index in schedule:
        if index in seen:
            repeats.append(flow.operations[index].name)
        seen.add(index)
    return repeats


def peak_megabytes(flow: Dataflow, schedule) -> float:
    return simulate(flow, schedule).peak_bytes / MEGABYTE


def test_of_five_values_the_ones_between_the_kept_ones_are_recomputed():
    """The input is a0, so that a4 is the output."""
    flow = tanh_chain(4)
    schedule = late(flow, {1, 3})
    assert simulate(flow, schedule).saved == (1, 3, 4)
    assert names_of_repeats(flow, schedule) == ["a2"]


@pytest.mark.parametrize("flow", [tanh_chain(100), residual_chain(100)], ids=["chain", "residual chain"])
def test_a_hundred_values_need_the_memory_of_twenty(flow):
    kept = every_sqrt(flow, separating_storages(flow))
    assert peak_megabytes(flow, flow.eager) == pytest.approx(102, abs=1)
    assert peak_megabytes(flow, late(flow, kept)) <= 22
    assert len(names_of_repeats(flow, late(flow, kept))) < flow.forward


def test_no_separating_value_no_kept_set():
    assert every_sqrt(tanh_chain(3), []) == frozenset()


def test_kept_values_stand_evenly():
    assert evenly(tanh_chain(11), list(range(1, 12)), 3) == {3, 5, 8}


def test_gaps_fall_towards_the_last_value():
    assert falling(tanh_chain(10), list(range(1, 11)), 3) == {4, 7, 9}


@pytest.mark.parametrize(("values", "even", "any_gaps"), [(30, 12, 10), (100, 21, 17)])
def test_falling_gaps_need_less_memory_than_even_ones(values, even, any_gaps):
    flow = tanh_chain(values)
    separating = separating_storages(flow)
    peaks = [peak_megabytes(flow, late(flow, evenly(flow, separating, count))) for count in range(1, values)]
    assert min(peaks) == even
    assert peak_megabytes(flow, late(flow, every_sqrt(flow, separating))) == any_gaps


def test_kept_values_have_as_many_bytes_between_them():
    flow = tanh_chain(6, sizes=[6, 1, 1, 1, 1, 2])
    assert evenly(flow, list(range(1, 7)), 1) == {1}
    assert evenly(flow, list(range(2, 7)), 1) == {2}


def test_no_more_values_are_kept_than_there_are():
    assert evenly(tanh_chain(3), [1, 2], 7) == {1, 2}


def test_the_kept_set_of_the_least_peak_is_taken():
    flow = tanh_chain(16)
    choices = [frozenset(range(1, 17)), frozenset({4, 8, 12}), frozenset()]
    peaks = [peak_megabytes(flow, late(flow, kept)) for kept in choices]
    assert min(peaks) == peaks[1]
    assert least_peak(flow, choices) == choices[1]


def test_of_equal_peaks_the_one_with_less_recomputation_is_taken():
    flow = tanh_chain(2)
    assert least_peak(flow, [frozenset(), frozenset({1})]) == {1}
    assert least_peak(flow, [frozenset({1}), frozenset()]) == {1}


@pytest.mark.parametrize("values", [10, 30, 100])
def test_several_counts_are_no_worse_than_the_square_root_alone(values):
    flow = tanh_chain(values)
    separating = separating_storages(flow)
    single = evenly(flow, separating, round(values**0.5))
    assert peak_megabytes(flow, late(flow, every_sqrt(flow, separating))) <= peak_megabytes(flow, late(flow, single))
