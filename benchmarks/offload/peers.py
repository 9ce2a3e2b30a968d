"""Peers: other ways to have saved tensors on the host, as contexts around a forward.

``save_on_cpu`` is torch's. ``OffloadActivations`` is torchtune's and TRL's, from the installed packages, if there are
any. torchtune's names CUDA: where another device is, its source is read with that device's name in its place.
"""
from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

__all__ = ["PEERS", "Peer"]

Peer = Callable[[torch.nn.Module], AbstractContextManager[Any]]
"""Makes a context for a forward of a model."""


def of_torch(model: torch.nn.Module) -> AbstractContextManager[Any]:
    return save_on_cpu(pin_memory=True, device_type=torch.accelerator.current_accelerator().type)


def torchtune() -> Peer | None:
    """Its ``OffloadActivations``; None if it is not installed."""
    package = importlib.util.find_spec("torchtune")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "training" / "_activation_offloading.py"
    kind = torch.accelerator.current_accelerator().type
    source = path.read_text().replace("torch.cuda", f"torch.{kind}").replace('"cuda"', f'"{kind}"')
    offloading = _executed("torchtune_offloading", source)
    return lambda model: offloading.OffloadActivations()


def _executed(name: str, source: str) -> types.ModuleType:
    """``source`` as a module. What it imports of its own package, for types that no model here has, is left out."""
    stand_ins = {
        "torchao": {"__version__": "0"},
        "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {},
        "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
        "torchtune.utils": {"get_logger": lambda level: None},
    }
    before = {one: sys.modules.get(one) for one in stand_ins}
    for one, contents in stand_ins.items():
        sys.modules[one] = types.ModuleType(one)
        sys.modules[one].__dict__.update(contents)
    module = types.ModuleType(name)
    try:
        exec(compile(source, name, "exec"), module.__dict__)
    finally:
        for one, loaded in before.items():
            if loaded is None:
                del sys.modules[one]
            else:
                sys.modules[one] = loaded
    return module


def trl() -> Peer | None:
    """Its ``OffloadActivations``; None if it is not installed."""
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError:
        return None

    def around(model: torch.nn.Module) -> AbstractContextManager[Any]:
        context: Any = OffloadActivations()
        context.update_model_params(model)
        return context  # type: ignore[no-any-return]

    return around


PEERS: dict[str, Callable[[], Peer | None]] = {"save_on_cpu": lambda: of_torch, "torchtune": torchtune, "TRL": trl}
"""By name, what returns a peer, or None where it is not installed."""
