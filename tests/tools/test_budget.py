"""``checkpoint_layers(budget=)`` in a plain loop, with a ``GradScaler``, with compiled blocks, with adapters of peft.

DDP and FSDP2 are in ``tests/layers/test_ranks.py``; Accelerate, Lightning and ``Trainer`` have their own files here.
"""
from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch

from tests.tools.steps import ROWS, STEPS, Model, equal, rows, trained
from torchckpt import checkpoint_layers


def batches():
    return [batch.repeat(64, 1) for batch in rows().split(ROWS)]


class Scaled:
    """An optimizer whose steps are those of a scaler."""

    def __init__(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scaler, self.scales = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2), []
        self.zero_grad = self.optimizer.zero_grad

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())

    def backward(self, loss):
        self.scaler.scale(loss).backward()


def loss_of_squares(model, batch):
    return model(batch).square().mean()


def steps(model, budget=None, loss_of=loss_of_squares, inputs=None, scaled=False):
    """What is seen of the steps of a copy, the replays, and how many calls the plan keeps."""
    model = copy.deepcopy(model)
    handle = None if budget is None else checkpoint_layers(model, budget=budget)
    scaler = Scaled(model) if scaled else None
    backward = {"backward": scaler.backward, "optimizer": scaler} if scaler else {}
    seen, replays = trained(model, lambda batch: loss_of(model, batch), inputs or batches(), **backward)
    assert scaler is None or scaler.scales == [2.0**8, 2.0**9, 2.0**9]
    return seen, sum(replays.values()), len(handle.plan.kept) if handle else 0


def check(model, layers=3, budget="80%", **options):
    """Steps within the budget are the plain ones, to the bit, and recompute what the plan does not keep."""
    expected, none, _ = steps(model, **options)
    seen, replays, kept = steps(model, budget, **options)
    assert none == 0
    assert equal(seen, expected)
    assert 0 < kept < layers
    assert replays == layers + (STEPS - 1) * (layers - kept)


def test_a_plain_loop():
    check(Model())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_scaler_and_autocast(dtype):
    def loss_of(model, batch):
        with torch.autocast("cpu", dtype):
            return model(batch).float().square().mean()

    check(Model(), loss_of=loss_of, scaled=True)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_blocks():
    model = Model()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    expected = [part.clone() for part in steps(model)[0]]
    seen, replays, kept = steps(model, "95%")
    assert equal(seen, expected)
    assert replays == 3 + (STEPS - 1) * (3 - kept)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft asks of transformers
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_adapters_of_peft():
    """Most parameters are frozen; dropout is on."""
    import peft
    import transformers

    config = transformers.GPT2Config(
        n_layer=4, n_embd=16, n_head=2, n_positions=64, vocab_size=20, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], lora_dropout=0.1, fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)
    tokens = [torch.randint(20, (4, 32)) for _ in range(STEPS)]
    check(model, 4, inputs=tokens, loss_of=lambda model, batch: model(input_ids=batch, labels=batch).loss)
    names = checkpoint_layers(model, budget="1GiB").names
    assert names == tuple(f"base_model.model.transformer.h.{at}" for at in range(4))
