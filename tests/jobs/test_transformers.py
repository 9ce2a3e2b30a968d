"""Configurations of transformers: the parameters of each type that is known are those of its real class."""
from __future__ import annotations

import json
import re

import pytest

from tests.slow import few
from torchckpt.errors import ArgumentError
from torchckpt.jobs import model_named, presets

TYPES = presets._TRANSFORMERS["types"]
SIZES = {"hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 2, "vocab_size": 160000}
MORE = {
    "bitnet": {"num_key_value_heads": 4},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"num_key_value_heads": 4, "head_dim": 64},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 4},
}
"""What the class of a type lacks, or what does not go with these sizes."""
LLAMA = {**SIZES, "model_type": "llama", "intermediate_size": 512}
LLAMA_4 = {**LLAMA, "model_type": "llama4_text"}
OPT = {**SIZES, "model_type": "opt", "ffn_dim": 96}
QWEN = {**LLAMA, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}


@pytest.fixture
def read(tmp_path):
    """The model of a configuration with these keys."""
    path = tmp_path / "config.json"

    def model(keys):
        path.write_text(json.dumps(keys))
        return model_named(str(path))

    return model


def config_of(model_type, **sizes):
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    kind = type(transformers.AutoConfig.for_model(model_type))
    return kind(**{kind.attribute_map.get(key, key): value for key, value in sizes.items()})


def parameters(config):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


@few(4)
@pytest.mark.parametrize("model_type", TYPES)
def test_parameters_are_those_of_the_class(model_type, tmp_path):
    """As the configuration is saved, and with nothing but the sizes that have no default."""
    more = MORE.get(model_type, {})
    config = config_of(model_type, **SIZES, **more)
    config.save_pretrained(tmp_path)
    expected = pytest.approx(parameters(config), rel=2e-3)
    path = tmp_path / "config.json"
    assert model_named(str(path)).parameters == expected
    named = {"model_type", *presets._TRANSFORMERS["keys"]["ffn"], *more}
    named |= {config.attribute_map.get(key, key) for key in SIZES}
    keys = {key: value for key, value in json.loads(path.read_text()).items() if key in named}
    path.write_text(json.dumps(keys))
    assert model_named(str(path)).parameters == expected


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),
        ("falcon", {"multi_query": False, "num_kv_heads": 8}),
        ("gpt_bigcode", {"multi_query": False}),
        ("gpt2", {"n_inner": 1000, "n_positions": 3000}),
        ("gemma", {"tie_word_embeddings": False, "head_dim": 128}),
        ("glm4_moe", {"first_k_dense_replace": 0, "n_shared_experts": 3, "n_routed_experts": 16}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 20480, "moe_intermediate_size": 2560, "num_experts": 8}),
        ("granitemoeshared", {"shared_intermediate_size": 22016}),
        ("opt", {"ffn_dim": 1024, "max_position_embeddings": 4096}),
        ("deepseek_v2", {"q_lora_rank": None, "kv_lora_rank": 256, "v_head_dim": 64, **MORE["deepseek_v2"]}),
        ("deepseek_v3", {"qk_nope_head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 2, **MORE["deepseek_v3"]}),
        ("llama4_text", {"num_local_experts": 4, "intermediate_size": 1024}),
    ],
)  # fmt: skip
def test_keys_that_change_the_sizes(model_type, keys, read):
    config = config_of(model_type, **SIZES, **keys)
    assert read(config.to_dict()).parameters == pytest.approx(parameters(config), rel=2e-3)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_layer_freq": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1, "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def test_the_published_configurations_of_latent_attention(read):
    """DeepSeek-V3 has 671 G parameters (arXiv:2412.19437), Kimi K2 1.04 T (arXiv:2507.20534)."""
    deepseek = read(DEEPSEEK_V3)
    assert deepseek.parameters == 671_026_404_352
    assert (deepseek.query_width, deepseek.output_width, deepseek.latent) == (128 * 192, 128 * 128, 1536 + 512 + 64)
    changed = {"num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840}
    kimi = read({**DEEPSEEK_V3, "model_type": "kimi_k2", **changed, "n_group": 1})
    assert kimi.parameters == pytest.approx(1.04e12, rel=0.02)


def test_keys_that_change_no_size(read):
    """Of SmolLM2's published configurations."""
    more = {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "is_llama_config": True}
    assert read({**LLAMA, **more}) == read(LLAMA)


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"model_type": "jamba"}, "none whose sizes are known\n  received: model_type='jamba'; the nearest are"),
        ({**LLAMA, "model_type": ["llama"]}, "the type of the model is none whose sizes are known"),
        ({**LLAMA, "num_experts": 8}, "is not understood, and may change its sizes\n  received: num_experts=8"),
        ({**LLAMA, "mamba_d_state": 16}, "is not understood, and may change its sizes\n  received: mamba_d_state=16"),
        ({**LLAMA, "kv_lora_rank": 512}, "is not understood, and may change its sizes\n  received: kv_lora_rank=512"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, "received: layer_types=["),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "the key of the model is not of whole numbers"),
        ({**LLAMA, "n_layer": 3}, "num_hidden_layers and n_layer of the model differ"),
        ({**SIZES, "model_type": "bloom", "n_inner": 96}, "received: n_inner=96"),
        ({**SIZES, "model_type": "gpt_neox", "intermediate_size": 96, "head_dim": 8}, "received: head_dim=8"),
        ({**QWEN, "mlp_only_layers": [1]}, "received: mlp_only_layers=[1]"),
        ({**QWEN, "decoder_sparse_step": 2}, "received: decoder_sparse_step=2"),
        ({**QWEN, "shared_expert_intermediate_size": 2000}, "is not as wide as several of its experts"),
        ({**LLAMA_4, "interleave_moe_layer_step": 2}, "received: interleave_moe_layer_step=2"),
        ({**LLAMA_4, "moe_layers": [0]}, "received: moe_layers=[0]"),
        ({**OPT, "word_embed_proj_dim": 512}, "received: word_embed_proj_dim=512"),
        ({**SIZES, "model_type": "gpt2", "add_cross_attention": True}, "received: add_cross_attention=True"),
        ({**SIZES, "model_type": "gpt2", "n_positions": None}, "positions of the model is not a whole number"),
        ({**SIZES, "model_type": "falcon", "multi_query": "no"}, "multi_query of the model is not true or false"),
        ({**SIZES, "model_type": "llama"}, "the file of the model lacks ffn"),
        ({**LLAMA, "num_attention_heads": 0}, "heads of the model is not a whole number"),
        ({**LLAMA, "model_type": "mixtral", "num_experts_per_tok": None}, "a model with experts lacks active"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_an_error(keys, wrong, read):
    with pytest.raises(ArgumentError, match=re.escape(wrong)):
        read(keys)
