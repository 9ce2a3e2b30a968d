"""Errors: the exception classes, and the form of every message: what is wrong, what was received, a call that works."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from inspect import CO_GENERATOR
from traceback import walk_tb
from typing import Any, NoReturn, TypeVar

__all__ = [
    "ArgumentError", "BudgetInfeasible", "CaptureError", "CheckpointError", "Fault", "RecomputationError",
    "RegionError", "ScheduleError", "TransformError",
]


class CheckpointError(Exception):
    """The base of all errors of torchckpt. An exception raised by the user's own code passes through unchanged."""

    caller: str = ""
    """The public function that was called, which begins the message; empty if the message names none."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{self.caller}: {text}" if self.caller else text


class ArgumentError(CheckpointError, ValueError):
    """A call breaks a rule. The message lists every fault of the call, not only the first; of many, ten."""


class BudgetInfeasible(CheckpointError, RuntimeError):
    """No schedule was found whose peak stays within the budget.

    ``least_bytes`` is the smallest budget with a plan, which is ``plan``. In a pipeline, ``rank`` needs these bytes.
    """

    def __init__(self, message: str, least_bytes: float, plan: object, rank: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes, self.plan, self.rank = least_bytes, plan, rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.least_bytes, self.plan, self.rank), self.__dict__


class CaptureError(CheckpointError, RuntimeError):
    """A call cannot be traced as one graph together with its derivatives."""


class RecomputationError(CheckpointError, RuntimeError):
    """A replay differed from its forward, so its gradients would be wrong."""


class RegionError(CheckpointError, RuntimeError):
    """The methods of a :class:`~torchckpt.Checkpointing` were called in the wrong order."""


class ScheduleError(CheckpointError, RuntimeError):
    """A step of a pipeline schedule failed on this rank, or timed out waiting for another rank."""


class TransformError(CheckpointError, RuntimeError):
    """A region was entered under a transform (``vmap``, ``jvp``, ``torch.func.grad``) that it cannot support."""


@dataclass(frozen=True)
class Fault:
    """One fault of a call: what is wrong, what was received, a call that works."""

    wrong: str
    received: str
    works: str

    def __str__(self) -> str:
        return f"{self.wrong}\n  received: {self.received}\n  works:    {self.works}"


@contextmanager
def called(function: str) -> Iterator[None]:
    """Begin the message of an error of torchckpt with the name of the public function. Also a decorator.

    If public functions call each other, the message names the one that the user called. A name that an error has got in
    the user's own code, which ``function`` runs, stays.

    >>> with called("plan_pipeline()"):
    ...     raise_fault(Fault("the budget is not a size", "'6'", 'budget="6GB"'))
    Traceback (most recent call last):
    torchckpt.errors.ArgumentError: plan_pipeline(): the budget is not a size
      received: '6'
      works:    budget="6GB"
    """
    try:
        yield
    except CheckpointError as error:
        if not error.caller or not _came_through_others(error):
            error.caller = function
        raise


def _came_through_others(error: BaseException) -> bool:
    """Whether ``error`` has come up through code of others, such as a function of the user that was run."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    roots = {name.partition(".")[0] for name in modules}
    return not roots <= {__name__.partition(".")[0], "", *sys.stdlib_module_names}


Error = TypeVar("Error", bound=CheckpointError)


def without_traceback(error: Error) -> Error:
    """A copy of ``error``, to be kept, or raised where the frame keeps it: a traceback holds the tensors of its frames,
    and an error in a variable of such a frame holds itself until the garbage collector runs."""
    return copy(error)


def without_generators(error: BaseException) -> BaseException:
    """``error``, which contexts made of generators have caught to raise another one, without their frames. From Python
    3.12 on, these hold that of the ``__exit__`` which holds the error, and so the tensors of all frames behind it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_flags & CO_GENERATOR:
        trace = trace.tb_next
    return error.with_traceback(trace)


def raise_fault(fault: Fault, caller: str = "") -> NoReturn:
    """Raise an :class:`ArgumentError` about one ``fault``, which begins with ``caller`` (:func:`called`)."""
    with called(caller):
        raise ArgumentError(str(fault))


_MOST_FAULTS = 10
"""A file that is none of those that are read has a fault in each word."""


def check(faults: Iterable[Fault], caller: str = "") -> None:
    """Raise one :class:`ArgumentError` that lists all ``faults``, the first ones of many, and begins with ``caller``.
    Do nothing if there are none."""
    listed = [str(fault) for fault in faults]
    if listed:
        head = f"{len(listed)} faults" + f", the first {_MOST_FAULTS} of them" * (len(listed) > _MOST_FAULTS)
        with called(caller):
            raise ArgumentError("\n".join(listed if len(listed) == 1 else [head, *listed[:_MOST_FAULTS]]))


def brief(value: object) -> str:
    """``value`` as text for a message: one line of at most 120 characters. A tensor is its shape, a class its name.

    >>> brief(int), brief("6 GiB")
    ('the class int', "'6 GiB'")
    """
    if isinstance(value, type):
        return kind(value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and hasattr(value, "requires_grad"):  # not a mock, which has any attribute
        return f"a tensor of shape {tuple(shape)}"
    text = repr(value)
    if "\n" in text:
        text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def text_of(error: BaseException) -> str:
    """The text of an error of the user's code, whose own ``__str__`` may fail."""
    try:
        return str(error)
    except Exception as another:
        return f"it has no text, as its __str__ raises {type(another).__name__}"


def named(error: BaseException) -> str:
    """The class and the text of an error of the user's code."""
    return f"{type(error).__name__}: {text_of(error)}"


def kind(value: object) -> str:
    """What ``value`` is, for a message: the name of its class, or "the class Linear" where it is a class itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
