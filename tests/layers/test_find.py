"""The repeated blocks of models, by what they are."""
from __future__ import annotations

import io
import json
import logging
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import torchckpt
from tests.layers.models import Model, Wide, gradients
from tests.scripts import run
from tests.slow import few
from torchckpt.layers.apply import repeated


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


class Alone(nn.Module):
    """A block whose parameters are its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(16, 8))


class Adapted(nn.Linear):
    pass


@pytest.mark.parametrize("block", [Alone, lambda: Adapted(8, 8)])
def test_blocks_that_have_no_modules_inside(block):
    model = nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(3)), "head": nn.Linear(8, 8)})
    assert repeated(model) == ["layers.0", "layers.1", "layers.2"]
    model["layers"] = nn.ModuleList(nn.Sequential(block(), block()) for _ in range(2))
    assert repeated(model) == ["layers.0", "layers.1"]


def test_lists_of_torchs_own_layers_are_named():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})
    said = r'it has layers\.\*\n  works:    checkpoint_layers\(model, "layers\.\*"'
    with pytest.raises(torchckpt.ArgumentError, match=said):
        torchckpt.checkpoint_layers(model, budget="1GiB")


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


def test_on_a_terminal_the_line_is_there_and_else_in_the_log(monkeypatch, caplog):
    class Terminal(io.StringIO):
        def isatty(self):
            return self is terminal

    terminal, file = Terminal(), Terminal()
    model = Model([Wide(16, 16) for _ in range(3)])
    for stream, rank in ((terminal, "0"), (terminal, "1"), (file, "0"), (None, "0")):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("RANK", rank)
        with caplog.at_level(logging.INFO, "torchckpt"), torchckpt.checkpoint_layers(model, budget="1GiB"):
            pass
    line = "checkpoint_layers takes 3 repeated blocks: layers.0 to layers.2"
    assert (terminal.getvalue(), file.getvalue(), caplog.messages) == (f"{line}\n", "", [line] * 3)


def test_one_line_says_what_was_taken(caplog):
    model = Model([Wide(16, 16) for _ in range(3)])
    with caplog.at_level(logging.INFO, "torchckpt"):
        handle = torchckpt.checkpoint_layers(model, budget="1GiB")
    assert caplog.messages == ["checkpoint_layers takes 3 repeated blocks: layers.0 to layers.2"]
    assert handle.names == ("layers.0", "layers.1", "layers.2")
    for _ in range(2):
        gradients(model, torch.randn(2, 4, 16))
    assert handle.plan is not None


def test_what_is_of_the_same_class_in_other_lists():
    """A list whose two blocks differ in shape, as where a stage halves its picture, and one with a single block."""
    stages = [[(8, 8)] * 4, [(8, 16), (8, 32)], [(8, 64)]]
    model = nn.Sequential(*(nn.Sequential(*(Wide(*sizes) for sizes in stage)) for stage in stages))
    assert repeated(model) == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "2.0"]


class Other(Wide):
    pass


def test_a_list_of_two_kinds_of_layers():
    """As in Jamba, where every eighth layer has attention. Where most are of other classes, they are no layers."""
    layers = [Other(8, 8) if at == 2 else Wide(8, 8 * (1 + at % 2)) for at in range(6)]
    assert repeated(Model(layers, 8)) == [f"layers.{at}" for at in range(6)]
    parts = nn.ModuleList([Model([Wide(8, 8) for _ in range(3)], 8), Experts(), Other(8, 8), Other(8, 8)])
    inside = [*(f"0.layers.{at}" for at in range(3)), *(f"1.experts.{at}" for at in range(8))]
    assert sorted(repeated(parts)) == [*inside, "2", "3"]
    some = [Experts() if at % 5 == 4 else Wide(8, 8) for at in range(10)]  # larger ones, with eight experts each
    assert repeated(Model(some, 8)) == [f"layers.{at}" for at in range(10)]


@pytest.mark.parametrize("heads", [2, 3])
def test_a_backbone_beside_its_heads(heads):
    """The heads are more than the backbone, whose layers are the blocks."""
    beside = {f"head{at}": nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for at in range(heads)}
    model = nn.ModuleDict({"backbone": Model([Wide(8, 8) for _ in range(13)], 8), **beside})
    assert repeated(model) == [f"backbone.layers.{at}" for at in range(13)]


def test_a_tower_with_fewer_layers():
    """As of a model of text with one of pictures. A pair of heads does not count beside nine layers."""
    text, pictures = Model([Wide(8, 8) for _ in range(9)], 8), Model([Other(8, 8) for _ in range(4)], 8)
    heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
    names = repeated(nn.ModuleDict({"text": text, "pictures": pictures, "heads": heads}))
    assert names == [*(f"text.layers.{at}" for at in range(9)), *(f"pictures.layers.{at}" for at in range(4))]


def test_blocks_of_one_class_and_no_common_shape():
    """As in DenseNet, where each block has more inputs than the one before."""
    model = nn.ModuleDict({f"block{at}": Wide(8 * at, 8) for at in range(1, 4)})
    assert repeated(model) == ["block1", "block2", "block3"]


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


@few(1)
@pytest.mark.parametrize(("make", "count"), [
    (lambda t: t.GPT2LMHeadModel(t.GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=20)), 3),
    (lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_hidden_layers=3, vocab_size=20)), 3),
    (lambda t: t.MixtralForCausalLM(
        t.MixtralConfig(**SMALL, num_hidden_layers=3, num_key_value_heads=2, vocab_size=20)), 3),
    (lambda t: t.BertModel(t.BertConfig(**SMALL, num_hidden_layers=3, vocab_size=20)), 3),
    (lambda t: t.ViTModel(t.ViTConfig(**SMALL, num_hidden_layers=3, image_size=32)), 3),
    (lambda t: t.T5Model(t.T5Config(num_layers=3, d_model=16, num_heads=2, d_kv=8, d_ff=16, vocab_size=20)), 6),
], ids=["GPT-2", "Llama", "Mixtral", "BERT", "ViT", "T5"])
def test_models_of_transformers(make, count):
    assert len(repeated(make(pytest.importorskip("transformers")))) == count


FOUND = {
    "timm": {
        "test_vit": ["blocks.0", 6], "test_convnext": ["stages.0.blocks.0", 9], "test_efficientnet": ["blocks.0", 5],
        "densenet121": ["features.denseblock1.denselayer1", 58],
        "swin_tiny_patch4_window7_224": ["layers.0.blocks.0", 12], "maxvit_tiny_tf_224": ["stages.0.blocks.0", 11],
        "test_resnet": None, "regnety_004": None,
    },
    "diffusers": {
        "UNet2DModel": ["down_blocks.0.resnets.0", 18], "UNet2DConditionModel": ["down_blocks.0.attentions.0", 18],
        "DiTTransformer2DModel": ["transformer_blocks.0", 4], "FluxTransformer2DModel": ["transformer_blocks.0", 6],
    },
    "torchtitan": {"llama3": ["layers.0", 6], "qwen3": ["layers.0", 8]},
}
"""The first block and their number; None: it is refused, as it has no list of like blocks."""


@pytest.mark.parametrize("package", FOUND)
def test_models_of_others(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = run("-m", "tests.layers.others", package)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"{package} lacks a package: {done.stderr.splitlines()[-1]}")
    told = json.loads(done.stdout.splitlines()[-1])
    names = {model: [of["found"][0], len(of["found"])] if "found" in of else None for model, of in told.items()}
    assert names == FOUND[package]
    steps = [of["trained"] for of in told.values() if of.get("trained")]
    assert [step for step in steps if step[0] == 0 or not step[1]] == []


def test_a_model_built_as_torchtitan_builds_one():
    """Blocks in a ``ModuleDict`` of a class of its own, by number, in a model between an embedding and a head."""
    class Named(nn.ModuleDict):
        pass

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embeddings = nn.Embedding(8, 16)
            self.layers = Named({str(at): Wide(16, 32) for at in range(4)})
            self.norm, self.output = nn.RMSNorm(16), nn.Linear(16, 8)

        def forward(self, tokens):
            x = self.tok_embeddings(tokens)
            for layer in self.layers.values():
                x = layer(x)
            return self.output(self.norm(x))

    model, tokens = Decoder(), torch.randint(8, (4, 16))
    with torchckpt.checkpoint_layers(model, budget="1GiB") as handle:
        assert handle.names == ("layers.0", "layers.1", "layers.2", "layers.3")
        for _ in range(2):
            gradients(model, tokens)
        assert len(handle.plan.kept) == 4
