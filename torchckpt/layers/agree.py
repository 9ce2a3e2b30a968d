"""Agree: ranks that communicate inside of layers keep the same calls.

A replay of such a call communicates once more. If one rank kept the call and another did not, the other would wait, or
take what is meant for another call. So before each step the ranks tell each other which step each of them knows, and
how many bytes it may take [1]. If all know theirs, and these have the same layers, each tells what its step took, and
all follow the plan that rank 0 makes [2], for as long as they tell the same. Otherwise nothing is kept.
"""
from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from torchckpt.errors import CheckpointError, Fault
from torchckpt.layers.known import CALLER, KnownSteps
from torchckpt.layers.plan import Wish, chosen
from torchckpt.layers.took import Call, Took
from torchckpt.measuring.remembered import Remembered, digest
from torchckpt.ranks.turns import Absent, told_by_all

__all__ = ["Agreement"]

_ALL = "so every call is recomputed"
_APART = f"ranks that communicate inside of the chosen layers do not have the same layers, {_ALL}"
_NOWHERE = f"ranks communicate inside of the chosen layers, in groups of which none has all of these ranks, {_ALL}"


class Agreement:
    """What ranks agree on that communicate inside of layers, in these ``groups``."""

    def __init__(self, groups: Collection[dist.ProcessGroup], device: torch.device, known: KnownSteps) -> None:
        ordered = sorted(groups, key=lambda group: group.group_name, reverse=True)
        by_ranks = {frozenset(dist.get_process_group_ranks(group)): group for group in ordered}
        self._groups = [group for ranks, group in by_ranks.items() if not any(ranks < others for others in by_ranks)]
        """Those that are no part of another one."""
        self._device, self._known, self._names = device, known, digest(known.names)
        self._plans: Remembered[tuple[str, ...], frozenset[int]] = Remembered()
        self._refusal = ""
        """Why nothing is kept from now on, without another word."""

    def kept(self, wish: Wish | None) -> frozenset[int]:
        """The calls that every rank keeps in the step that begins.

        Args:
            wish: None: this rank does not know the step.

        Raises:
            BudgetInfeasible: the budget of some rank is too small; on all of them.
            CheckpointError: another rank begins no step.
        """
        layers = "" if wish is None else digest([call.layer for call in wish.took.calls])
        step = "" if wish is None else f"{wish.step} {wish.limit_bytes}"
        told = [] if self._refusal else self._told(self._names, layers, step)  # [1]
        steps = tuple(step for _, _, step in told)
        if len(self._groups) > 1 or not told:
            self._refusal = self._refusal or _NOWHERE
        elif len({names for names, _, _ in told}) > 1 or len({layers for _, layers, _ in told} - {""}) > 1:
            self._refusal = _APART
        if self._refusal:
            self._known.warn(self._refusal)
        if self._refusal or wish is None or not all(steps):
            return frozenset()
        if steps not in self._plans:
            self._plans[steps] = self._planned(wish)
        return self._plans[steps]

    def _planned(self, mine: Wish) -> frozenset[int]:
        told = self._told(mine.took.calls, mine.took.between_most, mine[2:])  # [2]
        tooks = [Took(tuple(Call(*call) for call in calls), between) for calls, between, *_ in told]
        wishes = [Wish("", took, *rest) for took, (*_, rest) in zip(tooks, told)]
        kept = frozenset(self._told(*chosen(wishes))[0])
        for rank, wish in enumerate(wishes):
            if wish.took.peak_bytes(kept) > wish.limit_bytes and not wish.is_narrowed:
                raise self._known.too_small(rank, wish, kept)
        return kept

    def _told(self, *mine: Any) -> list[Any]:
        """What each rank tells. Where groups are several, a rank tells all that it is none of theirs."""
        text, told = json.dumps(mine if len(self._groups) == 1 else ("", "", "")), []
        waits = f"{CALLER}: layers communicate, so ranks begin their steps together; this one waits for"
        for group in self._groups:
            try:
                told += told_by_all(text, "layers", group, self._device, waits, stacklevel=8) or []
            except Absent as absent:
                rule = f"{CALLER}: ranks that communicate inside of the chosen layers do not begin a step together"
                works = "the same calls of the model on every rank, each with its backward"
                raise CheckpointError(str(Fault(rule, f"a step on rank {group.rank()}, {absent}", works))) from None
        return [json.loads(each) for each in told]
