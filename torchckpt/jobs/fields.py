"""Fields: those of a description that have another type than they may, are out of range, or none of some choices."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, cast

from torchckpt.errors import Fault, brief

__all__ = ["odd_fields"]

_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
    "bool | None": "true or false",
}  # fmt: skip
_EXAMPLES = {"float": 7e9, "str": "llama3-8b", "bool": True, "bool | None": True}


def odd_fields(
    described: Any,
    name: str,
    ranges: Mapping[str, tuple[float, float]],
    choices: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Fault]:
    """The faults of a dataclass, which is a ``name``.

    Args:
        ranges: of numbers, what one may be, and the most. The least is 0, or 1 where a whole number's default is not 0.
        choices: of texts, and of tuples of texts.
    """
    choices = choices or {}
    for each in fields(described):
        kind, value = str(each.type), getattr(described, each.name)
        if each.name in choices:
            yield from _odd_choice(f"{each.name} of the {name}", each.name, value, choices[each.name], kind != "str")
        elif kind in _KINDS:
            example, most = ranges.get(each.name, (0, 1e18))
            least, words = int(kind == "int" and each.default != 0), _KINDS[kind]
            if each.name in ranges:
                words += f" from {least} to {most}"
            if not _is(kind, value, least, most):
                works = example if each.name in ranges else _EXAMPLES.get(kind, example)
                yield Fault(
                    f"{each.name} of the {name} is not {words}", f"{each.name}={brief(value)}", f"{each.name}={works!r}"
                )


def _odd_choice(words: str, name: str, value: object, options: Sequence[str], is_tuple: bool) -> Iterator[Fault]:
    several = value if is_tuple and isinstance(value, tuple) else (value,)
    wrong = [each for each in several if not isinstance(each, str) or each not in options]
    if wrong or isinstance(value, tuple) != is_tuple:
        near = get_close_matches(str(next(iter(wrong), value)), options, n=1, cutoff=0.0)[0]
        rule = f"{words} is not {'a tuple of some' if is_tuple else 'one'} of {', '.join(options)}"
        yield Fault(rule, f"{name}={brief(value)}", f"{name}={(near,) if is_tuple else near!r}")


def _is(kind: str, value: object, least: float, most: float) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind.startswith("bool"):
        return isinstance(value, bool) or (value is None and kind != "bool")
    is_number = isinstance(value, Integral if kind == "int" else Real) and not isinstance(value, bool)
    return is_number and least <= cast("float", value) <= most
