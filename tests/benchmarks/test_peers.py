"""Other people's models, trained three ways. Two of timm's are, where it is installed; ours show what is compared."""
from __future__ import annotations

import importlib.util
import re

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from benchmarks.peers.bits import KINDS, WAYS, Left, differing, train
from tests.scripts import run, run_script

SCRIPT = "benchmarks/peers/timm_models.py"
HAS_TIMM = importlib.util.find_spec("timm") is not None
HAS_REMAT = importlib.util.find_spec("torch_remat") is not None


class Net(nn.Module):
    """Two layers in a region each, as the libraries write it."""

    def __init__(self, norm: type[nn.Module], is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), norm(4), nn.Dropout(0.2)) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


def trained(norm: type[nn.Module], way: str | None) -> Left:
    return train(lambda: (Net(norm, way is not None), torch.randn(8, 4)), WAYS[way] if way else None, steps=2)


@pytest.mark.parametrize(
    ("norm", "way", "differs"),
    [
        (nn.BatchNorm1d, "torch.utils.checkpoint", ["buffers", "predictions"]),
        (nn.BatchNorm1d, "torchckpt", []),
        (nn.LayerNorm, "torch.utils.checkpoint", []),
        (nn.LayerNorm, "torchckpt", []),
    ],
)
def test_statistics_move_twice_under_torchs_checkpointing_alone(
    norm: type[nn.Module], way: str, differs: list[str]
) -> None:
    plain, left = trained(norm, None), trained(norm, way)
    assert (plain.regions, left.regions) == (0, 4)
    assert differing(plain, left) == differs


def test_torchs_function_is_back_after_the_training() -> None:
    before = torch.utils.checkpoint.checkpoint
    trained(nn.LayerNorm, "torchckpt")
    assert torch.utils.checkpoint.checkpoint is before


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), False),
        (torch.tensor(0.0), torch.tensor(-0.0), True),
        (torch.tensor(True), torch.tensor(True), False),
        (None, None, False),
        (None, torch.zeros(1), True),
        (torch.ones(2), torch.ones(3), True),
    ],
)
def test_bits_are_compared(one: Tensor | None, other: Tensor | None, differ: bool) -> None:
    left, right = (Left({kind: [value] for kind in KINDS}, 0) for value in (one, other))
    assert differing(left, right) == (list(KINDS) if differ else [])


@pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed: pip install -e '.[peers]'")
def test_two_families_of_timm() -> None:
    done = run_script(SCRIPT, "--models", "test_byobnet", "test_vit")
    assert done.returncode == 0, done.stderr
    assert "| byobnet | test_byobnet | 8 | buffers, predictions | = |\n" in done.stdout
    assert "| vision_transformer | test_vit | 12 | = | = |\n" in done.stdout
    assert done.stdout.endswith(
        "torch.utils.checkpoint: 1 of 2 families differ from plain training\n"
        "torchckpt: 0 of 2 families differ from plain training\n"
    )


@pytest.mark.skipif(HAS_TIMM, reason="timm is installed")
def test_without_timm_the_error_names_the_extra() -> None:
    done = run_script(SCRIPT)
    assert done.returncode == 1
    assert done.stderr == (
        "benchmarks/peers/timm_models.py needs timm: No module named 'timm'\n  works: pip install -e '.[peers]'\n"
    )


def test_other_ways_beside_plain_training() -> None:
    done = run_script("benchmarks/peers/ways.py")
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.*) \|$", done.stdout, flags=re.MULTILINE))
    assert rows["torch.utils.checkpoint"] == rows["the same, selective"] == "= | buffers, predictions | 2"
    assert rows["torchckpt"] == "= | = | 1"
    assert rows["torch.compile, activation_memory_budget 0"].endswith(" | 1")
    if HAS_REMAT:
        assert rows["torch_remat, with a hook for random numbers"] == "= | buffers, predictions | 2"


def test_the_stub_has_what_timm_asks_of_torchvision() -> None:
    code = (
        "import sys; sys.modules.pop('torchvision', None)\n"
        "from benchmarks.peers.torchvision_stub import _Finder\n"
        "sys.meta_path.insert(0, _Finder())\n"
        "from torchvision.transforms.functional import InterpolationMode\n"
        "import torchvision.transforms.functional as F\n"
        "print(InterpolationMode.NEAREST, isinstance(F.resize, type))\n"
    )
    assert run("-c", code).stdout == "InterpolationMode.NEAREST True\n"
