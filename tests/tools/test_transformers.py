"""transformers: models of the zoo, by ``checkpoint_layers`` and by the library's own switch, and its ``Trainer``."""
from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

import torchckpt
from tests.tools.steps import equal, trained
from torchckpt.errors import RecomputationError
from torchckpt.testing import count_recomputes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # those of transformers
TOKENS, STEPS = 8, 2
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


def gpt2(use_cache=False):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        use_cache=use_cache,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(use_cache=False):
    import transformers

    config = transformers.LlamaConfig(vocab_size=32, attention_dropout=0.1, use_cache=use_cache, **SMALL)
    return transformers.LlamaForCausalLM(config)


def bert(use_cache=False):
    import transformers

    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, use_cache=use_cache, **SMALL))


def t5(use_cache=False):
    import transformers

    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
        use_cache=use_cache,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit(use_cache=False):
    import transformers

    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = transformers.ViTConfig(image_size=8, patch_size=4, **dropout, **SMALL)
    return transformers.ViTForImageClassification(config)


MODELS = {
    "gpt2": (gpt2, "GPT2Block.forward", 2),
    "llama": (llama, "LlamaDecoderLayer.forward", 2),
    "bert": (bert, "BertLayer.forward", 2),
    "t5": (t5, "T5Block.forward", 4),
    "vit": (vit, "ViTLayer.forward", 2),
}


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


def batch_for(make):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (2, TOKENS), generator=generator)
    if make is vit:
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": torch.tensor([0, 1])}
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def steps_of(make, prepare, use_cache=False):
    torch.manual_seed(0)
    model = make(use_cache).train()
    prepare(model)
    return trained(model, lambda batch: model(**batch).loss, [batch_for(make)] * STEPS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_model(name, way):
    make, region, regions = MODELS[name]
    expected, none = steps_of(make, by_nothing)
    tensors, recomputes = steps_of(make, WAYS[way])
    assert none == {}
    assert equal(tensors, expected)
    assert recomputes == {region: regions * STEPS}


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_a_cache_that_the_layers_fill_is_an_error_that_says_so(make):
    with pytest.raises(RecomputationError, match=r"state that the function changes itself \(a counter, a cache\)"):
        steps_of(make, by_layers, use_cache=True)


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


def trained_by_trainer(folder, make, prepare=by_nothing, callbacks=(), **options):
    """Losses of all steps, parameters and the next random numbers, and the replays by region."""
    import transformers

    torch.manual_seed(0)
    model = make()
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
    tensors, recomputes = trained_by_trainer(tmp_path, gpt2)
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
    tensors, recomputes = trained_by_trainer(tmp_path, gpt2, prepare, callbacks, **options)
    assert equal(tensors, plain)
    assert recomputes == {"'GPT2Block.forward'": 2 * 4}
