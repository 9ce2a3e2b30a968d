"""Difference: where a replay differs from its forward: the operation and the line of both, and the likely causes."""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from torchckpt.errors import Fault, RecomputationError
from torchckpt.modules import name_of
from torchckpt.regions.core.slots import Slot, describe
from torchckpt.regions.places import Place, holders_behind, operation_of, shown_line
from torchckpt.regions.private import number_of, running_node
from torchckpt.tensors import node_name, nodes_behind
from torchckpt.typing import Function

__all__ = ["Difference", "compiled_anew", "differs", "keeps_differently"]

_NOTHING = "nothing, it had ended"
_NO_LINE = "; torch.utils.checkpoint.set_checkpoint_debug_enabled(True) shows its line"


class Difference:
    """How a replay first differs from its forward. It holds no tensor and no node."""

    def __init__(self, slot: Slot | None, tensor: Tensor | None = None, place: Place | None = None) -> None:
        self.kind = _kind(slot, tensor)
        self.replay = _NOTHING if tensor is None else describe(tensor) if slot is None else slot.compare(tensor)
        self.place = place
        self.operation = "" if place is None else place.operation
        self.before = ""
        """The operations that the inputs of that operation come from."""

    def is_named_by(self, tensors: Iterable[Tensor]) -> bool:
        """Look for the replay's operation among those that ``tensors`` come from. Returns whether it is known."""
        if self.place is not None and not self.operation:
            number = self.place.node
            for node in nodes_behind(tensors, lambda node: number_of(node) >= number):
                if number_of(node) == number:
                    self.operation = operation_of(node_name(node))
                    self.before = " ".join(node_name(parent) for parent, _ in node.next_functions if parent is not None)
        return bool(self.operation)


def _kind(slot: Slot | None, tensor: Tensor | None) -> str:
    if slot is None or tensor is None:
        return "end"
    for kind in ("device", "dtype", "shape"):
        if getattr(slot, kind) != getattr(tensor, kind):
            return kind
    if slot.version < tensor._version:
        return "version"
    whole = tensor if tensor._base is None else tensor._base
    return "weight" if isinstance(whole, nn.Parameter) else "values"


# the errors -----------------------------------------------------------------------------------------------------------


def differs(
    function: Function, slots: Sequence[Slot], number: int, difference: Difference, finds_others: bool
) -> RecomputationError:
    """The error for saved tensor ``number`` (from 0). ``finds_others``: an argument holds other tensors by then."""
    slot = slots[number] if number < len(slots) else None
    then, operation = (None, "") if slot is None else (slot.place, _operation_of(slot))
    now, kinds = difference.place, f"{difference.kind}{' argument' * finds_others}"
    if operation and difference.operation not in ("", operation):
        kinds = f"{kinds} operation".replace("version", "values")  # of two operations, versions tell nothing
    places = [place for place in (then, now) if place is not None]
    module = next((f", in {place.module}" for place in places if place.module), "")
    saved = _NOTHING if slot is None else f"{describe(slot)}{_made(operation, then)}{_NO_LINE * (then is None)}"
    runs = " ".join([operation, difference.operation, difference.before, *(place.function for place in places)])
    return RecomputationError(
        f"the replay of region {name_of(function)} did not save what its forward saved: "
        f"tensor {number + 1} of {len(slots)}{module}\n"
        f"  forward saved: {saved}\n"
        f"  replay saved:  {difference.replay}{_made(difference.operation, now)}\n{_advice(kinds, runs)}"
    )


def _operation_of(slot: Slot) -> str:
    """The operation whose node holds ``slot``. The node is behind the one whose backward runs, if any does."""
    return slot.operation or next((name for packed, name in holders_behind([running_node()]) if packed is slot), "")


def _made(operation: str, place: Place | None) -> str:
    """Which operation saved a tensor, and where, for the end of a line."""
    function = f" ({place.function})" if place is not None and place.function else ""
    line = f" at {shown_line(place.file, place.line)}" if place is not None else ""
    return f", for {operation}{function}{line}" if operation else line and f",{line}"


