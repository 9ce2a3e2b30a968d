"""Plain: torch's pipeline runtime, on the same lists of actions as ours, but without recomputes."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torchckpt.distributed.runtime import Runtime
from torchckpt.planning import Action

__all__ = ["Plain"]


class Plain(Runtime):
    """Runs a schedule's actions without recomputes."""

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reaches(self, action: str) -> None:
        pass

    def ends(self) -> None:
        pass

    def computing(self, action: Action, outputs: list[object]) -> AbstractContextManager[None]:
        return nullcontext()
