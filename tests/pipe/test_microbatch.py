"""Scatter and gather."""
from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from torchckpt.errors import ArgumentError
from torchckpt.pipe.microbatch import gather, scatter


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (5, 4, [2, 1, 1, 1]), (3, 8, [1, 1, 1]), (1, 4, [1]), (7, 1, [7])],
)
def test_as_many_micro_batches_as_chunks_or_rows(rows: int, chunks: int, sizes: list[int]) -> None:
    batch = torch.arange(rows * 2).view(rows, 2)
    parts = scatter(batch, chunks)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(gather(parts), batch)


def test_a_tuple_is_split_tensor_by_tensor() -> None:
    batch = torch.randn(5, 2), torch.arange(5)
    parts = scatter(batch, 2)
    assert [(len(x), len(y)) for x, y in parts] == [(3, 3), (2, 2)]
    together = gather(parts)
    assert torch.equal(together[0], batch[0])
    assert torch.equal(together[1], batch[1])


WORKS = "works:    pipe(x) or pipe((x, mask)), with tensors of one and the same number of rows, at least one"


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([torch.ones(2)], "the input must be a tensor or a tuple of tensors\n  received: list\n"),
        ((torch.ones(2), 3), "the input must be a tensor or a tuple of tensors\n  received: tuple of (Tensor, int)\n"),
        ((), "the input must be a tensor or a tuple of tensors\n  received: tuple of ()\n"),
        (torch.ones(()), "every input must have a batch dimension to be split along\n  received: shapes ()\n"),
        (torch.ones(0, 3), "a mini-batch must have at least one row\n  received: shapes (0, 3)\n"),
        (
            (torch.ones(4, 2), torch.ones(3)),
            "all inputs must have the same number of rows\n  received: shapes (4, 2), (3,)\n",
        ),
    ],
)
def test_a_wrong_mini_batch_is_an_error_that_shows_it(batch: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape("Pipe: " + text + "  " + WORKS)):
        scatter(batch, 2)


@pytest.mark.parametrize(
    ("output", "received"),
    [(torch.ones(()), "shape ()"), ([torch.ones(2)], "list"), ((torch.ones(2), None), "shape (2,), NoneType")],
)
def test_an_output_that_cannot_be_gathered_is_an_error_that_shows_it(output: Any, received: str) -> None:
    text = (
        "the last stage must return a tensor or a tuple of tensors, each with a batch dimension to be gathered along\n"
        f"  received: {received}\n  works:    a last layer that returns logits; loss_fn(pipe(x), target) outside"
    )
    with pytest.raises(ArgumentError, match=re.escape(text)):
        gather([output, output])
