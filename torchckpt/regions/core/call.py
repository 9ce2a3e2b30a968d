"""Call: one call of a function, and all that it takes to run it again."""
from __future__ import annotations

import dis
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchckpt.errors import Fault, RecomputationError, kind, raise_fault
from torchckpt.modules import name_of
from torchckpt.regions.core.options import Options
from torchckpt.regions.devices import SyncPoint, accelerators_of, current_accelerators
from torchckpt.regions.flags import Noted, Replay, local, state_lock
from torchckpt.regions.private import is_of_newest_node, pop_hooks, push_hooks, set_grad_enabled
from torchckpt.regions.state import norms
from torchckpt.regions.state.ambient import (
    Ambient,
    Draws,
    Generator,
    RandomState,
    changing,
    differ_in_process,
    drawn_since,
    generators_of,
    random_state,
    restore_states,
    set_states,
    settings,
    use_settings,
    use_settings_of_process,
)
from torchckpt.regions.state.boundary import Boundary
from torchckpt.regions.state.host_random import HostGenerator, is_of_process
from torchckpt.regions.state.module_state import ModuleState, record_state
from torchckpt.regions.state.reached import reached_by, reaches_nothing, runs_compiled_code, settle
from torchckpt.regions.state.substitutes import changed_in_place, exclusive, substituted
from torchckpt.tensors import version_of
from torchckpt.typing import ContextFunction, Function

__all__ = ["Call", "Stop", "comes_of_stop", "goes_on", "inside"]

Pack: TypeAlias = Callable[[Tensor], Any]
Unpack: TypeAlias = Callable[[Any], Tensor]
_Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any] | None]


