"""What one operator computes and moves, by hand."""
from __future__ import annotations

import pytest
import torch

from torchckpt.costs.operation import work_of
from torchckpt.costs.private import unallocated

aten = torch.ops.aten


def of(operator, *args, **kwargs):
    return work_of(operator, args, kwargs, operator(*args, **kwargs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_reads_both_and_writes_one(dtype):
    with unallocated():
        cost = of(aten.mm.default, torch.empty(2, 3, dtype=dtype), torch.empty(3, 5, dtype=dtype))
    assert cost == (2 * 2 * 3 * 5, dtype.itemsize * (6 + 15 + 10), str(dtype)[6:])


def test_views_and_empty_tensors_move_nothing():
    with unallocated():
        x = torch.empty(4, 6)
        moved = [
            of(aten.t.default, x),
            of(aten.view.default, x, [24]),
            of(aten.expand.default, x, [3, 4, 6]),
            of(aten.split.Tensor, x, 2),
            of(aten.detach.default, x),
            of(aten.empty_like.default, x),
        ]
    assert {call[:2] for call in moved} == {(0, 0)}


def test_what_is_in_place_reads_and_writes():
    with unallocated():
        assert of(aten.add_.Tensor, torch.empty(4), torch.empty(4))[1] == 3 * 16


def test_of_an_expanded_tensor_what_is_there_is_read():
    with unallocated():
        assert of(aten.add.Tensor, torch.empty(8, 4), torch.empty(1, 4).expand(8, 4))[1] == 4 * (32 + 4 + 32)


def test_of_a_table_what_is_returned_is_read():
    with unallocated():
        cost = of(aten.embedding.default, torch.empty(1000, 4), torch.zeros(3, dtype=torch.long))
    assert cost[1] == 3 * 4 * 12


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_multiplies_each_query_whoever_shares_its_keys(heads):
    rows, queries, tokens, width = 2, 4, 6, 8
    with unallocated():
        query = torch.empty(rows, queries, tokens, width)
        keys = torch.empty(rows, heads, tokens, width)
        operator = aten._scaled_dot_product_flash_attention_for_cpu.default
        outputs, statistics = operator(query, keys, keys)
        forward = work_of(operator, (query, keys, keys), {}, (outputs, statistics))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        args = (outputs, query, keys, keys, outputs, statistics, 0.0, False)
        cost = work_of(backward, args, {}, (query, keys, keys))
    product = 2 * rows * queries * tokens * tokens * width
    assert (forward[0], cost[0]) == (2 * product, 5 * product)
