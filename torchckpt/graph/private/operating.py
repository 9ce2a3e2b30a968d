"""Operating: a context in which a function intercepts each operator call."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["operating"]


def operating(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Inside this context, ``run(operator, args, kwargs)`` is called instead of each operator, higher-order too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operating(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # the branches of torch.cond are compiled inside

        def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(target, args, kwargs or {})

    return Operating()  # type: ignore[no-untyped-call]
