"""Env: versions, devices and features, for the report of a bug. It works without torch, and with a torch that fails."""
from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchckpt.command.shared import Parser, add_command, say
from torchckpt.errors import named
from torchckpt.features import FEATURES, TESTED
from torchckpt.version import __version__

__all__ = ["add", "run"]

_EXTRAS = {"numpy": ("torch.distributed.pipelining fails", "distributed"), "ortools": ("no exact=True", "exact")}
"""Packages that something needs: what happens without each, and the extra that has it."""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    short = "show versions, devices and features, for the report of a bug"
    description = "Show versions and devices, which features are there, and of the others what is missing."
    add_command(commands, "env", short, description, "examples:\n  python -m torchckpt env\n")


def run(options: argparse.Namespace) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parts of torch that are imported to see what they have
        for name, text in _facts():
            say(f"{name:<10} {text}".rstrip())


def _facts() -> Iterator[tuple[str, str]]:
    yield "torchckpt", f"{__version__}, in {Path(__file__).parents[1]}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs"
    try:
        import torch
    except Exception as error:  # also of a library that torch loads
        yield "torch", f"none: {named(error)}"
        yield "no", "all but plans, schedules and errors: pip install 'torch>=2.11'"
        return
    yield "torch", f"{torch.__version__}; tested: {', '.join(TESTED)}"
    yield "devices", ", ".join(_devices(torch))
    for package, (without, extra) in _EXTRAS.items():
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, f"none: {without}: pip install 'torchckpt[{extra}]'"
    for feature in FEATURES:
        missing = feature.missing()
        yield "no" if missing else "yes", f"{feature.name}{f': {feature.without}' if missing else ''}"
        yield from (("", f"without {need}") for need in missing)


def _devices(torch: Any) -> Iterator[str]:
    yield "cpu"
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            name_of = getattr(torch.get_device_module(accelerator), "get_device_name", str)
            yield from (f"{accelerator.type}:{n} {name_of(n)}" for n in range(torch.accelerator.device_count()))
        dist = torch.distributed
        yield from filter(dist.is_backend_available, ("gloo", "nccl", "xccl", "mpi") if dist.is_available() else ())
    except Exception as error:  # such as of a driver
        yield f"and {named(error)}"
