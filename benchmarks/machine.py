"""Machine: a description of the machine that a benchmark ran on."""
from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["machine", "processor"]


def machine() -> dict[str, str]:
    return {
        "processor": processor(),
        "cores": str(len(_models())),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    return next(iter(_models()), platform.processor())


def _models() -> list[str]:
    """The model name of each core, where Linux reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
