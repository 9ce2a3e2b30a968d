"""timm: one model, the smallest, of each module of timm 1.0.31 that has gradient checkpointing.

Where torchvision is not installed, a stub stands in for it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.peers.case import Case
from benchmarks.peers.libraries import Library
from benchmarks.peers.torchvision_stub import install

__all__ = ["library"]

MODELS = [
    "beit_base_patch16_224", "halonet_h1", "test_byobnet", "cait_xxs24_224", "convmixer_768_32", "test_convnext",
    "cpubone_nano", "csatv2", "cspnext_tiny", "davit_tiny", "deepseek_vit_412m", "deit_tiny_patch16_224",
    "densenet121", "dpn48b", "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "test_efficientnet",
    "efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "vit_tiny_patch16_dinov3_qkvb", "fasternet_t0",
    "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "gemma4_vit_167m", "ghostnet_050", "hardcorenas_b",
    "hgnetv2_b0", "hiera_tiny_224", "sam2_hiera_tiny", "iformer_t", "inception_next_atto", "lcnetv2_small",
    "levit_128s", "lowformer_b0", "test_mambaout", "test_coatnet", "poolformerv2_s12", "gmlp_ti16_224",
    "mobilenetv3_small_050", "mobilenetv5_base", "mobilevit_xxs", "mvitv2_tiny",
    "naflexvit_base_patch16_parfac_gap", "nest_tiny", "nextvit_small", "test_nfnet", "pvt_v2_b0", "qwen3_vit_88m",
    "rdnet_tiny", "regnetx_002", "repghostnet_050", "repvit_m1", "res2next50", "resnest14d", "test_resnet",
    "resnetv2_18", "rexnet_100", "shvit_s1", "skresnet18", "starnet_s050", "swiftformer_xs",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224", "tiny_vit_5m_224",
    "tnt_s_legacy_patch16_224", "tresnet_m", "visformer_tiny", "test_vit", "vit_tiny_r_s16_p8_224",
    "test_vit_relpos", "samvit_base_patch16_224", "vitamin_small_224", "volo_d1_224", "ese_vovnet19b_slim_dw",
    "xception41p", "xcit_nano_12_p8_224",
]
SMALLER: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 2},
    "cait_xxs24_224": {"depth": 2},
    "deepseek_vit_412m": {"depth": 2, "embed_dim": 128},
    "gemma4_vit_167m": {"depth": 2},
    "naflexvit_base_patch16_parfac_gap": {"depth": 2},
    "qwen3_vit_88m": {"depth": 2},
    "samvit_base_patch16_224": {"depth": 2},
}
"""Models that are large: two layers of them."""
_EDGE = 96
"""Pixels along an edge of a picture, for models that take more than one size."""
_RATES = ({"drop_rate": 0.1, "drop_path_rate": 0.1}, {"drop_rate": 0.1}, {})
"""Dropout and stochastic depth: as much as the model's constructor takes."""


def library() -> Library:
    install()
    import timm

    return Library("timm", timm.__version__, lambda: [*_names()], case)


def _names() -> dict[str, str]:
    """The module of each model, and its name."""
    import timm

    return {timm.models.model_entrypoint(name).__module__.rpartition(".")[2]: name for name in MODELS}


def case(family: str) -> Case:
    name = _names()[family]
    return Case(name, lambda: built(name), switch)


def built(name: str) -> tuple[nn.Module, Tensor]:
    """The model and a batch of two pictures."""
    model = _made(name)
    settings = model.default_cfg
    least = settings.get("min_input_size") or (3, _EDGE, _EDGE)
    edge = settings["input_size"][-1] if settings.get("fixed_input_size") else least[-1]
    return model, torch.randn(2, 3, edge, edge)


def _made(name: str) -> Any:
    import timm

    for rates in _RATES:
        try:
            return timm.create_model(name, num_classes=10, **rates, **SMALLER.get(name, {}))
        except TypeError as error:
            refused = error
    raise refused


@contextmanager
def switch(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """timm's switch takes no function: it calls torch's, in whose place ``function`` stands."""
    model.set_grad_checkpointing(True)
    with mock.patch.object(torch.utils.checkpoint, "checkpoint", lambda *args, **named: function(*args, **named)):
        yield
