"""transformers: models of the zoo, by ``checkpoint_layers`` and by the library's own switch, and its ``Trainer``."""
from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

import torchckpt
from tests.slow import few
from tests.tools.steps import equal, trained
from torchckpt.errors import RecomputationError
from torchckpt.testing import count_recomputes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # those of transformers
TOKENS, STEPS = 8, 2
WORDS = {"vocab_size": 32}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    why = "transformers before 4.53 has no common class of its layers"
    pytest.importorskip("transformers.modeling_layers", reason=why)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


class Family(NamedTuple):
    """Models of the zoo that have one configuration, and the layers of a small one."""

    config: str
    model: str
    options: dict[str, Any]
    layer: str
    layers: int = 2


MODELS = {
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {**WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
        "GPT2Block.forward",
    ),
    "llama": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**WORDS, **SMALL, "attention_dropout": 0.1},
        "LlamaDecoderLayer.forward",
    ),
    "bert": Family("BertConfig", "BertForMaskedLM", {**WORDS, **SMALL}, "BertLayer.forward"),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        "T5Block.forward",
        layers=4,
    ),
    "vit": Family(
        "ViTConfig",
        "ViTForImageClassification",
        {"image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, **SMALL},
        "ViTLayer.forward",
    ),
}


def build(name, use_cache=False):
    import transformers

    family = MODELS[name]
    config = getattr(transformers, family.config)(use_cache=use_cache, **family.options)
    return getattr(transformers, family.model)(config)


def by_layers(model):
    from transformers.modeling_layers import GradientCheckpointingLayer

    torchckpt.checkpoint_layers(model, GradientCheckpointingLayer)


def by_function(model):
    model._set_gradient_checkpointing(gradient_checkpointing_func=torchckpt.checkpoint)


def by_both(model):
    by_function(model)
    by_layers(model)


def by_nothing(model):
    pass


WAYS = {"checkpoint_layers": by_layers, "gradient_checkpointing_func": by_function, "both": by_both}


def batch_for(name):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (2, TOKENS), generator=generator)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": torch.tensor([0, 1])}
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def steps_of(name, prepare, use_cache=False):
    torch.manual_seed(0)
    model = build(name, use_cache).train()
    prepare(model)
    return trained(model, lambda batch: model(**batch).loss, [batch_for(name)] * STEPS)


@few(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_model(name, way):
    expected, none = steps_of(name, by_nothing)
    tensors, recomputes = steps_of(name, WAYS[way])
    assert none == {}
    assert equal(tensors, expected)
    from transformers import PreTrainedModel

    # Older ones call the function outside of the module's call, so there are two regions, one inside of the other.
    regions = 1 if way != "both" or hasattr(PreTrainedModel, "activation_checkpointing_enable") else 2
    assert recomputes == {MODELS[name].layer: MODELS[name].layers * STEPS * regions}


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_cache_that_the_layers_fill_is_an_error_that_says_so(name):
    with pytest.raises(RecomputationError, match=r"state that the function changes itself \(a counter, a cache\)"):
        steps_of(name, by_layers, use_cache=True)


# Trainer --------------------------------------------------------------------------------------------------------------


class Tokens(Dataset):
    """Eight rows of tokens."""

    def __init__(self):
        self.rows = torch.randint(32, (8, TOKENS), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


def ours():
    """Gives the layers our function, after the trainer has given them torch's."""
    import transformers

    class Ours(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model._set_gradient_checkpointing(gradient_checkpointing_func=torchckpt.checkpoint)

    return Ours()


def trained_by_trainer(folder, prepare=by_nothing, callbacks=(), **options):
    """Losses of all steps, parameters and the next random numbers, and the replays by region."""
    import transformers

    torch.manual_seed(0)
    model = build("gpt2")
    prepare(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to=[], seed=3,
        save_strategy="no", use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens(), callbacks=[make() for make in callbacks])
    trainer.remove_callback(transformers.PrinterCallback)
    with count_recomputes() as recomputes:
        trainer.train()
    losses = [torch.tensor([entry["loss"], entry["grad_norm"]]) for entry in trainer.state.log_history[:-1]]
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [*losses, *parameters, torch.rand(2)], dict(recomputes.by_region)


@pytest.fixture
def plain(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
    tensors, recomputes = trained_by_trainer(tmp_path)
    assert len(tensors) == 4 + 28 + 1
    assert recomputes == {}
    return tensors


@pytest.mark.parametrize(
    ("prepare", "callbacks", "options"),
    [
        (by_layers, (), {}),
        (by_nothing, (ours,), {"gradient_checkpointing": True}),
        (by_layers, (), {"gradient_checkpointing": True}),
    ],
    ids=["checkpoint_layers", "gradient_checkpointing_func", "checkpoint_layers beside the switch"],
)
def test_trainer(tmp_path, plain, prepare, callbacks, options):
    tensors, recomputes = trained_by_trainer(tmp_path, prepare, callbacks, **options)
    assert equal(tensors, plain)
    assert recomputes == {"'GPT2Block.forward'": 2 * 4}


def test_trainer_with_a_budget(tmp_path, plain):
    """The first step recomputes both layers, and the others nothing."""
    tensors, recomputes = trained_by_trainer(tmp_path, lambda model: torchckpt.checkpoint_layers(model, budget="1GiB"))
    assert equal(tensors, plain)
    assert recomputes == {"'GPT2Block.forward'": 2}
