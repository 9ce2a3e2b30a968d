"""Scatter and gather."""
from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from torchckpt.errors import ArgumentError
from torchckpt.pipe.microbatch import NoChunk, gather, scatter


def split(*args: Any, chunks: int = 2, dim: int = 0, **kwargs: Any) -> list[Any]:
    return scatter(args, kwargs, chunks, dim)


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (5, 4, [2, 1, 1, 1]), (3, 8, [1, 1, 1]), (1, 4, [1]), (7, 1, [7])],
)
def test_as_many_micro_batches_as_chunks_or_rows(rows: int, chunks: int, sizes: list[int]) -> None:
    batch = torch.arange(rows * 2).view(rows, 2)
    parts = split(batch, chunks=chunks)
    assert [part.rows for part in parts] == [len(part.args[0]) for part in parts] == sizes
    assert torch.equal(gather([part.args[0] for part in parts], sizes), batch)


def test_pytrees_are_split_tensor_by_tensor_and_all_else_goes_to_each_part() -> None:
    table = torch.randn(3, 2)
    x, y = torch.randn(5, 2), torch.arange(5)
    parts = split({"x": x, "flag": True}, NoChunk(table), scale=2.0, mask=[y, None])
    assert [part.rows for part in parts] == [3, 2]
    for part, rows in zip(parts, (slice(0, 3), slice(3, 5))):
        (first, second), kwargs = part.args, part.kwargs
        assert torch.equal(first["x"], x[rows])
        assert first["flag"] is True
        assert second is table
        assert kwargs["scale"] == 2.0
        assert torch.equal(kwargs["mask"][0], y[rows])
        assert kwargs["mask"][1] is None


def test_the_dimension_of_rows_is_chosen() -> None:
    x = torch.randn(4, 6, 2)
    parts = split(x, dim=1, chunks=4)
    assert [tuple(part.args[0].shape) for part in parts] == [(4, 2, 2), (4, 2, 2), (4, 1, 2), (4, 1, 2)]
    assert torch.equal(gather([part.args[0] for part in parts], [2, 2, 1, 1], dim=1), x)


def test_scalars_become_one_by_the_rule_that_is_given() -> None:
    scalars, rows = [torch.tensor(1.0), torch.tensor(4.0)], [3, 1]
    assert gather(scalars, rows, reduce="sum").item() == 5.0
    assert gather(scalars, rows, reduce="mean").item() == 1.0 * 0.75 + 4.0 * 0.25


def test_what_is_no_tensor_is_the_same_for_all_parts() -> None:
    outputs = [{"y": torch.ones(2), "name": "head", "none": None}] * 2
    together = gather(outputs, [2, 2])
    assert (together["name"], together["none"], tuple(together["y"].shape)) == ("head", None, (4,))


WORKS = "works:    pipe(x, mask, scale=2.0), with tensors that have the same number of rows; NoChunk(table) for other"


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((3, "a"), {}, "no input is a tensor, or holds one, to be split along its rows\n  received: no tensor\n"),
        ((), {}, "no input is a tensor, or holds one, to be split along its rows\n  received: no tensor\n"),
        (
            (torch.ones(()),),
            {},
            "a tensor has no dimension 0, to be split along\n  received: input 0 of shape ()\n",
        ),
        ((torch.ones(0, 3),), {}, "the mini-batch has no rows\n  received: input 0 of shape (0, 3)\n"),
        (
            ({"x": torch.ones(4, 2)},),
            {"mask": (torch.ones(3),)},
            "the tensors differ in the number of rows, in dimension 0\n"
            "  received: input 0['x'] of shape (4, 2), mask=[0] of shape (3,)\n",
        ),
    ],
)
def test_a_wrong_mini_batch_is_an_error_that_shows_it(args: Any, kwargs: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text + "  " + WORKS)):
        split(*args, **kwargs)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (
            [torch.ones(()), torch.ones(())],
            "the last layer returns a scalar for each micro-batch, and there is no reduce= to combine them\n"
            "  received: shape ()\n"
            '  works:    Pipe(..., reduce="mean"), weighted by rows; or Pipe(..., reduce="sum")',
        ),
        (
            [(torch.ones(1), 1), (torch.ones(1), 2)],
            "the last stage returns an object other than a tensor, which is not equal for all micro-batches\n"
            "  received: 1, 2\n"
            "  works:    a tensor instead, such as torch.tensor([count])",
        ),
        (
            [torch.ones(1), (torch.ones(1),)],
            "the last stage returns another structure for a later micro-batch\n",
        ),
    ],
)
def test_an_output_that_cannot_be_gathered_is_an_error_that_shows_it(outputs: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        gather(outputs, [1, 1])


@pytest.mark.parametrize("make", [lambda: iter([1, 2]), lambda: NoChunk(x for x in range(2))])
def test_an_iterator_is_an_error(make: Any) -> None:
    """The first micro-batch took all of it, and the others none, in silence."""
    text = "an iterator, of which later micro-batches get only what the first has left\n  received: parts=\n"
    with pytest.raises(ArgumentError, match=text):
        scatter((torch.ones(4, 2),), {"parts": make()}, 2)


def test_a_sparse_tensor_is_not_split() -> None:
    target = torch.eye(4).to_sparse()
    text = f"a tensor that is not strided cannot be split along its rows\n  received: input 1 of layout {target.layout}"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        scatter((torch.ones(4, 2), target), {}, 2)
    assert scatter((torch.ones(4, 2), target), {}, 1)[0].args[1] is target
    assert scatter((torch.ones(4, 2), NoChunk(target)), {}, 2)[0].args[1] is target


def test_an_output_without_the_dimension_of_rows_is_an_error() -> None:
    text = "an output has no dimension 1, along which the micro-batches are concatenated\n  received: shape (3,)\n"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        gather([torch.ones(3)], [3], dim=1)
