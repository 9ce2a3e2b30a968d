"""Models: what the tests and the benchmarks of the graph level run, small by default and sizeable."""
from __future__ import annotations

from tests.models import image, plain, sequence
from tests.models.case import MODELS, Case

__all__ = ["BENCHMARK", "MODELS", "Case", "image", "plain", "sequence"]

BENCHMARK = {
    "mlp24": {"width": 128, "batch": 1100},
    "gpt6": {"width": 128, "heads": 4, "length": 128, "words": 65, "batch": 8},
    "gpt24": {"width": 128, "heads": 4, "length": 128, "words": 65, "batch": 8},
    "resnet20": {"width": 16, "side": 32, "batch": 32},
    "resnet110": {"width": 16, "side": 32, "batch": 32},
    "resnet200": {"width": 8, "side": 32, "batch": 64},
    "unet": {"levels": 4, "width": 16, "side": 64, "batch": 4},
    "lstm50": {"width": 128, "batch": 64},
    "moe": {"layers": 6, "width": 64, "experts": 8, "tokens": 512},
}
"""Sizes at which eager's peak on a CPU is tens to hundreds of megabytes."""
