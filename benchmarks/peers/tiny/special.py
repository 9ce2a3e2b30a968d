"""Special: what some families of transformers need beside the rules for names, by the type of the configuration."""
from __future__ import annotations

from typing import Any

import torch

__all__ = ["SPECIAL"]

_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "out_features": ["stage4"]}
_STAGES = {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}


def _resnet(**settings: Any) -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(**settings)


def _detr(config: str, stages: dict[str, Any] = _RESNET, **settings: Any) -> dict[str, Any]:
    """A family that sees by a backbone of its own."""
    told = {"use_timm_backbone": False, "use_pretrained_backbone": False, "num_queries": 6}
    return {config: {"backbone_config": lambda: _resnet(**stages), **told, **settings}}


def _series(config: Any, generator: torch.Generator) -> dict[str, Any]:
    length = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.rand(2, length, generator=generator),
        "past_time_features": torch.rand(2, length, config.num_time_features, generator=generator),
        "past_observed_mask": torch.ones(2, length),
        "future_values": torch.rand(2, config.prediction_length, generator=generator),
        "future_time_features": torch.rand(2, config.prediction_length, config.num_time_features, generator=generator),
    }


def _codes(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Rows of codes for each codebook."""
    books = getattr(config, "num_codebooks", None) or config.decoder.num_codebooks
    return {"input_ids": torch.randint(5, 90, (2 * books, 12), generator=generator)}


def _channels(config: Any, generator: torch.Generator) -> dict[str, Any]:
    shape = 2, 8, config.decoder_config.num_channels
    return {
        "input_ids": torch.randint(5, 90, (2, 12), generator=generator),
        "decoder_input_ids": torch.randint(5, 90, shape, generator=generator),
    }


def _pair(config: Any, generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 2, 1, 64, 64, generator=generator)}


def _images(config: Any, generator: torch.Generator) -> dict[str, Any]:
    edge = config.vision_config.image_size
    return {
        "input_ids": torch.randint(5, 90, (2, 12), generator=generator),
        "pixel_values": torch.randn(2, 1, 3, edge, edge, generator=generator),
        "image_attention_mask": torch.ones(2, 12, 1, dtype=torch.long),
    }


_SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 1}
_SWIN = {"embed_dim": 8, "depths": [2, 2, 2, 2], "num_heads": [1, 1, 2, 2], "image_size": 64, "window_size": 2}
_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}

SPECIAL: dict[str, dict[str, Any]] = {
    "audio_spectrogram_transformer": {"audio-spectrogram-transformer": {"max_length": 64}},
    "autoformer": {"autoformer": _SERIES, "inputs": _series},
    "conditional_detr": _detr("conditional_detr"),
    "deepseek_v2": {"deepseek_v2": {**_MOE, "first_k_dense_replace": 1}},
    "deformable_detr": _detr("deformable_detr", _STAGES, num_feature_levels=3),
    "detr": _detr("detr"),
    "diffllama": {"diffllama": {"attention_dropout": 0.0}},
    "dots1": {"dots1": {**_MOE, "first_k_dense_replace": 1, "moe_intermediate_size": 32}},
    "esm": {"esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 32}},
    "gpt_neo": {"gpt_neo": {"attention_types": [[["global", "local"], 1]]}},
    "dia": {"inputs": _channels},
    "decision_transformer": {"decision_transformer": {"vocab_size": 128}},
    "donut": {"donut-swin": {**_SWIN, "image_size": [64, 64]}},
    "efficientloftr": {"inputs": _pair},
    "esmc": {"esmc": {"vocab_size": 128}},
    "falcon_h1": {"falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16}},
    "hiera": {"hiera": {"embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 2, 1], "num_heads": [1, 1, 2, 2]}},
    "idefics": {"inputs": _images},
    "mobilevitv2": {"mobilevitv2": {"image_size": 128}},
    "musicgen": {"class": "MusicgenForCausalLM", "inputs": _codes},
    "musicgen_melody": {"class": "MusicgenMelodyForCausalLM", "inputs": _codes},
    "informer": {"informer": _SERIES, "inputs": _series},
    "vits": {"vits": {"vocab_size": 128}},
    "whisper": {"whisper": {"max_source_positions": 16}},
    "pvt_v2": {"pvt_v2": {"num_attention_heads": [1, 1, 2, 2], "hidden_sizes": [8, 8, 16, 16]}},
    "swin": {"swin": _SWIN},
    "swin2sr": {"swin2sr": {**_SWIN, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "image_size": 16}},
    "swinv2": {"swinv2": _SWIN},
    "time_series_transformer": {"time_series_transformer": _SERIES, "inputs": _series},
}
