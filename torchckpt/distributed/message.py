"""Message: what ranks tell each other, as JSON. It can hold plain data, and the classes that are listed here."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from torchckpt.errors import ArgumentError, BudgetInfeasible, CheckpointError, ScheduleError
from torchckpt.measuring.link import MeasuredLink
from torchckpt.planning import Action, Block, Kind, Stage
from torchckpt.planning.plan import PipelinePlan
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.step.measured import Span
from torchckpt.planning.step.memory import Level, Piece

__all__ = ["read", "written"]

_OBJECTS = (
    Action, ArgumentError, Block, BudgetInfeasible, CheckpointError, Kind, Level, MeasuredLink, Piece, ScheduleError,
    Span, Stage, WholeStep,
)
_MAKERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in _OBJECTS},
    "dict": lambda *pairs: dict(pairs),
    "tuple": lambda *values: values,
    "PipelinePlan": PipelinePlan.from_json,
}


def written(value: object) -> bytes:
    """``value`` as a message: numbers, text, lists, tuples, dictionaries, and objects of the classes above."""
    return json.dumps(_plain(value)).encode()


def read(message: bytearray) -> Any:
    """The value of a message."""
    return json.loads(message, object_hook=lambda part: next(_MAKERS[name](*parts) for name, parts in part.items()))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_plain, value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = "dict" if isinstance(value, Mapping) else type(value).__name__
    return {name: [*map(_plain, _parts(value))]}


def _parts(value: Any) -> Iterable[Any]:
    """What the maker of ``value`` takes."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, CheckpointError):
        return str(value), *value.__reduce__()[1][1:]
    if isinstance(value, PipelinePlan):
        return (value.to_json(),)
    return (value.value,) if isinstance(value, Kind) else [getattr(value, field.name) for field in fields(value)]
