"""Call: one call of a function, and all that it takes to run it again."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor

from torchckpt.errors import ArgumentError, Fault
from torchckpt.kernel.ambient import RandomState, entered, generators_of, settings
from torchckpt.kernel.boundary import Boundary
from torchckpt.kernel.modes import Dropping, Replaying
from torchckpt.kernel.options import Options
from torchckpt.kernel.streams import Trail, accelerators_among
from torchckpt.typing import ContextFunction, Function

__all__ = ["Call"]

class Call:
    """A function, the boundary of one call of it, and the ambient state of that call.

    ``forward`` runs it, once; ``replay`` runs it again from the same state.
    """

    __slots__ = ("_boundary", "_contexts", "_entry", "_random", "_settings", "devices", "function")

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> None:
        self.function = function
        self.devices = accelerators_among(args, kwargs)
        """The accelerators that the region works on."""
        self._settings = settings()
        self._boundary = Boundary(args, kwargs)
        self._contexts = None if options.context_fn is None else _contexts(options.context_fn)
        self._entry = Trail(self.devices) if self.devices else None
        self._random: RandomState | None = None
        if options.preserve_rng_state:
            self._random = RandomState(generators_of(self.devices, options.generators))

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> Any:
        dropping = Dropping(pack, unpack)
        with dropping if self._contexts is None else _nested(self._contexts[0], dropping):
            outputs = self.function(*args, **kwargs)
        # Backwards of several accelerators run in as many threads, and share the CPU's generator.
        if self.devices and self._random is not None and not self._random.moved():
            self._random = None
        return outputs

    def replay(self, pack: Callable[[Tensor], Tensor]) -> None:
        # The arguments come first: inside an outer region they are slots themselves, and reading them replays that one.
        args, kwargs, tensors = self._boundary.arguments()
        if self._entry is not None:
            self._entry.followed(tensors)
        replaying, ambient = Replaying(pack, self._random), entered(self._settings)
        plain = ambient is None and self._contexts is None
        with replaying if plain else _nested(ambient, self._contexts and self._contexts[1], replaying):
            self.function(*args, **kwargs)


@contextmanager
def _nested(*contexts: AbstractContextManager[Any] | None) -> Iterator[None]:
    with ExitStack() as stack:
        for context in filter(None, contexts):
            stack.enter_context(context)
        yield


def _contexts(make: ContextFunction) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    made = make()
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(c, AbstractContextManager) for c in made):
        return made
    fault = Fault(
        "context_fn must return two context managers, one around the forward and one around the replay",
        repr(made),
        "context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext())",
    )
    raise ArgumentError(f"checkpoint: {fault}")
