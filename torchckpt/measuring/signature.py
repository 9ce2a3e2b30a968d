"""Signature: what the steps of a plan must have alike: the shapes, flags and regions of stages, and their settings."""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from torchckpt.errors import ScheduleError
from torchckpt.measuring.shapes import ModelSettings, Shapes

__all__ = ["Settings", "Signature"]

_WORKS = (
    "  works:    the same {} in every step; for others, new stages of the same modules, and with a schedule of these "
    "stages: recompute_ahead(schedule, budget=...)"
)


class Signature(NamedTuple):
    """The forward of a stage."""

    regions: int
    inputs: Shapes
    outputs: Shapes

    def check(self, planned: Signature, where: str) -> None:
        """Raise ``ScheduleError`` unless this is the ``planned`` one. ``where`` names the forward."""
        if self != planned:
            is_long = self._shown() == planned._shown()
            raise ScheduleError(
                "a micro-batch has other shapes or regions than those that the plan is for\n"
                f"  received: {where}: {self._shown(is_long)}; planned: {planned._shown(is_long)}\n"
                + _WORKS.format("shapes and flags")
            )

    def _shown(self, is_long: bool = False) -> str:
        inputs = ", ".join(_shown(each, False, is_long) for each in self.inputs) or "unknown"
        outputs = ", ".join(_shown(each, True, is_long) for each in self.outputs) or "unknown"
        return f"{self.regions} regions, input {inputs}, output {outputs}"


def _shown(shape: tuple[object, ...] | str, has_dtype: bool, is_long: bool) -> str:
    if isinstance(shape, str):
        return shape
    *size, dtype, device, requires_grad = shape
    text = f"{f'{dtype} '.removeprefix('torch.') if has_dtype or is_long else ''}{size}"
    return f"{text} on {device} with{'' if requires_grad else 'out'} a gradient" if is_long else text


class Settings:
    """Those of the modules of stages: what is trained, the modes, autocast. A plan is for those of the counted step."""

    def __init__(self) -> None:
        self._models: dict[int, ModelSettings] = {}
        self._of_step: tuple[dict[int, Shapes], dict[str, str]] = {}, {}
        self._planned: tuple[dict[int, Shapes], dict[str, str]] | None = None

    def check(self, modules: Mapping[int, nn.Module], device: str) -> None:
        """Before a step on stages of these ``modules``, raise ``ScheduleError`` unless they have the planned settings.
        """
        self._models = self._models or {stage: ModelSettings(module) for stage, module in modules.items()}
        now = {stage: model.now(device) for stage, model in self._models.items()}
        if self._planned is None:
            self._of_step = now, self._words(device)
        elif now != self._planned[0]:
            words, planned = self._words(device), self._planned[1]
            names = (name for name in {**planned, **words} if words.get(name) != planned.get(name))
            first, *more = [*names] or ["a module"]
            raise ScheduleError(
                "a step has other settings than the one that was counted for the plan\n"
                f"  received: {first} is {words.get(first, 'absent')}{f', and {len(more)} more' if more else ''}; "
                f"planned: {planned.get(first, 'absent')}\n" + _WORKS.format("modes, and the same parameters trained,")
            )

    def counted(self) -> None:
        """The step had its bytes counted. The first such step is the one that the plan is for."""
        self._planned = self._planned or self._of_step

    def _words(self, device: str) -> dict[str, str]:
        each = ((f"stage {stage}, ", model.words(device)) for stage, model in self._models.items())
        return {stage + name: word for stage, words in each for name, word in words.items()}
