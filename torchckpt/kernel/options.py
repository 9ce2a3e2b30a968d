"""What a caller may choose about a region, checked once, with every fault in one error."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from torchckpt.errors import Fault, raise_faults
from torchckpt.kernel.ambient import Generator
from torchckpt.typing import ContextFunction, DeterminismCheck

__all__ = ["DEFAULT", "Options", "checked"]

_CHECKS: tuple[str, ...] = get_args(DeterminismCheck)


class Options(NamedTuple):
    preserve_rng_state: bool = True
    generators: Sequence[Generator] = ()
    determinism_check: DeterminismCheck = "default"
    context_fn: ContextFunction | None = None
    early_stop: bool = True


DEFAULT = Options()


def checked(caller: str, function: object, options: Options) -> Options:
    """Return ``options``; raise ``ArgumentError`` if they, or ``function``, break a rule."""
    if options is not DEFAULT or not callable(function):
        raise_faults(caller, _faults(function, options))
    return options


def _faults(function: object, options: Options) -> list[Fault]:
    faults = []
    if not callable(function):
        faults.append(Fault("the function must be callable", _shown(function), "checkpoint(block, x), not checkpoint(block(x))"))
    if not isinstance(options.preserve_rng_state, bool):
        faults.append(Fault("preserve_rng_state must be a bool", _shown(options.preserve_rng_state), "preserve_rng_state=False"))
    if not _are_generators(options.generators):
        faults.append(
            Fault("generators must be a sequence of torch.Generator", _shown(options.generators), "generators=(generator,)")
        )
    if options.determinism_check not in _CHECKS:
        faults.append(
            Fault(f"determinism_check must be one of {_CHECKS}", _shown(options.determinism_check), 'determinism_check="values"')
        )
    if options.context_fn is not None and not callable(options.context_fn):
        faults.append(
            Fault(
                "context_fn must be callable, and return two context managers",
                _shown(options.context_fn),
                "context_fn=functools.partial(create_selective_checkpoint_contexts, policy)",
            )
        )
    if not isinstance(options.early_stop, bool):
        faults.append(Fault("early_stop must be a bool", _shown(options.early_stop), "early_stop=False"))
    return faults


def _are_generators(given: Any) -> bool:
    return isinstance(given, Sequence) and all(isinstance(generator, torch.Generator) for generator in given)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
