"""Models of other packages: which blocks are found, and whether steps within a budget have the plain gradients.

    python -m tests.layers.others timm

In a process of its own: timm wants torchvision, for which a stub may stand in, and that confuses other packages.
"""
from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torchckpt
from torchckpt.layers.apply import repeated

Case = tuple[str, Callable[[], nn.Module], "dict[str, Tensor] | None"]
"""A name, what makes the model, and the arguments of a step; None: it is not trained."""


def timm() -> Iterator[Case]:
    from benchmarks.peers.torchvision_stub import install

    install()
    import timm

    picture = torch.randn(8, 3, 96, 96)
    for name, options in {
        "test_vit": {}, "test_convnext": {}, "test_resnet": {}, "test_efficientnet": {}, "densenet121": None,
        "swin_tiny_patch4_window7_224": None, "maxvit_tiny_tf_224": None, "regnety_004": None,
    }.items():
        inputs = None if options is None else {"x": picture}
        yield name, lambda name=name, options=options: timm.create_model(name, **(options or {})), inputs


def diffusers() -> Iterator[Case]:
    import diffusers as of

    widths, time = (16, 32), torch.arange(32)
    image, words = torch.randn(32, 4, 16, 16), torch.randn(32, 3, 16)
    sizes = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "norm_num_groups": 4}
    of_unet = {**sizes, "block_out_channels": widths}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8}
    yield "UNet2DModel", lambda: of.UNet2DModel(
        **of_unet, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")
    ), {"sample": image, "timestep": time}
    yield "UNet2DConditionModel", lambda: of.UNet2DConditionModel(
        **of_unet, cross_attention_dim=16, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ), {"sample": image, "timestep": time, "encoder_hidden_states": words}
    yield "DiTTransformer2DModel", lambda: of.DiTTransformer2DModel(**heads, num_layers=4, sample_size=8), None
    yield "FluxTransformer2DModel", lambda: of.FluxTransformer2DModel(
        **heads, num_layers=2, num_single_layers=4, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4), in_channels=4,
    ), None


def torchtitan() -> Iterator[Case]:
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.qwen3 import qwen3_configs

    yield "llama3", lambda: llama3_configs["debugmodel"](attn_backend="flex").build(), None
    yield "qwen3", lambda: qwen3_configs["debugmodel"](attn_backend="flex").build(), None


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    outputs = model(**inputs)
    (outputs if isinstance(outputs, Tensor) else outputs.sample).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def trained(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, bool]:
    """How many calls are kept within 85 %, and whether each of three steps has the plain gradients."""
    plain = [gradients(copied, inputs) for copied in [copy.deepcopy(model)] for _ in range(3)]
    with torchckpt.checkpoint_layers(model, budget="85%") as handle:
        same = [all(map(torch.equal, gradients(model, inputs), expected)) for expected in plain]
    return len(handle.plan.kept) if handle.plan else 0, all(same)


def main(package: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for name, make, inputs in globals()[package]():
        with torch.device("meta" if inputs is None else "cpu"):
            model = make()
        try:
            told[name] = {"found": repeated(model), "trained": inputs and trained(model, inputs)}
        except torchckpt.ArgumentError as error:
            told[name] = {"refused": str(error)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
