"""The repeated blocks of models, by what they are."""
from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import torchckpt
from tests.layers.models import Model, Wide, gradients
from torchckpt.layers.find import repeated


class Stages(nn.Module):
    """Stages of their own width, as in Swin and ConvNeXt; each is a list of blocks behind a layer of its own."""

    def __init__(self):
        super().__init__()
        widths = [(8, 2), (16, 2), (32, 6), (64, 2)]
        stages = ((size, nn.Sequential(*(Wide(size, 8) for _ in range(count)))) for size, count in widths)
        self.stages = nn.Sequential(*(nn.Sequential(nn.Linear(4, size), blocks) for size, blocks in stages))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 8), nn.ModuleList(Wide(8, 8) for _ in range(8))


def test_layers_of_a_list_of_a_sequence_and_of_a_dictionary():
    blocks = [Wide(8, 8) for _ in range(4)]
    assert repeated(Model(blocks, 8)) == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert repeated(nn.Sequential(nn.Linear(8, 8), *blocks)) == ["1", "2", "3", "4"]
    model = nn.Module()
    model.layers = nn.ModuleDict({str(at): block for at, block in enumerate(blocks)})
    assert repeated(model) == ["layers.0", "layers.1", "layers.2", "layers.3"]


def test_a_first_block_that_has_more_is_one_too():
    blocks = [Wide(8, 8) for _ in range(3)]
    blocks[0].bias = nn.Parameter(torch.zeros(3))
    assert repeated(Model(blocks, 8)) == ["layers.0", "layers.1", "layers.2"]


def test_blocks_in_stages_of_unlike_width():
    names = repeated(Stages())
    assert len(names) == 12
    assert names[:3] == ["stages.0.1.0", "stages.0.1.1", "stages.1.1.0"]


def test_layers_and_not_their_experts():
    assert repeated(Model([Experts() for _ in range(2)], 8)) == ["layers.0", "layers.1"]


def test_an_encoder_and_a_decoder():
    model = nn.Transformer(8, 2, 3, 2, 16, batch_first=True)
    blocks = [f"encoder.layers.{at}" for at in range(3)] + [f"decoder.layers.{at}" for at in range(2)]
    assert repeated(model) == blocks


def test_where_there_are_none_candidates_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    said = (
        r"checkpoint_layers: no repeated blocks were found: say which layers\n"
        r"  received: a Sequential with no list of like blocks; it has 1\n"
        r'  works:    checkpoint_layers\(model, "1", budget=...\)'
    )
    with pytest.raises(torchckpt.ArgumentError, match=said):
        torchckpt.checkpoint_layers(model, budget="1GiB")
    with pytest.raises(torchckpt.ArgumentError, match="no repeated blocks"):
        torchckpt.checkpoint_layers(nn.Linear(2, 2), budget="1GiB")


def test_one_line_says_what_was_taken(caplog):
    model = Model([Wide(16, 16) for _ in range(3)])
    with caplog.at_level(logging.INFO, "torchckpt"):
        handle = torchckpt.checkpoint_layers(model, budget="1GiB")
    assert caplog.messages == ["checkpoint_layers takes 3 repeated blocks: layers.0 to layers.2"]
    assert handle.names == ("layers.0", "layers.1", "layers.2")
    for _ in range(2):
        gradients(model, torch.randn(2, 4, 16))
    assert handle.plan is not None


@pytest.mark.parametrize(("package", "make", "count"), [
    ("transformers", lambda t: t.GPT2LMHeadModel(t.GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=20)), 3),
    ("transformers", lambda t: t.BertModel(t.BertConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=20)), 3),
    ("transformers", lambda t: t.T5Model(t.T5Config(
        num_layers=3, d_model=16, num_heads=2, d_kv=8, d_ff=16, vocab_size=20)), 6),
])
def test_models_of_others(package, make, count):
    assert len(repeated(make(pytest.importorskip(package)))) == count