def compiled_anew(function: Function) -> RecomputationError:
    """The error for a replay inside of which code was compiled, with nothing to compare what it saves with."""
    rule = (
        f"the replay of region {name_of(function)} compiled code that its forward found compiled: nothing tells "
        "whether the new graph saves what the old one did"
    )
    received = "a compilation inside of a replay, as after torch._dynamo.reset(), or where a guard fails there"
    works = 'the step again, from its forward; or checkpoint(function, x, determinism_check="values")'
    return RecomputationError(str(Fault(rule, received, works)))


def keeps_differently(function: Function, number: int, forward: str, replay: str) -> RecomputationError:
    """The error for call ``number`` (from 0) of ``keep``; ``forward`` and ``replay`` describe what each keeps."""
    return RecomputationError(
        f"the replay of region {name_of(function)} did not call torchckpt.keep as its forward did: call {number + 1}\n"
        f"  forward kept:  {forward}\n"
        f"  replay keeps:  {replay}\n{_advice('end')}"
    )


# the causes -----------------------------------------------------------------------------------------------------------


_AS_ARGUMENT = "make it inside of the function, or a parameter or buffer of a module, checkpoint(module, x)"
_GUARD = "change it under `if not torchckpt.is_recomputing():`"
_LATER = "change it after the backward"
_CHOOSES = "Index(?!Put)|Topk|Sort|Gather|Scatter|Nonzero|Masked|Unique|Split|Slice|Where"
_GROWS = "Cat|Stack|Slice|Select|Narrow|IndexPut|Expand|Repeat"
_DRAWS = "[dD]ropout|Bernoulli|[rR][rR]elu|Rand|Normal|Uniform|Multinomial|gumbel"
_ADDS = "Scatter|IndexAdd|IndexPut|IndexReduce|Cumsum|Interpolate|Upsample|Grid"

_CACHE = "a cache that grew (keys and values)", f"use_cache=False, or {_GUARD}"

_CAUSES = (  # the kinds of differences and the operations that it explains, both as patterns; the cause; a fix
    ("argument", "", *_CACHE),
    ("shape|dtype|operation|end", "CompiledFunction",
     "Dynamo ran another graph than in the forward", "the step again, from its forward"),
    ("version", "", "a tensor from outside that the function itself writes (out=, clamp_)", _AS_ARGUMENT),
    ("weight", "", "a weight that changed since the forward (optimizer, EMA, .data)", _LATER),
    ("dtype", "", "autocast that the function enters in one of the two only", "enter it in both, or outside"),
    ("dtype", "", "a module that was cast since the forward (.bfloat16())", _LATER),
    ("device", "", "a module that was moved since the forward (.to(), .cpu())", _LATER),
    ("shape|operation|end", _CHOOSES, "a choice that differs (a router's counts)", "torchckpt.keep(router, x)"),
    ("shape|operation|end", _GROWS, *_CACHE),
    ("operation|end", "dropout|atch_?[nN]orm", "training= that changed since the forward", _LATER),
    ("operation|end|values", _DRAWS, "random numbers that no replay draws again", "preserve_rng_state=True"),
    ("values", _ADDS, "a kernel that is not deterministic", "torch.use_deterministic_algorithms(True)"),
    ("end", "", "work that the first call alone does (it fills a cache)", "do it before, or in each call"),
    ("", "", "state that the function changes itself (a counter, a cache)", _GUARD),
    ("", "", "a generator that no replay sets", "checkpoint(function, x, generators=(generator,))"),
    ("", "", "a parameter, buffer or global that changed since the forward", _LATER),
)


def _advice(kinds: str, runs: str = "") -> str:
    """The three likeliest causes, the first that explain ``kinds`` where ``runs`` has run, and their fixes."""
    rows = (row[2:] for row in _CAUSES if re.search(row[0], kinds) and re.search(row[1], runs))
    likely = [*dict.fromkeys(rows)][:3]
    causes, fixes = ("; ".join(f"({number}) {text}" for number, text in enumerate(texts, 1)) for texts in zip(*likely))
    return f"  likely:        {causes}\n  works:         {fixes}"
