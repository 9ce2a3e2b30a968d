"""What an accelerator's kernels keep, where a CPU keeps other bytes: by hand, from their definitions in torch."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchckpt.costs import pipeline_costs

B, H, L, D = 2, 4, 16, 8
"""Of attention: rows, heads, tokens, width of a head."""
SEED = 16 + 8
"""Of FlashAttention's dropout: two numbers and one."""


class Call(nn.Module):
    def __init__(self, call, *shape: int) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(shape[-1:]))

    def forward(self, x):
        return self.call(x, self.weight)


def saved_bytes(call, shape, dtype="bf16", kernels="accelerator"):
    def build():
        stages = [nn.Sequential(nn.Identity()), nn.Sequential(*(Call(call, *shape) for _ in range(2)))]
        return stages, torch.randn(shape)

    return pipeline_costs(build, "h100", dtype=dtype, kernels=kernels).counted[1].blocks[-1].work.saved_bytes


def attention(dropout=0.0, mask=False, groups=1):
    def call(x, _):
        keys = x[:, : H // groups]
        biased = x.sum(-1, keepdim=True) + x.sum(-1).unsqueeze(-2) if mask else None
        return F.scaled_dot_product_attention(
            x, keys, keys, biased, dropout, is_causal=not mask, enable_gqa=groups > 1
        )

    return call


QUERY, STATISTICS, MATRIX = B * H * L * D, 4 * B * H * L, B * H * L * L
CASES = [
    ("dropout", lambda x, _: F.dropout(x, 0.1), (B, D), "bf16", B * D),
    ("dropout", lambda x, _: F.dropout(x, 0.1), (B, D), "fp32", B * D),
    ("no dropout", lambda x, _: F.dropout(x, 0.1, training=False).sin(), (B, D), "fp32", 4 * B * D),
    ("rms norm", lambda x, w: F.rms_norm(x, (D,), w), (B, L, D), "bf16", 2 * B * L * D + 4 * B * L),
    ("rms norm", lambda x, w: F.rms_norm(x, (D,), w), (B, L, D), "fp32", 4 * B * L * D + 4 * B * L),
    ("flash", attention(), (B, H, L, D), "bf16", 2 * 2 * QUERY + STATISTICS + SEED),
    ("flash with dropout", attention(0.1), (B, H, L, D), "bf16", 2 * 2 * QUERY + STATISTICS + SEED),
    ("flash with groups", attention(0.1, groups=2), (B, H, L, D), "bf16", 2 * 2 * QUERY + STATISTICS + SEED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "shape", "dtype", "expected"), CASES)
def test_bytes_by_hand(name, call, shape, dtype, expected):
    assert saved_bytes(call, shape, dtype) == expected


@pytest.mark.parametrize(("dropout", "mask", "dtype"), [(0.1, False, "fp32"), (0.1, True, "bf16"), (0.0, True, "fp32")])
def test_attention_that_flash_does_not_do_keeps_no_matrix_of_its_own(dropout, mask, dtype):
    size = 4 if dtype == "fp32" else 2
    mask_bytes = size * MATRIX if mask else 0
    saved = saved_bytes(attention(dropout, mask), (B, H, L, D), dtype)
    assert 2 * size * QUERY + mask_bytes < saved < 2 * size * QUERY + mask_bytes + 2 * STATISTICS + SEED


def test_a_cpu_keeps_a_matrix_for_dropout_in_attention():
    assert saved_bytes(attention(0.1), (B, H, L, D), kernels="cpu") > 2 * 2 * MATRIX


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("call", [lambda x, w: F.rms_norm(x, (D,), w.float()), lambda x, w: F.dropout(x, 1.0) * w])
def test_what_no_kernel_does_is_as_it_is(call):
    shape = (B, L, D)
    assert saved_bytes(call, shape) == saved_bytes(call, shape, kernels="cpu")


def test_flops_are_the_same():
    def flops(kernels):
        def build():
            layers = [nn.TransformerEncoderLayer(D, 2, 16, 0.1, batch_first=True) for _ in range(2)]
            return [nn.Sequential(*layers)], torch.randn(B, L, D)

        (stage,) = pipeline_costs(build, "h100", dtype="bf16", kernels=kernels).counted
        return [part.forward_flops for part in stage.parts]

    assert flops("accelerator") == flops("cpu")
