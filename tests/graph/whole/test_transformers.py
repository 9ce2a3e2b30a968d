"""Models of transformers: their signatures, keywords, caches, tied weights, and the Trainer."""
from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers import assert_equal
from tests.slow import few
from torchckpt import graph
from torchckpt.errors import CaptureError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def gpt2(**options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=16, attention_dropout=0.1, **options,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(rows=4):
    return torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(1))


def stepped(call, model, **kwargs):
    """Outputs, gradients and random numbers of a step; dropout is on."""
    torch.manual_seed(5)
    model.zero_grad()
    outputs = call(**kwargs)
    outputs.loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return type(outputs), outputs.loss.detach(), outputs.logits.detach(), grads, torch.get_rng_state()


@few(1)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_step_has_the_bits_and_the_signature_of_the_model(make, traces):
    model = make(use_cache=False).train()
    step = graph.rematerialize(model, example_kwargs={"input_ids": tokens(), "labels": tokens()}, keep="memory")
    assert inspect.signature(step.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(step).forward) == inspect.signature(type(model).forward)
    assert inspect.signature(step) == inspect.signature(model)
    for kwargs in ({"labels": tokens(), "input_ids": tokens()}, {"input_ids": tokens(), "labels": tokens()}):
        assert_equal(stepped(step, model, **kwargs), stepped(model, model, **kwargs))
    assert len(traces) == 1


@pytest.mark.slow
def test_a_cache_is_refused_with_the_keyword_that_helps():
    model = gpt2()
    step = graph.rematerialize(model, keep="speed")
    match = r"(?s)returns a cache.*received: an output of .*DynamicCache.*works:    model\(\.\.\., use_cache=False\)"
    with pytest.raises(CaptureError, match=match):
        step(input_ids=tokens(), labels=tokens())
    step(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    with torch.no_grad():
        past = step(input_ids=tokens()).past_key_values
    with pytest.raises(CaptureError, match=r"(?s)takes a cache.*kwargs\['past_key_values'\] is a .*use_cache=False"):
        step(input_ids=tokens()[:, :1], past_key_values=past)


@pytest.mark.slow
def test_a_mask_of_four_dimensions_runs_one_kernel():
    """Of fewer heads of keys than of queries: without it, eager looks at values and takes another (docs/limits.md)."""
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=64, use_cache=False)
    torch.manual_seed(0)
    model, words = transformers.LlamaForCausalLM(config), torch.randint(64, (2, 64))
    mask = torch.ones(64, 64, dtype=torch.bool).tril().expand(2, 1, 64, 64)
    named = {"input_ids": words, "labels": words, "attention_mask": mask}
    step = graph.rematerialize(model, example_kwargs=named)
    assert_equal(stepped(step, model, **named), stepped(model, model, **named))


def test_tied_weights_are_saved_and_loaded(tmp_path):
    model, other = gpt2(use_cache=False), gpt2(use_cache=False)
    step = graph.rematerialize(model, keep="speed")
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    torch.save(step.state_dict(), tmp_path / "state.pt")
    loaded = graph.rematerialize(other).load_state_dict(torch.load(tmp_path / "state.pt"))
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    graph.rematerialize_(model, keep="speed")
    for saved in (step, model):
        saved.save_pretrained(tmp_path)
        read = type(model).from_pretrained(tmp_path)
        for loaded_model in (other, read):
            assert list(loaded_model.state_dict()) == list(model.state_dict())
            assert_equal(dict(loaded_model.state_dict()), dict(model.state_dict()))
            assert loaded_model.lm_head.weight is loaded_model.transformer.wte.weight


class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"input_ids": tokens()[place], "labels": tokens()[place], "unused": 0}


def trained(model, folder, **options):
    """Losses, parameters, and what is left for an evaluation."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=2, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_steps=1, seed=3, **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Data(), eval_dataset=Data())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return trainer, [losses, trainer.label_names, trainer.evaluate()["eval_loss"], dict(model.state_dict())]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param({"bf16": True}, marks=pytest.mark.slow)])
def test_trainer_trains_as_ever(tmp_path, options, capsys):
    _, expected = trained(gpt2(), tmp_path, **options)
    step = graph.rematerialize(gpt2(), keep="memory")
    assert_equal(trained(step, tmp_path, **options)[1], expected)
    model = gpt2()
    handle = graph.rematerialize_(model, keep="memory")
    trainer, losses = trained(model, tmp_path, **options)
    assert_equal(losses, expected)
    assert len(step.plans) == len(handle.plans) == 1
    trainer.save_model(str(tmp_path / "saved"))
    assert_equal(dict(gpt2().from_pretrained(tmp_path / "saved").state_dict()), expected[3])
