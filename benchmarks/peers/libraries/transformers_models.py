"""transformers: one model of each family that has gradient checkpointing, small by its own configuration class."""
from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.peers.bits import seed
from benchmarks.peers.case import Case
from benchmarks.peers.libraries import Library
from benchmarks.peers.tiny.configuration import small
from benchmarks.peers.tiny.inputs import fitting
from benchmarks.peers.tiny.settings import Scale
from benchmarks.peers.tiny.special import SPECIAL

__all__ = ["library"]

_SCALES = (Scale(32, 8), Scale(16, 16), Scale(8, 32), Scale(32, 16), Scale(64, 8))
_MAPPINGS = (
    "MODEL", "MODEL_FOR_PRETRAINING", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_BACKBONE", "MODEL_FOR_DEPTH_ESTIMATION", "MODEL_FOR_OBJECT_DETECTION",
)  # fmt: skip
"""Where a family's models are looked for: the plainest first."""


def library() -> Library:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    importlib.import_module("transformers.models.llama.modeling_llama")  # what most need is imported once
    importlib.import_module("transformers.models.auto.modeling_auto")
    return Library("transformers", transformers.__version__, families, case)


def families() -> list[str]:
    """The folders with a model that supports gradient checkpointing."""
    import transformers.models

    root = Path(transformers.models.__path__[0])
    return [folder.name for folder in sorted(root.iterdir()) if _supports(folder)]


def _supports(folder: Path) -> bool:
    texts = [file.read_text() for file in folder.glob("modeling_*.py")]
    return any("supports_gradient_checkpointing = True" in text for text in texts)


def case(family: str) -> Case:
    reasons: list[str] = []
    for cls in classes(family):
        for scale in _SCALES:
            try:
                model = made(cls, scale, family)
                inputs = fitting(model, SPECIAL.get(family, {}).get("inputs"), reasons)
            except Exception as error:
                reasons.append(f"{cls.__name__}: {type(error).__name__}: {str(error).strip()[:300]}")
                continue
            if inputs is not None:
                return Case(cls.__name__, partial(_built, cls, scale, family, inputs), switch)
    raise RuntimeError(" | ".join(dict.fromkeys(reasons)) or "no class of it can be made from a configuration")


def _built(cls: type[Any], scale: Scale, family: str, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return made(cls, scale, family), inputs


def classes(family: str) -> list[type[Any]]:
    """The family's models that have gradient checkpointing: the plain one first."""
    found = []
    for name in _modules(family):
        module = importlib.import_module(f"transformers.models.{family}.{name}")
        found += [value for value in vars(module).values() if _is_model(value, module)]
    special = SPECIAL.get(family, {}).get("class")
    if special:
        return [cls for cls in found if cls.__name__ == special]
    order = {name: number for number, name in enumerate(_preferred())}
    known = [cls for cls in found if cls.__name__ in order]
    others = [cls for cls in found if cls.__name__ not in order and cls.__name__.endswith(("Model", "Backbone"))]
    return [*sorted(known, key=lambda cls: order[cls.__name__]), *others]


def _modules(family: str) -> list[str]:
    import transformers.models

    root = Path(transformers.models.__path__[0]) / family
    return [file.stem for file in sorted(root.glob("modeling_*.py"))]


def _is_model(value: Any, module: Any) -> bool:
    return (
        inspect.isclass(value)
        and value.__module__ == module.__name__
        and getattr(value, "supports_gradient_checkpointing", False)
        and getattr(value, "config_class", None) is not None
        and "PreTrainedModel" not in value.__name__
    )


@cache
def _preferred() -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for mapping in _MAPPINGS:
        for value in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").values():
            names |= dict.fromkeys([value] if isinstance(value, str) else value)
    return tuple(names)


def made(cls: type[Any], scale: Scale, family: str) -> nn.Module:
    seed()
    config = small(cls.config_class(), scale, SPECIAL.get(family, {}))
    return cls(config)


@contextmanager
def switch(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """The public switch, and then the same with ``function``, as ``Trainer`` would have it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model._set_gradient_checkpointing(gradient_checkpointing_func=partial(function, use_reentrant=False))
    yield
