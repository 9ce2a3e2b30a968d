"""Options: the settings of a region, checked in one place, with every fault in one error."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

import torch

from torchckpt.errors import Fault, check
from torchckpt.regions.state.ambient import Generator
from torchckpt.typing import ContextFunction, DeterminismCheck

__all__ = ["DEFAULT", "Options", "check_options", "shown"]

_CHECKS: tuple[str, ...] = get_args(DeterminismCheck)


class Options(NamedTuple):
    preserve_rng_state: bool = True
    generators: Sequence[Generator] = ()
    determinism_check: DeterminismCheck = "default"
    context_fn: ContextFunction | None = None
    early_stop: bool = True
    debug: bool = False


DEFAULT = Options()


def check_options(function: object, options: Options, others: Iterable[Fault] = (), caller: str = "") -> None:
    """Raise ``ArgumentError`` if ``options`` or ``function`` break a rule, or if ``others`` has faults.

    The message begins with ``caller``, a public function.
    """
    check([*others, *_faults(function, options)], caller)


def _faults(function: object, options: Options) -> Iterator[Fault]:
    if not callable(function):
        works = "checkpoint(block, x), not checkpoint(block(x))"
        yield Fault("the function is not callable", shown(function), works)
    preserve, stop, debug = options.preserve_rng_state, options.early_stop, options.debug
    for name, value in (("preserve_rng_state", preserve), ("early_stop", stop), ("debug", debug)):
        if value is not True and value is not False:  # isinstance() would be three calls for each region
            yield Fault(f"{name} is not a bool", shown(value), f"{name}=False")
    generators: object = options.generators
    if not isinstance(generators, Sequence) or not all(isinstance(each, torch.Generator) for each in generators):
        works = "generators=(generator,)"
        yield Fault("generators is not a sequence of torch.Generator", shown(generators), works)
    if options.determinism_check not in _CHECKS:
        received, works = shown(options.determinism_check), 'determinism_check="values"'
        yield Fault(f"determinism_check is not one of {_CHECKS}", received, works)
    if options.context_fn is not None and not callable(options.context_fn):
        works = "context_fn=functools.partial(create_selective_checkpoint_contexts, policy)"
        yield Fault("context_fn is not callable; it returns two context managers", shown(options.context_fn), works)


def shown(value: object) -> str:
    """``value`` as text for a message, at most about 80 characters."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
