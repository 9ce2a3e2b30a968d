"""Sizes of models: parameters by hand and as published, files, and what is wrong with them."""
from __future__ import annotations

import json
import re

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.jobs import MODELS, Model, model, model_named


def test_parameters_by_hand():
    dense = Model("", layers=2, hidden=8, heads=2, kv_heads=1, ffn=32, vocab=100)
    attention = 8 * (8 + 4 + 4) + 8 * 8
    assert dense.parameters == 2 * (attention + 3 * 8 * 32 + 2 * 8) + 2 * 100 * 8 + 8
    plain = Model("", 2, 8, 2, 32, 100, gated=False, tied=True, positions=16)
    layer = 8 * 24 + 24 + 8 * 8 + 8 + 2 * 8 * 32 + 32 + 8 + 4 * 8
    assert plain.parameters == 2 * layer + (100 + 16) * 8 + 2 * 8


def test_experts_by_hand():
    model = Model("", 3, 8, 2, 32, 100, experts=4, active=2, shared=1, expert_ffn=16, dense_layers=1)
    attention, router, expert = 4 * 8 * 8 + 2 * 8, 8 * 4, 3 * 8 * 16
    assert model.parameters == 3 * attention + 3 * 8 * 32 + 2 * (router + 5 * expert) + 1600 + 8
    assert model.active_parameters == 3 * attention + 3 * 8 * 32 + 2 * (router + 3 * expert) + 800 + 8


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_those_that_are_published(model):
    assert model.parameters == pytest.approx(model.published, rel=2e-3)
    assert model.source


def test_flops_of_a_token():
    model = MODELS["llama3-8b"]
    assert model.flops_per_token(8192) == 6 * model.active_parameters + 12 * 32 * 4096 * 8192


def test_a_configuration_of_transformers(tmp_path):
    from transformers import LlamaConfig, MixtralConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 96, "vocab_size": 128}  # fmt: skip
    for config, experts in ((LlamaConfig(**sizes), 0), (MixtralConfig(**sizes, num_local_experts=4), 4)):
        config.save_pretrained(tmp_path)
        model = model_named(str(tmp_path / "config.json"))
        assert (model.layers, model.hidden, model.kv_heads, model.experts) == (2, 64, 2, experts)
        assert model.parameters == _parameters(config)


def _parameters(config):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_with_the_sizes_of_a_model(tmp_path, encoding):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"layers": 2, "hidden": 8, "heads": 2, "ffn": 32, "vocab": 100}), encoding=encoding)
    assert model_named(str(path)) == Model("own", 2, 8, 2, 32, 100)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{}", "the file of the model lacks layers, hidden, heads, ffn, vocab"),
        ("[1]", "the file of the model is not an object of sizes"),
        ("{", "cannot read the model: it is not JSON"),
        ('{"layers": 2, "hidden": 8, "heads": 2, "ffn": 32, "vocab": 9, "width": 8}', "has width, which no model has"),
        ("[" * 100_000, "cannot read the model: it is not JSON"),
        ('{"layers": 2, "hidden": 8, "heads": 0, "ffn": 32, "vocab": 9}', "heads of the model is not a whole number"),
    ],
)
def test_a_file_that_is_no_model(text, wrong, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=re.escape(wrong)):
        model_named(str(path))


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ArgumentError, match=r"(?s)the model is none of .*the nearest are llama3-70b.*llama3-70b"):
        model_named("lama3-70b")
    with pytest.raises(ArgumentError, match="cannot read the model: No such file"):
        model_named("nowhere.json")


SIZES = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 1000}
EXPERTS = {"experts": 8, "active": 2, "expert_ffn": 64}
ODD = (-1, 2.5, float("nan"), 10**400, "2", [], {}, 2**30)


@pytest.mark.parametrize("base", [SIZES, {**SIZES, **EXPERTS}], ids=["dense", "experts"])
@pytest.mark.parametrize("size", sorted(model._RANGES))
def test_a_size_is_a_whole_number_within_its_range(base, size):
    for value in (*ODD, None, True):
        with pytest.raises(ArgumentError, match=f"{size} of the model is not a whole number from . to "):
            Model("", **{**base, size: value})


@pytest.mark.parametrize(
    ("field", "rule"),
    [("name", "a text"), ("source", "a text"), ("gated", "true or false"), ("tied", "true or false"),
     ("biases", "true or false"), ("published", "a number")],
)  # fmt: skip
def test_other_fields_have_their_type(field, rule):
    for value in (*ODD[:1], ODD[2], [], {}):
        with pytest.raises(ArgumentError, match=f"{field} of the model is not {rule}"):
            Model(**{"name": "", **SIZES, field: value})
    assert Model("", **SIZES, biases=None, published=7e9, source="a page").published == 7e9


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ({"heads": 5}, "hidden of the model does not divide by its heads"),
        ({"kv_heads": 3}, "heads of the model do not divide by its heads of keys and values"),
        ({"active": 4}, "a model without experts has active"),
        ({**EXPERTS, "active": 0}, "a model with experts lacks active"),
        ({**EXPERTS, "expert_ffn": 0}, "a model with experts lacks expert_ffn"),
        ({**EXPERTS, "active": 9}, "a token meets more experts than the model has"),
        ({**EXPERTS, "dense_layers": 4}, "no layer of the model has experts"),
    ],
)
def test_sizes_go_together(sizes, wrong):
    with pytest.raises(ArgumentError, match=wrong) as caught:
        Model("", **{**SIZES, **sizes})
    name, _, value = str(caught.value).rpartition("works:    ")[2].partition("=")
    assert Model("", **{**SIZES, **sizes, name: int(value)}).parameters > 0


def test_all_faults_are_listed():
    with pytest.raises(ArgumentError, match=r"(?s)Model\(\): 3 faults.*layers of .*heads of .*gated of"):
        Model("", **{**SIZES, "layers": -1, "heads": True, "gated": "false"})
