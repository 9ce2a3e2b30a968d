"""Special: what models of diffusers need beside the rules for names: settings, and the shapes of what they take."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["SPECIAL"]

_IN_SIZE, _TEXT = 32, (2, 6, 24)
_PICTURE4, _PICTURE16, _FILM, _FRAMES = (2, 4, 8, 8), (2, 16, 8, 8), (2, 16, 3, 8, 8), (2, 3, 16, 8, 8)
_STEPS, _SHARES = torch.tensor([3, 7]), torch.tensor([0.3, 0.7])
_SIZES = torch.tensor([[8.0, 8.0], [8.0, 8.0]])
_MASK = torch.ones(2, 6, dtype=torch.bool)
_FLAT = {"cross_attention_dim": _IN_SIZE, "caption_channels": 24}
_CROSS = {**_FLAT, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16}
_WAN = {"text_dim": 24, "freq_dim": 32, "ffn_dim": 64, "attention_head_dim": 24}
_VIEWS = {"original_size": _SIZES, "target_size": _SIZES, "crop_coords": torch.zeros(2, 2)}
_COG = {"sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 6, "time_embed_dim": 32}
_UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def _ids(rows: int, axes: int) -> Tensor:
    ids = torch.zeros(rows, axes)
    ids[:, -2], ids[:, -1] = torch.arange(rows) // 4, torch.arange(rows) % 4
    return ids


def _case(settings: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """Settings, and inputs: a shape stands for random numbers of it."""
    return {"settings": settings or {}, "inputs": inputs}


SPECIAL: dict[str, dict[str, Any]] = {
    "AuraFlowTransformer2DModel": _case(
        {"num_mmdit_layers": 2, "num_single_dit_layers": 2, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        hidden_states=_PICTURE4, encoder_hidden_states=_TEXT, timestep=_SHARES,
    ),
    "CogVideoXTransformer3DModel": _case(_COG, hidden_states=_FRAMES, encoder_hidden_states=_TEXT, timestep=_STEPS),
    "ConsisIDTransformer3DModel": _case(_COG, hidden_states=_FRAMES, encoder_hidden_states=_TEXT, timestep=_STEPS),
    "DiTTransformer2DModel": _case(
        {"num_embeds_ada_norm": 16}, hidden_states=_PICTURE4, timestep=_STEPS, class_labels=_STEPS
    ),
    "LatteTransformer3DModel": _case(
        {"in_channels": 4, "out_channels": 8, "caption_channels": 24, "cross_attention_dim": 32, "patch_size": 2,
         "norm_type": "ada_norm_single", "video_length": 3, "num_layers": 2, "norm_elementwise_affine": False},
        hidden_states=(2, 4, 3, 8, 8), encoder_hidden_states=_TEXT, timestep=_STEPS,
    ),
    "PixArtTransformer2DModel": _case(
        {**_FLAT, "use_additional_conditions": False}, hidden_states=_PICTURE4, encoder_hidden_states=_TEXT,
        timestep=_STEPS, added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ),
    "SanaTransformer2DModel": _case(
        _CROSS, hidden_states=(2, 32, 8, 8), encoder_hidden_states=_TEXT, timestep=_SHARES
    ),
    "SanaVideoTransformer3DModel": _case(
        {**_CROSS, "attention_head_dim": 24, "num_cross_attention_heads": 2, "cross_attention_head_dim": 24,
         "cross_attention_dim": 48},
        hidden_states=_FILM, encoder_hidden_states=_TEXT, timestep=_STEPS,
    ),
    "StableAudioDiTModel": _case(
        {"cross_attention_dim": 24, "cross_attention_input_dim": 24, "global_states_input_dim": 24, "sample_size": 16,
         "num_key_value_attention_heads": 2},
        hidden_states=(2, 64, 16), timestep=_SHARES, encoder_hidden_states=_TEXT, global_hidden_states=(2, 1, 24),
    ),
    "Transformer2DModel": _case(
        {"in_channels": 8, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 24},
        hidden_states=(2, 8, 8, 8), encoder_hidden_states=_TEXT,
    ),
    "DreamLiteTransformer2DModel": _case(
        {"in_channels": 8, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 24},
        hidden_states=(2, 8, 8, 8), encoder_hidden_states=_TEXT,
    ),
    "AnyFlowTransformer3DModel": _case(
        _WAN, hidden_states=_FRAMES, timestep=(2, 3), r_timestep=(2, 3), encoder_hidden_states=_TEXT
    ),
    "ChromaTransformer2DModel": _case(
        {"approximator_hidden_dim": 32, "approximator_layers": 1}, hidden_states=(2, 16, 64), timestep=_SHARES,
        encoder_hidden_states=_TEXT, img_ids=_ids(16, 3), txt_ids=torch.zeros(6, 3),
        attention_mask=torch.ones(2, 22, dtype=torch.bool),
    ),
    "CogView3PlusTransformer2DModel": _case(
        {"pos_embed_max_size": 16, "time_embed_dim": 32, "condition_dim": 16}, hidden_states=_PICTURE16,
        encoder_hidden_states=_TEXT, timestep=_STEPS, **_VIEWS,
    ),
    "CogView4Transformer2DModel": _case(
        {"pos_embed_max_size": 16, "time_embed_dim": 32, "condition_dim": 16, "rope_axes_dim": (16, 16)},
        hidden_states=_PICTURE16, encoder_hidden_states=_TEXT, timestep=_STEPS, **_VIEWS,
    ),
    "EasyAnimateTransformer3DModel": _case(
        {"in_channels": 16, "out_channels": 16, "patch_size": 2, "mmdit_layers": 2, "time_embed_dim": 32,
         "sample_width": 8, "sample_height": 8},
        hidden_states=_FILM, timestep=_STEPS, encoder_hidden_states=_TEXT,
    ),
    "ErnieImageTransformer2DModel": _case(
        {"hidden_size": 32, "ffn_hidden_size": 64, "in_channels": 8, "out_channels": 8, "text_in_dim": 24,
         "rope_axes_dim": (4, 6, 6)},
        hidden_states=(2, 8, 8, 8), timestep=_STEPS, text_bth=_TEXT, text_lens=torch.tensor([6, 6]),
    ),
    "Flux2Transformer2DModel": _case(
        {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32, "in_channels": 16},
        hidden_states=(2, 16, 16), encoder_hidden_states=_TEXT, timestep=_SHARES, img_ids=_ids(16, 4),
        txt_ids=torch.zeros(6, 4), guidance=torch.tensor([3.0, 3.0]),
    ),
    "Flux3Transformer2DModel": _case(
        {"axes_dims_rope": (4, 4, 4, 4), "timestep_channels": 32, "in_channels": 16, "cond_in_channels": 16},
        hidden_states=(2, 16, 16), encoder_hidden_states=_TEXT, timestep=_SHARES, img_ids=_ids(16, 4),
        txt_ids=torch.zeros(6, 4),
    ),
    "GlmImageTransformer2DModel": _case(
        {"time_embed_dim": 32, "condition_dim": 16, "prior_vq_quantizer_codebook_size": 32},
        hidden_states=_PICTURE16, encoder_hidden_states=_TEXT, prior_token_id=torch.arange(32).reshape(2, 16),
        prior_token_drop=torch.zeros(2, 16, dtype=torch.bool), timestep=_STEPS, target_size=_SIZES,
        crop_coords=torch.zeros(2, 2),
    ),
    "HeliosTransformer3DModel": _case(
        {**_WAN, "rope_dim": (8, 8, 8)}, hidden_states=_FILM, timestep=_STEPS, encoder_hidden_states=_TEXT
    ),
    "HunyuanVideoTransformer3DModel": _case(
        {"rope_axes_dim": (4, 6, 6)}, hidden_states=_FILM, timestep=_STEPS, encoder_hidden_states=_TEXT,
        encoder_attention_mask=_MASK, pooled_projections=(2, 24), guidance=torch.tensor([3.0, 3.0]),
    ),
    "HunyuanImageTransformer2DModel": _case(
        {"rope_axes_dim": (8, 8), "patch_size": (1, 1), "in_channels": 16, "out_channels": 16},
        hidden_states=_PICTURE16, timestep=_SHARES, encoder_hidden_states=_TEXT, encoder_attention_mask=_MASK,
    ),
    "Kandinsky5Transformer3DModel": _case(
        {"in_visual_dim": 4, "in_text_dim": 24, "in_text_dim2": 24, "time_dim": 32, "model_dim": 32, "ff_dim": 64,
         "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6), "out_visual_dim": 4},
        hidden_states=(2, 3, 8, 8, 4), encoder_hidden_states=_TEXT, timestep=_STEPS, pooled_projections=(2, 24),
        visual_rope_pos=[torch.arange(3), torch.arange(4), torch.arange(4)], text_rope_pos=torch.arange(6),
    ),
    "LongCatImageTransformer2DModel": _case(
        {}, hidden_states=(2, 16, 64), encoder_hidden_states=_TEXT, timestep=_SHARES, img_ids=_ids(16, 3),
        txt_ids=torch.zeros(6, 3),
    ),
    "LTXVideoTransformer3DModel": _case(
        {**_FLAT, "in_channels": 16, "out_channels": 16}, hidden_states=(2, 48, 16), encoder_hidden_states=_TEXT,
        timestep=_STEPS, encoder_attention_mask=_MASK.long(), num_frames=3, height=4, width=4,
    ),
    "Lumina2Transformer2DModel": _case(
        {"hidden_size": 32, "num_kv_heads": 1, "axes_dim_rope": (4, 6, 6), "axes_lens": (32, 16, 16),
         "multiple_of": 16, "num_refiner_layers": 1},
        hidden_states=_PICTURE16, timestep=_SHARES, encoder_hidden_states=_TEXT, encoder_attention_mask=_MASK,
    ),
    "MiniMaxMusic3Transformer1DModel": _case(
        {"in_channels": 8, "condition_dim": 24, "ff_inner_dim": 64, "rotary_dim": 8, "fourier_embedding_dim": 32},
        hidden_states=(2, 16, 8), timestep=_SHARES, encoder_hidden_states=(2, 16, 24),
    ),
    "MochiTransformer3DModel": _case(
        {"time_embed_dim": 32, "pooled_projection_dim": 32}, hidden_states=(2, 12, 3, 8, 8),
        encoder_hidden_states=_TEXT, timestep=_STEPS, encoder_attention_mask=_MASK,
    ),
    "MotifVideoTransformer3DModel": _case(
        {"rope_axes_dim": (4, 6, 6)}, hidden_states=(2, 33, 3, 8, 8), timestep=_STEPS, encoder_hidden_states=_TEXT,
        encoder_attention_mask=_MASK,
    ),
    "NucleusMoEImageTransformer2DModel": _case(
        {"num_experts": 4, "moe_intermediate_dim": 32, "num_layers": 4}, hidden_states=(2, 16, 64),
        encoder_hidden_states=_TEXT, timestep=_SHARES, img_shapes=[[(1, 4, 4)]] * 2,
    ),
    "OvisImageTransformer2DModel": _case(
        {}, hidden_states=(2, 16, 64), encoder_hidden_states=_TEXT, timestep=_SHARES, img_ids=_ids(16, 3),
        txt_ids=torch.zeros(6, 3),
    ),
    "PRXTransformer2DModel": _case(
        {"context_in_dim": 24, "hidden_size": 32, "depth": 2, "axes_dim": [8, 8], "bottleneck_size": 16},
        hidden_states=_PICTURE16, timestep=_SHARES, encoder_hidden_states=_TEXT,
    ),
    "QwenImageTransformer2DModel": _case(
        {}, hidden_states=(2, 16, 64), encoder_hidden_states=_TEXT, encoder_hidden_states_mask=_MASK,
        timestep=_SHARES, img_shapes=[[(1, 4, 4)]] * 2,
    ),
    "SD3Transformer2DModel": _case(
        {"caption_projection_dim": 32, "pos_embed_max_size": 16}, hidden_states=_PICTURE16,
        encoder_hidden_states=_TEXT, pooled_projections=(2, 24), timestep=_STEPS,
    ),
    "SkyReelsV2Transformer3DModel": _case(_WAN, hidden_states=_FILM, timestep=_STEPS, encoder_hidden_states=_TEXT),
    "StableAudio3DiTModel": _case(
        {"io_channels": 16, "embed_dim": 32, "depth": 2, "cond_token_dim": 24, "global_cond_dim": 24,
         "local_add_cond_dim": 9, "timestep_features_dim": 32, "num_memory_tokens": 4},
        hidden_states=(2, 16, 16), timestep=_SHARES, encoder_hidden_states=_TEXT, global_hidden_states=(2, 24),
    ),
    "WanTransformer3DModel": _case(_WAN, hidden_states=_FILM, timestep=_STEPS, encoder_hidden_states=_TEXT),
    "WanVACETransformer3DModel": _case(
        {**_WAN, "vace_layers": [0, 1]}, hidden_states=_FILM, timestep=_STEPS, encoder_hidden_states=_TEXT,
        control_hidden_states=(2, 96, 3, 8, 8), control_hidden_states_scale=torch.ones(2),
    ),
    "UNet2DConditionModel": _case(
        {**_UNET, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types":
         ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 24, "attention_head_dim": 2},
        sample=_PICTURE4, timestep=_STEPS, encoder_hidden_states=_TEXT,
    ),
    "UNet2DModel": _case(
        {**_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types":
         ("AttnUpBlock2D", "UpBlock2D")},
        sample=(2, 3, 8, 8), timestep=_STEPS,
    ),
    "UNetMotionModel": _case(
        {**_UNET, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "up_block_types":
         ("UpBlockMotion", "CrossAttnUpBlockMotion"), "cross_attention_dim": 24, "motion_num_attention_heads": 2},
        sample=(2, 4, 3, 8, 8), timestep=_STEPS, encoder_hidden_states=_TEXT,
    ),
    "UNetSpatioTemporalConditionModel": _case(
        {"block_out_channels": (32, 32), "layers_per_block": 1, "num_attention_heads": (2, 2), "num_frames": 3,
         "cross_attention_dim": 24, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24,
         "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")},
        sample=(2, 3, 8, 8, 8), timestep=_STEPS, encoder_hidden_states=(2, 1, 24), added_time_ids=(2, 3),
    ),
    "UVit2DModel": _case(
        {"hidden_size": 32, "cond_embed_dim": 24, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40,
         "encoder_hidden_size": 24, "vocab_size": 34, "codebook_size": 32, "in_channels": 32,
         "block_out_channels": 32, "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 2,
         "intermediate_size": 64, "sample_size": 8},
        input_ids=torch.arange(32).repeat(4).reshape(2, 8, 8), encoder_hidden_states=_TEXT, pooled_text_emb=(2, 24),
        micro_conds=(2, 5),
    ),
}  # fmt: skip
