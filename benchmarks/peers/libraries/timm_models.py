"""Which of timm's models train as without checkpointing, to the bit, under torch.utils.checkpoint and under torchckpt?

    python benchmarks/peers/timm_models.py [--models NAME ...] [--steps 2]     # needs timm: pip install -e '.[peers]'

One model, the smallest, of each module of timm 1.0.31 that has gradient checkpointing. Where torchvision is not
installed, a stub stands in for it.
"""
from __future__ import annotations

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.peers.bits import WAYS, differing, train
from benchmarks.peers.torchvision_stub import install

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


class Row(NamedTuple):
    """The family is timm's module. For each way: regions in all steps, and what differs from plain training."""

    family: str
    model: str
    found: dict[str, tuple[int, list[str]]]

    def __str__(self) -> str:
        cells = [", ".join(differs) or "=" for _, differs in self.found.values()]
        regions = max(regions for regions, _ in self.found.values())
        return f"| {self.family} | {self.model} | {regions} | {' | '.join(cells)} |"


def compared(timm: Any, name: str, steps: int) -> Row:
    plain = train(partial(built, timm, name, False), None, steps)
    found = {}
    for way, function in WAYS.items():
        left = train(partial(built, timm, name, True), function, steps)
        found[way] = (left.regions, differing(plain, left))
    return Row(timm.models.model_entrypoint(name).__module__.rpartition(".")[2], name, found)


def built(timm: Any, name: str, is_checkpointed: bool) -> tuple[nn.Module, Tensor]:
    """The model and a batch of two pictures."""
    model = _made(timm, name)
    model.set_grad_checkpointing(is_checkpointed)
    settings = model.default_cfg
    least = settings.get("min_input_size") or (3, _EDGE, _EDGE)
    edge = settings["input_size"][-1] if settings.get("fixed_input_size") else least[-1]
    return model, torch.randn(2, 3, edge, edge)


def _made(timm: Any, name: str) -> nn.Module:
    for rates in _RATES:
        try:
            return timm.create_model(name, num_classes=10, **rates, **SMALLER.get(name, {}))
        except TypeError as error:
            refused = error
    raise refused


def imported() -> Any:
    install()
    try:
        import timm
    except ImportError as error:
        sys.exit(f"benchmarks/peers/timm_models.py needs timm: {error}\n  works: pip install -e '.[peers]'")
    return timm


def show(rows: list[Row]) -> bool:
    """Print the sums; return whether torchckpt equals plain training everywhere."""
    other = {way: sum(bool(row.found[way][1]) for row in rows) for way in WAYS}
    for way, count in other.items():
        print(f"{way}: {count} of {len(rows)} families differ from plain training")
    return other["torchckpt"] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="default: one a family")
    parser.add_argument("--steps", type=int, default=2, help="training steps of each (default: 2)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    timm = imported()
    print(f"timm {timm.__version__}, {', '.join(machine().values())}\n")
    print(f"| family | model | regions | {' | '.join(WAYS)} |\n|---|---|---|{'---|' * len(WAYS)}")
    rows = []
    for name in options.models:
        rows.append(compared(timm, name, options.steps))
        print(rows[-1], flush=True)
    print()
    sys.exit(not show(rows))


if __name__ == "__main__":
    main()
