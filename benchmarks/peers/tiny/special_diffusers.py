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
_JOY = {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 2, "text_dim": 24, "rope_dim_list": [4, 6, 6]}
_UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def _ids(rows: int, axes: int) -> Tensor:
    ids = torch.zeros(rows, axes)
    ids[:, -2], ids[:, -1] = torch.arange(rows) // 4, torch.arange(rows) % 4
    return ids


def _allegro_turns() -> list[Any]:
    """Rotary angles and places of its 48 patches: of frames, rows, columns."""
    turns = tuple((torch.ones(48, 8), torch.zeros(48, 8)) for _ in range(3))
    return [turns, tuple(torch.arange(48)[None] % 3 for _ in range(3))]


def _case(settings: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """Settings, and inputs: a shape stands for random numbers of it."""
    return {"settings": settings or {}, "inputs": inputs}


SPECIAL: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": _case(
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "in_channels": 16, "audio_acoustic_hidden_dim": 8,
         "encoder_hidden_size": 24},
        hidden_states=(2, 16, 8), context_latents=(2, 16, 8), timestep=_SHARES, timestep_r=_SHARES / 2,
        encoder_hidden_states=_TEXT,
    ),
    "AllegroTransformer3DModel": _case(
        {**_FLAT, "attention_head_dim": 24, "cross_attention_dim": 48, "sample_height": 8, "sample_width": 8},
        hidden_states=(2, 4, 3, 8, 8), encoder_hidden_states=_TEXT, timestep=_STEPS, encoder_attention_mask=_MASK,
        image_rotary_emb=_allegro_turns(),
    ),
    "BriaFibo2Transformer2DModel": _case(
        {"in_channels": 4, "dim": 32, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 24,
         "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "max_num_gist_tokens": 8,
         "gist_step": 2, "gist_min_text_len": 4, "gist_max_text_len": 16, "axes_dims": (4, 6, 6),
         "axes_lens": (64, 16, 16)},
        hidden_states=_PICTURE4, timestep=_SHARES, encoder_hidden_states=(2, 2, 6, 24), encoder_attention_mask=_MASK,
    ),
    "BriaFiboTransformer2DModel": _case(
        {"in_channels": 16, "joint_attention_dim": 24, "text_encoder_dim": 24}, hidden_states=(2, 16, 16),
        encoder_hidden_states=_TEXT, text_encoder_layers=[torch.ones(2, 6, 24)] * 4, timestep=_SHARES,
        img_ids=_ids(16, 3), txt_ids=torch.zeros(6, 3),
    ),
    "CosmosTransformer3DModel": _case(
        {"in_channels": 4, "out_channels": 4, "text_embed_dim": 24, "adaln_lora_dim": 8, "max_size": (4, 8, 8),
         "concat_padding_mask": False, "attention_head_dim": 24},
        hidden_states=(2, 4, 3, 8, 8), timestep=_SHARES, encoder_hidden_states=_TEXT, fps=8,
    ),
    "DreamLiteUNetModel": _case(
        {"block_out_channels": (16, 32, 32), "attention_head_dim": 2, "layers_per_block": 1, "norm_num_groups": 4,
         "cross_attention_dim": 24},
        sample=_PICTURE4, timestep=_STEPS, encoder_hidden_states=_TEXT,
    ),
    "HiDreamImageTransformer2DModel": _case(
        {"patch_size": 2, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "caption_channels": [24, 24],
         "text_emb_dim": 24, "axes_dims_rope": (4, 6, 6), "max_resolution": (8, 8), "llama_layers": [0, 1]},
        hidden_states=_PICTURE4, timesteps=_STEPS, encoder_hidden_states_t5=_TEXT,
        encoder_hidden_states_llama3=(2, 2, 6, 24), pooled_embeds=(2, 24),
    ),
    "HunyuanVideo15Transformer3DModel": _case(
        {"in_channels": 8, "out_channels": 8, "num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 24,
         "text_embed_2_dim": 24, "image_embed_dim": 24, "rope_axes_dim": (4, 6, 6)},
        hidden_states=(2, 8, 2, 4, 4), timestep=_SHARES, encoder_hidden_states=_TEXT, encoder_attention_mask=_MASK,
        encoder_hidden_states_2=_TEXT, encoder_attention_mask_2=_MASK, image_embeds=(2, 3, 24),
    ),
    "HunyuanVideoFramepackTransformer3DModel": _case(
        {"in_channels": 4, "out_channels": 4, "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 24,
         "pooled_projection_dim": 24, "rope_axes_dim": (4, 6, 6), "has_image_proj": True, "image_proj_dim": 24,
         "has_clean_x_embedder": True},
        hidden_states=(2, 4, 3, 8, 8), timestep=_STEPS, encoder_hidden_states=_TEXT, encoder_attention_mask=_MASK,
        pooled_projections=(2, 24), image_embeds=(2, 3, 24), indices_latents=torch.arange(3),
        guidance=torch.tensor([3.0, 3.0]), latents_clean=(2, 4, 2, 8, 8),
        indices_latents_clean=torch.arange(2), latents_history_2x=(2, 4, 2, 8, 8),
        indices_latents_history_2x=torch.arange(2), latents_history_4x=(2, 4, 4, 8, 8),
        indices_latents_history_4x=torch.arange(4),
    ),
    "Ideogram4Transformer2DModel": _case(
        {"in_channels": 8, "num_layers": 2, "intermediate_size": 64, "adaln_dim": 16, "llm_features_dim": 24,
         "mrope_section": (4, 2, 2)},
        hidden_states=(2, 10, 8), timestep=_SHARES, encoder_hidden_states=(2, 10, 24),
        position_ids=_ids(10, 3).long().repeat(2, 1, 1), segment_ids=torch.zeros(2, 10, dtype=torch.long),
        indicator=torch.tensor([3] * 4 + [2] * 6).repeat(2, 1),
    ),
    "JoyImageEditPlusTransformer3DModel": _case(
        _JOY, hidden_states=(2, 16, 4, 1, 2, 2), timestep=_STEPS, encoder_hidden_states=_TEXT,
        encoder_hidden_states_mask=_MASK.float(), shape_list=[[(1, 4, 4)]] * 2,
    ),
    "JoyImageEditTransformer3DModel": _case(
        _JOY, hidden_states=(2, 4, 1, 8, 8), timestep=_STEPS, encoder_hidden_states=_TEXT
    ),
    "Kandinsky6Transformer3DModel": _case(
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 24, "in_text_dim2": 24, "time_dim": 32,
         "model_dim": 32, "ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6),
         "in_audio_dim": 8, "out_audio_dim": 8},
        hidden_states=(2, 3, 8, 8, 9), encoder_hidden_states=_TEXT, pooled_projections=(2, 24), timestep=_STEPS,
        audio_hidden_states=(2, 6, 8),
    ),
    "Krea2Transformer2DModel": _case(
        {"in_channels": 16, "num_key_value_heads": 1, "intermediate_size": 64, "timestep_embed_dim": 32,
         "text_hidden_dim": 32, "num_text_layers": 2, "text_num_attention_heads": 2,
         "text_num_key_value_heads": 2, "text_intermediate_size": 64, "num_layerwise_text_blocks": 1,
         "num_refiner_text_blocks": 1},
        hidden_states=(2, 16, 16), encoder_hidden_states=(2, 6, 2, 32), timestep=_SHARES,
        position_ids=torch.cat([torch.zeros(6, 3), _ids(16, 3)]), encoder_attention_mask=_MASK,
    ),
    "LTX2VideoTransformer3DModel": _case(
        {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "audio_in_channels": 8,
         "audio_out_channels": 8, "audio_num_attention_heads": 2, "audio_attention_head_dim": 16,
         "audio_cross_attention_dim": 32, "caption_channels": 24},
        hidden_states=(2, 48, 8), audio_hidden_states=(2, 6, 8), encoder_hidden_states=_TEXT,
        audio_encoder_hidden_states=_TEXT, timestep=_SHARES, encoder_attention_mask=_MASK.long(), num_frames=3,
        height=4, width=4, audio_num_frames=6,
    ),
    "OmniGenTransformer2DModel": _case(
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
         "pad_token_id": 0, "vocab_size": 32, "pos_embed_max_size": 16, "time_step_dim": 32,
         "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
        hidden_states=_PICTURE4, timestep=_SHARES, input_ids=torch.arange(1, 13).reshape(2, 6),
        input_img_latents=[], input_image_sizes={}, attention_mask=torch.ones(2, 23, 23),
        position_ids=torch.arange(23).repeat(2, 1),
    ),
    "QwenImage21Transformer2DModel": _case(
        {"in_channels": 16, "context_in_dim": 24, "axes_dims_rope": (4, 6, 6)}, hidden_states=(2, 16, 16),
        encoder_hidden_states=_TEXT, timestep=_SHARES, img_shapes=[[(1, 4, 4)]] * 2,
        img_mask=torch.tensor([False] * 6 + [True] * 4).repeat(2, 1), encoder_hidden_states_mask=_MASK,
    ),
    "StableCascadeUNet": _case(
        {"in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 16,
         "block_out_channels": (16, 16), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1),
         "up_num_layers_per_block": (1, 1), "clip_text_pooled_in_channels": 24, "clip_seq": 2, "dropout": (0.1, 0.1)},
        sample=_PICTURE4, timestep_ratio=_SHARES, clip_text_pooled=(2, 1, 24),
    ),
    "WanAnimateTransformer3DModel": _case(
        {**_WAN, "in_channels": 12, "latent_channels": 4, "out_channels": 4, "image_dim": 24, "num_layers": 2,
         "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16,
         "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 16,
         "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2},
        hidden_states=(2, 12, 3, 8, 8), timestep=_STEPS, encoder_hidden_states=_TEXT,
        encoder_hidden_states_image=(2, 3, 24), pose_hidden_states=(2, 4, 2, 8, 8),
        face_pixel_values=(2, 3, 5, 16, 16),
    ),
    "ZImageTransformer2DModel": _case(
        {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
         "cap_feat_dim": 24, "axes_dims": [4, 6, 6], "axes_lens": [64, 16, 16]},
        x=[torch.ones(4, 1, 8, 8)] * 2, t=_SHARES, cap_feats=[torch.ones(6, 24)] * 2,
    ),
    "AnyFlowFARTransformer3DModel": _case(
        {**_WAN, "compressed_patch_size": (1, 4, 4), "full_chunk_limit": 1, "chunk_partition": (1, 2)},
        hidden_states=_FRAMES, timestep=(2, 3), r_timestep=(2, 3), encoder_hidden_states=_TEXT,
        chunk_partition=[1, 2],
    ),
    "Cosmos3OmniTransformer": _case(
        {"head_dim": 16, "hidden_size": 32, "intermediate_size": 64, "latent_channel": 4, "num_hidden_layers": 2,
         "num_key_value_heads": 1, "patch_latent_dim": 16, "vocab_size": 32, "rope_axes_dim": [4, 2, 2]},
        input_ids=torch.arange(6), text_indexes=torch.arange(6), position_ids=torch.arange(14).repeat(3, 1),
        und_len=6, sequence_length=14, vision_tokens=[torch.ones(1, 4, 2, 4, 4)], vision_token_shapes=[(2, 2, 2)],
        vision_sequence_indexes=torch.arange(6, 14), vision_mse_loss_indexes=torch.arange(6, 14),
        vision_timesteps=torch.full((8,), 3.0), vision_noisy_frame_indexes=[torch.arange(2)],
    ),
    "Kandinsky6SRTransformer3DModel": _case(
        {"in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 32, "model_dim": 32, "ff_dim": 64,
         "num_visual_blocks": 2, "axes_dims": (4, 6, 6), "nabla_window": (1, 1, 1)},
        hidden_states=(2, 2, 16, 16, 9), timestep=_STEPS,
    ),
    "MiniMaxH3Transformer3DModel": _case(
        {"attention_head_dim": 16, "hidden_size": 32, "ffn_dim": 64, "in_channels": 2, "audio_in_channels": 8,
         "text_dim": 24, "freq_dim": 32, "time_embed_hidden_dim": 32, "time_embed_dim": 16, "rope_freq_dim": 2},
        hidden_states=(2, 4, 8), audio_hidden_states=(2, 3, 8), encoder_hidden_states=(2, 5, 24), timestep=_SHARES,
        timestep_indices=torch.tensor([0] * 5 + [1] * 7), token_tags=torch.tensor([1] * 5 + [0] * 4 + [2] * 3),
        position_ids=torch.arange(12)[:, None].repeat(1, 3), text_indices=torch.arange(5),
        video_indices=torch.arange(5, 9), audio_indices=torch.arange(9, 12),
    ),
    "SanaWMTransformer3DModel": _case(
        {"in_channels": 4, "hidden_size": 32, "linear_head_dim": 16, "softmax_every_n": 2, "caption_channels": 24,
         "chunk_plucker_channels": 4, "chunk_plucker_post_attn_blocks": 2},
        hidden_states=(2, 4, 3, 8, 8), timestep=torch.ones(2, 1, 3), encoder_hidden_states=(2, 1, 6, 24), mask=_MASK,
        chunk_plucker=(2, 4, 3, 8, 8),
    ),
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
        hidden_states=(2, 8, 16), timestep=_SHARES, encoder_hidden_states=(2, 16, 24),
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
        sample=(2, 4, 3, 8, 8), timestep=_STEPS, encoder_hidden_states=(6, 6, 24),
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