class Call:
    """A function, the boundary of one call of it, and the state of the function's modules at that call.

    ``forward`` runs the function, once; ``replay`` runs it again from the same state. Both restore what they set, in
    ``finally``: context managers would be a tenth of the cost of a region of tiny operations.
    """

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> None:
        self.function = function
        self._devices_of_inputs = accelerators_of(args, kwargs)
        self.devices = self._devices_of_inputs or current_accelerators()
        """The accelerators that the region works on: those of the arguments; if there are none, the current one."""
        self.is_alone = reaches_nothing(function)
        """Whether the function reaches nothing but its arguments."""
        self._options = options
        self._boundary = Boundary(args, kwargs)
        if self._boundary.spec is not None and (iterators := self._boundary.iterators()):
            rule = "an argument is an iterator, of which a replay gets only what the forward has left"
            raise_fault(Fault(rule, f"a {kind(iterators[0])}", "checkpoint(function, x, list(parts))"), "checkpoint")
        self._contexts: _Contexts | None = None if options.context_fn is None else _contexts(options.context_fn)
        self._draws: Draws | None = None
        self._entry: SyncPoint | None = None
        self.module_state: ModuleState | None = None
        self.named: Sequence[Generator] = ()
        """The generators that the forward found besides those of devices."""
        self._hidden: Sequence[tuple[weakref.ref[Tensor], int]] = ()
        self._looked: norms.Looked = ()
        self.means: Mapping[int, Tensor | None] = _NOTHING
        """By ``id``, while the forward runs: running means whose layer surely runs, so that it need not be noted."""
        self._noted = Noted()
        self._ran: Mapping[nn.Module, Any] | None = None  # until the forward has ended

    def note_hidden(self) -> bool:
        """Note the tensors that objects among the arguments hold, which no replay finds as they were. Return whether
        there are any."""
        if self._boundary.spec is None:
            return False
        hidden = self._boundary.hidden_tensors()
        self._hidden = [(weakref.ref(tensor), version_of(tensor)) for tensor in hidden]
        return bool(hidden)

    def finds_other_tensors(self) -> bool:
        """Whether these objects hold others by now, or changed ones, as a cache that the forward has filled."""
        if not self._hidden:
            return False
        now, then = self._boundary.hidden_tensors(), self._hidden
        same = (was() is tensor and version == version_of(tensor) for (was, version), tensor in zip(then, now))
        return len(now) != len(then) or not all(same)

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ambient: deque[Ambient],
        pack: Pack,
        unpack: Unpack,
        values: bool,
    ) -> Any:
        """Run the function under the saved-tensor hooks ``pack`` and ``unpack``.

        It appends the settings and the random numbers that the function starts with to ``ambient``. ``values``: whether
        slots have checksums.
        """
        function = self.function if self._contexts is None else inside(self._contexts[0], self.function)
        modules = [] if self._boundary.spec is None else self._boundary.modules()
        reached, generators = ([], []) if self.is_alone else reached_by(self.function)
        module_state, is_locked = None, False
        if modules or not self.is_alone:
            module_state, is_locked = record_state(self.function, [*modules, *reached], bool(reached))
        try:
            # Lazy modules: the first call makes the weights, which a replay would not.
            if module_state is not None and module_state.layout.is_lazy:
                return function(*args, **kwargs)
            self.module_state = module_state
            if self.devices:
                self._entry = SyncPoint(self.devices)  # when inputs and copies of buffers are ready
            random = self._random_state(module_state, generators) if self._options.preserve_rng_state else []
            if self._contexts is not None and random:
                self._draws = Draws([each for each in random if type(each[0]) is not HostGenerator])
                function = inside(self._contexts[0], self._draws.under(self.function, is_replay=False))
            ambient.append((settings(), random))
            if module_state is not None and (layers := module_state.layout.norm_layers()):
                # Compiled code may save what it makes of the buffers.
                self._looked = norms.look(layers, values or runs_compiled_code(self.function))
                self.means = norms.running_means(self._looked)
            outputs = self._run(function, args, kwargs, pack, unpack)
        finally:
            if is_locked:
                state_lock.release()
        if self.devices or self.named:
            # Backwards of devices run in several threads, which share the CPU's generator, and those of other devices.
            # All threads share those of Python and NumPy, which much code names that never draws.
            shared = (1 if self._devices_of_inputs else 1 + len(self.devices)) if self.devices else 0
            then, random = ambient.pop()
            own = [each for each in random[shared:] if type(each[0]) is not HostGenerator]
            of_host = [each for each in random[shared:] if type(each[0]) is HostGenerator]
            ambient.append((then, drawn_since(random[:shared] + of_host) + own))
        return outputs

    def _run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], pack: Pack, unpack: Unpack
    ) -> Any:
        thread = local.thread
        flags, around = thread.flags, thread.norms
        push_hooks(pack, unpack)  # before what the end restores: it raises where hooks are disabled
        thread.flags, thread.norms = (True, flags[1], flags[2]), self._noted
        try:
            return function(*args, **kwargs)
        finally:
            thread.flags, thread.norms = flags, around
            pop_hooks()
            self._ran = _NOTHING
            if self._looked or self._noted:
                self._ran, self.means = norms.ran(self._looked, self._noted), _NOTHING
                if around is not None:
                    around.extend(self._ran)
                    around.read = [*around.read, *self._noted.read]
            if self.module_state is not None:
                self.module_state.note_changes()

    def _take_context(self) -> AbstractContextManager[Any]:
        assert self._contexts is not None
        context = self._contexts[1]
        if context is None:
            rule = "the context of a replay was entered before, and is entered once"
            received = f"a second replay of region {name_of(self.function)}, whose first one raised"
            raise RecomputationError(str(Fault(rule, received, "a new forward; or context_fn=None")))
        self._contexts = self._contexts[0], None
        return context

    def _random_state(self, module_state: ModuleState | None, reached: Sequence[Generator]) -> RandomState:
        named = [*self._options.generators, *reached] if reached else self._options.generators
        if module_state is not None and (owned := module_state.layout.generators()):
            named = [*named, *owned]
        if self._boundary.spec is not None:
            named = [*named, *self._boundary.generators()]
        self.named = named
        return random_state(generators_of(self.devices, named))

    def replay(self, ambient: Ambient, pack: Pack, unpack: Unpack) -> Any:
        """Run the function again under the hooks, until ``pack`` raises Stop, or to its end. Return what it returns."""
        # Read the arguments first: inside an outer region they are slots, and reading them replays the outer region.
        args, kwargs, tensors = self._boundary.arguments()
        if self._entry is not None:
            of_modules = () if self.module_state is None else self.module_state.tensors()
            self._entry.wait_before_using([*tensors, *of_modules])
        function = self.function if self._draws is None else self._draws.under(self.function, is_replay=True)
        if self._contexts is not None:
            function = inside(self._take_context(), function)
        if self._ran is None and self.module_state is not None:  # the forward runs a backward itself
            self.module_state.note_changes(has_ended=False)
        state = self.module_state
        if state is not None:
            function = state.noting(function)
            if (substitutes := state.substitutes(self.function)) is not None:
                function = inside(substituted(substitutes, self.function), inside(norms.calls_end(), function))
        for layer in norms.moved(self._noted.read) if self._noted.read else ():
            if state is None or id(layer._buffers) not in state.statistics():
                path = f"{type(layer).__name__}.running_mean"
                raise changed_in_place(self.function, layer.get_buffer("running_mean"), path)
        then, random = ambient
        again: Function = self._run_again
        # Or another device's thread could set the generator meanwhile, or what is of the whole process.
        is_alone = bool(self.devices) and any(map(is_of_process, random))
        if then != (now := settings()) or changing:
            function = inside(use_settings(then), function)
            if changing or differ_in_process(then, now):
                again, is_alone = inside(use_settings_of_process(then), again), True
        if state is not None and state.layout.rearranged:
            again, is_alone = inside(state.unchanged(), again), True
        if is_alone:
            again = inside(exclusive(self.function), again)
        return again(partial(function, *args, **kwargs), random, pack, unpack)

    def _run_again(self, run: Function, random: RandomState, pack: Pack, unpack: Unpack) -> Any:
        replay = Replay()
        ran, state = norms.ran(self._looked, self._noted) if self._ran is None else self._ran, self.module_state
        if ran and state is not None:  # code around the others' calls may read the statistics that the state lends
            looked, lent = {layer for layer, *_ in self._looked}, state.statistics()
            ran = {layer: ran[layer] for layer in ran if layer in looked or id(layer._buffers) not in lent}
            replay.lent = {layer for layer in ran if id(layer._buffers) in lent}
        replay.ran, replay.watched = ran, []
        thread, graded = local.thread, torch.is_grad_enabled()
        flags, scope = thread.flags, thread.scope
        random_after: RandomState = []
        push_hooks(pack, unpack)  # before the `try`: where hooks are disabled it raises, and there is nothing to undo
        try:
            random_after = set_states(random)
            set_grad_enabled(True)
            thread.flags, thread.scope = (False, True, replay), None  # regions inside run as in the forward
            try:
                if replay.ran:
                    norms.lend(replay, runs_compiled_code(self.function))
                return run()
            finally:
                if replay.ran:
                    norms.take_back(replay)
        except Stop:
            return None
        finally:
            thread.flags, thread.scope = flags, scope
            set_grad_enabled(graded)
            pop_hooks()
            if not (self.is_alone or replay.compiles):
                settle(self.function)
            restore_states(random_after)


_NOTHING: Mapping[Any, Any] = {}


def inside(context: AbstractContextManager[Any], function: Function) -> Function:
    """``function``, called inside of ``context``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return run


def _contexts(make: ContextFunction) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    pair = make()
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(c, AbstractContextManager) for c in pair)):
        rule = "context_fn did not return two context managers, one around the forward and one around the replay"
        works = "context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext())"
        raise_fault(Fault(rule, repr(pair), works), "checkpoint")
    return pair


# the end of a replay --------------------------------------------------------------------------------------------------


class Stop(Exception):
    """The exception by which ``pack`` ends a replay early, inside the function. It is an ``Exception``, so that modules
    run hooks with ``always_call``."""


def comes_of_stop(error: BaseException) -> bool:
    """Whether the function raised ``error`` because it had caught Stop: after its handler, or ``from`` Stop. What it
    raised while Stop passed, as in a ``finally``, is an error of its own."""
    chain: list[BaseException | None] = [error]
    while (last := chain[-1]) is not None and not isinstance(last, Stop) and last.__context__ not in chain:
        chain.append(last.__context__)
    return last is None or all(raised is None or raised.__cause__ is cause for raised, cause in pairwise(chain))


_REPLAY = Call._run_again.__code__
_SAVE_EARLY = frozenset(("rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"))
"""Functions that save their noise before their kernel writes it."""


def goes_on(tensor: Tensor, frame: FrameType | None, call: Call) -> bool:
    """Whether a replay goes on, without Stop, when ``frame`` has saved the last ``tensor``. None: the engine has, in a
    backward that keeps its graph.

    It does if the kernel that writes it is still to run, or if the modules do not hold what it has found, which its
    rest may put back, or if the function only returns from here on: an exception that passes through C++ takes as long
    as ten tiny operations. Then ``frame`` is the function's own frame, and its next instruction returns.
    """
    if call.module_state is not None and not call.module_state.is_as_found():
        return True
    if frame is None:
        return False
    function = call.function
    code = frame.f_code
    if not _SAVE_EARLY.isdisjoint(code.co_names):
        return True
    called_function = function.__func__ if type(function) is MethodType else function
    return (
        type(called_function) is FunctionType
        and code is called_function.__code__
        and is_of_newest_node(tensor)  # not an input of an operation that has not run yet
        and (caller := frame.f_back) is not None
        and caller.f_code is _REPLAY  # not a call of the function by itself
        and _returns_next(code, frame.f_lasti)
    )


@lru_cache(maxsize=1024)
def _returns_next(code: CodeType, place: int) -> bool:
    """Whether the instruction of ``code`` after that at ``place`` returns its result."""
    following = (instruction.opname for instruction in dis.get_instructions(code) if instruction.offset > place)
    return next(following, "") == "RETURN_VALUE"
