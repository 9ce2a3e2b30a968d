"""``checkpoint`` and ``Checkpointing``: run a region in one call, or step by step."""
from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, RegionError, TransformError
from torchckpt.modules import contents_of, is_module
from torchckpt.regions.core.frame import Frame
from torchckpt.regions.core.hooks import heeding
from torchckpt.regions.core.nodes import changed, fork, join, recompute
from torchckpt.regions.core.nodes import checkpoint as checkpoint_input
from torchckpt.regions.core.options import DEFAULT, Options, check_options
from torchckpt.regions.flags import local
from torchckpt.regions.private import (
    forward_ad,
    functorch_is_active,
    is_exporting,
    keep_from_dynamo,
    set_version,
    storage_key,
)
from torchckpt.tensors import copy_attributes, tensors_in
from torchckpt.typing import ContextFunction, DeterminismCheck, Function

__all__ = ["Checkpointing", "checkpoint", "outside", "refuse_transforms", "run"]

def run(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """Run ``function(*args, **kwargs)`` as a region."""
    # An exported graph has no backward, and torch.export supports no regions; the check of a script's trace would find
    # names of ours for values.
    if is_exporting():
        return function(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():  # a constant for Dynamo, which reads this line while it traces the caller
        return in_graph(function, args, kwargs, options)
    if options is not DEFAULT or not callable(function):
        check_options(function, options, caller="checkpoint")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    refuse_transforms()
    if local.thread.scope is not None:
        return local.thread.scope.run(function, args, kwargs, options)[0]
    return Frame(options).forward(function, args, kwargs)


def in_graph(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """Inside a graph that Dynamo traces: call :func:`torch.utils.checkpoint.checkpoint`, which Dynamo supports."""
    leaves = pytree.tree_leaves((args, kwargs))
    # type(): Dynamo of torch 2.15 traces no isinstance() of a tensor with a class that has a check of its own.
    if options.generators or any(type(leaf) is torch.Generator for leaf in leaves):
        return outside(run, function, args, kwargs, options)
    if options.context_fn is not None:
        kwargs = {**kwargs, "context_fn": options.context_fn}
    # Write the full name: Dynamo knows torch's function by it, even if a user replaced it by ours. This line is traced
    # and never run as Python (see the end of this file), so it does not call itself.
    return torch.utils.checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=options.preserve_rng_state,
        determinism_check="none" if options.determinism_check == "none" else "default",
        **kwargs,
    )


def outside(call: Function, *args: Any) -> Any:
    """``call(*args)`` outside the graph that Dynamo is tracing."""
    from torchckpt.regions.core.outside_graph import outside_graph  # imports Dynamo

    return outside_graph(call, *args)


def refuse_transforms() -> None:
    """Raise ``TransformError`` inside a transform that regions do not support."""
    # autograd would not raise here: torch.func.grad silently ignores the saved-tensor hooks.
    if functorch_is_active() or forward_ad._current_level >= 0:
        rule = "a region cannot be entered under vmap, jvp, torch.func.grad or forward-mode AD"
        through = "through checkpoint(block, x)"
        works = f"block(x) itself inside the transform; or torch.autograd.grad, double backward included, {through}"
        raise TransformError(str(Fault(rule, "a call inside such a transform", works)))


def checkpoint(
    function: Function | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    generators: Sequence[torch.Generator] = (),
    determinism_check: DeterminismCheck = "default",
    context_fn: ContextFunction | None = None,
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without keeping its activations; the backward computes them again.

    A drop-in replacement for :func:`torch.utils.checkpoint.checkpoint`. Outputs and gradients are equal to the bit to
    those of the plain call. This holds with dropout, double backward, ``torch.autograd.grad`` and all else of reverse
    mode. In a graph of ``torch.compile``, ``early_stop`` and ``debug`` do nothing, and ``"values"`` is ``"default"``.

    >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    >>> y = torchckpt.checkpoint(block, torch.randn(4, 8))
    >>> y.sum().backward()

    Args:
        function: any callable. It may close over tensors and modules. The replay repeats what the function changes of
            other state: guard that with ``if not torchckpt.is_recomputing():``. Buffers of modules need no guard. Left
            out: the call returns a decorator, ``@checkpoint(early_stop=False)``, each call of whose function is a
            region.
        *args, **kwargs: the arguments of ``function``: tensors, other objects, and pytrees of both. They stay in
            memory until the backward; beside them, copies of buffers do, and what :func:`keep` keeps.
        use_reentrant: accepted for code written for torch's function. There is no reentrant mode: True warns, once in a
            process, and is run as False.
        preserve_rng_state: replay with the random numbers of the forward, on the CPU, on every accelerator among the
            arguments, of Python and of NumPy. False saves the time of the snapshot, for functions that draw none.
        generators: further ``torch.Generator`` objects that the function draws from. Those among its arguments,
            attributes of its modules, and what its code names or closes over, need not be named.
        determinism_check: ``"default"`` compares the shape, dtype and device of each tensor saved in the replay with
            those of the forward. ``"values"`` also compares the bits, by a checksum. It costs a pass over each saved
            tensor and, on an accelerator, a synchronisation. ``"default"`` takes a sample of the values where
            an argument is an object that holds tensors, such as a cache, and compares it, to 2 %, where that holds
            others by the replay.
            ``"none"`` compares nothing.
        context_fn: returns two context managers, one for the forward, one for the replay, as
            :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts` makes them. Each is entered once, so a
            backward whose replay raised cannot be run again.
        debug: note in the forward the module, the operation and the line of each saved tensor, for the error of a
            replay that differs. Without it that error has those of the replay, and of the forward the operation, if a
            backward has started the replay. ``torch.utils.checkpoint.set_checkpoint_debug_enabled`` sets it for all
            regions, those of modules and of ``Pipe``, too.
        early_stop: end the replay after the last tensor that the backward needs. False runs the function to its end.
        respect_saved_tensors_hooks: True lets saved-tensor hooks around the call see what torch's selective contexts
            keep, too; from torch 2.15 on. Without such a ``context_fn`` it changes nothing.

    Returns:
        The outputs of ``function``. Under ``no_grad`` and ``inference_mode`` the call is the plain call.

    Raises:
        ArgumentError: an argument is wrong. The message lists every wrong argument.
        TransformError: under ``vmap``, ``jvp`` or ``torch.func.grad``.
        RecomputationError: at backward, when the replay does not do what the forward did.

    The saved-tensor hooks are those of non-reentrant checkpointing in torch; the idea is Chen et al., "Training Deep
    Nets with Sublinear Memory Cost", 2016.
    """
    options = DEFAULT
    if respect_saved_tensors_hooks is not None:
        context_fn = heeding(context_fn, respect_saved_tensors_hooks)
    is_plain = preserve_rng_state is early_stop is True and determinism_check == "default"
    if not is_plain or generators or context_fn or debug:
        options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop, debug)
    if use_reentrant and not torch.compiler.is_dynamo_compiling():
        _warn_of_reentrant()
    if function is None and not args:
        return _decorator(options, kwargs)
    return run(function, args, kwargs, options)  # type: ignore[arg-type]  # what is not callable is refused there


@functools.cache
def _warn_of_reentrant() -> None:
    warnings.warn(
        "torchckpt.checkpoint: use_reentrant=True is run as use_reentrant=False: nothing has to require a gradient, "
        "and keywords, autograd.grad, inputs= and double backward work, too",
        stacklevel=3,
    )


def _decorator(options: Options, kwargs: dict[str, Any]) -> Callable[[Function], Function]:
    """The decorator that ``checkpoint`` returns if it got options alone."""
    rule = "there is a keyword that is no option, and no function that takes it"
    works = "checkpoint(block, x); or checkpoint(early_stop=False)(block)(x)"
    # `run` stands for a function that is not there yet.
    check_options(run, options, [Fault(rule, f"{name}=", works) for name in kwargs], "checkpoint")

    def decorate(function: Function) -> Function:
        check_options(function, options, caller="checkpoint")

        @functools.wraps(function, updated=())  # without the attributes: those of a module are its tables
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return run(function, args, kwargs, options)

        return checkpointed

    return decorate


class Checkpointing:
    """One region, step by step: the caller chooses when its forward and its replay run.

    >>> region = torchckpt.Checkpointing(block, x)
    >>> y = region.checkpoint()       # forward; the activations are dropped
    >>> y = region.recompute(y)       # backward recomputes when it gets to this point, before it goes on
    >>> region.prefetch()             # or: recompute now, before there is any gradient
    >>> y.sum().backward()

    Takes the arguments of :func:`checkpoint` but for ``use_reentrant`` and ``respect_saved_tensors_hooks``, which go to
    the function. Make a new object for each forward. It keeps the region's inputs in memory until the replay is done.

    It puts ``Checkpoint`` at each input that requires grad and is no leaf: the function gets an alias. Where it returns
    that, the input is returned, and what it changes there in place is done to the input; do not change a view of it
    that the function returns. Of such an input, ``retain_grad()`` and hooks that are put on it behind the call get the
    gradient of what reads it there alone. It gets the others themselves, and those that it also holds, in a container
    among its arguments, its closure, its defaults, a partial or an attribute of its module, or of which it holds or
    gets a view: there it could tell the alias from the tensor. :meth:`recompute` puts ``Fork``, ``Recompute`` and
    ``Join`` at each output. ``Checkpoint`` and ``Recompute`` come from torchgpipe (Kim et al., 2020).
    """

    def __init__(
        self,
        function: Function,
        *args: Any,
        preserve_rng_state: bool = True,
        generators: Sequence[torch.Generator] = (),
        determinism_check: DeterminismCheck = "default",
        context_fn: ContextFunction | None = None,
        debug: bool = False,
        early_stop: bool = True,
        **kwargs: Any,
    ) -> None:
        self._options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop, debug)
        check_options(function, self._options, caller="Checkpointing")
        self._call: tuple[Function, tuple[Any, ...], dict[str, Any]] | None = (function, args, kwargs)
        self._frame: Frame | None = None  # set when the forward has returned, if grad mode was on

    def checkpoint(self) -> Any:
        """Run the forward, drop the activations, and return the outputs of the function. Call it once."""
        if torch.compiler.is_dynamo_compiling():
            return outside(self.checkpoint)
        if self._call is None:
            works = "torchckpt.Checkpointing(function, *args).checkpoint(), a new region for each forward"
            raise RegionError(str(Fault("the region has run its forward already", "a second checkpoint()", works)))
        (function, args, kwargs), self._call = self._call, None
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        refuse_transforms()
        if local.thread.scope is not None:
            outputs, self._frame = local.thread.scope.run(function, args, kwargs, self._options)
            return outputs
        frame = Frame(self._options)
        args, kwargs, aliases = _passed(frame, function, args, kwargs)
        outputs = frame.forward(function, args, kwargs)
        self._frame = frame
        return _given_back(outputs, aliases) if aliases else outputs

    def recompute(self, outputs: Any) -> Any:
        """Place the replay here: a backward that reaches ``outputs`` recomputes before it goes on to the region.

        Args:
            outputs: what :meth:`checkpoint` returned, or what was made from it: a tensor or a pytree.

        Returns:
            The same structure. Each tensor that requires grad is replaced by one whose backward starts the replay, in
            the same memory: do not change it in place and go on to read ``outputs``, or an input that it is.
        """
        if torch.compiler.is_dynamo_compiling():
            return outside(self.recompute, outputs)
        self._must_have_run("recompute(outputs)")
        if self._frame is None:
            return outputs
        leaves, spec = pytree.tree_flatten(outputs)
        # One node for each tensor: with a common node, the loss of one output would run the backward of all.
        joined = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        for key, leaf in joined.items():
            forked, edge = fork(leaf)  # [4]
            joined[key] = copy_attributes(leaf, join(forked, recompute(self._frame, edge)))  # [5], [8]
        return pytree.tree_unflatten([joined.get(id(leaf), leaf) for leaf in leaves], spec)

    def prefetch(self) -> None:
        """Recompute now, on this thread and its current stream. A second call does nothing.

        The stream waits for the forward's inputs, and a backward on another stream waits for the recomputation. On a
        stream other than the forward's, do not free the tensors that the function closes over until that is done.
        """
        if torch.compiler.is_dynamo_compiling():
            outside(self.prefetch)
            return
        self._must_have_run("prefetch()")
        if self._frame is not None:
            self._frame.recompute()

    @property
    def is_recomputed(self) -> bool:
        """Whether the replay is done, or there was nothing to replay."""
        return self._call is None if self._frame is None else self._frame.is_recomputed

    def _must_have_run(self, call: str) -> None:
        if self._call is not None:
            rule, received = "the region has not run its forward yet", f"{call} before checkpoint()"
            works = "outputs = region.checkpoint(); outputs = region.recompute(outputs); region.prefetch()"
            raise RegionError(str(Fault(rule, received, works)))


def _passed(
    frame: Frame, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, Tensor, int]]]:
    """The arguments, with a ``Checkpoint`` of ``frame`` on each input that requires grad and is no leaf; these inputs,
    their aliases and versions. A container is given as it is: the function may fill it."""
    held = _passed_themselves(function, [*args, *kwargs.values()])
    aliases: dict[int, tuple[Tensor, Tensor, int]] = {}

    def passed(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_leaf or id(value) in held:
            return value
        if id(value) not in aliases:
            aliases[id(value)] = value, copy_attributes(value, checkpoint_input(frame, value)), value._version
        return aliases[id(value)][1]

    args, kwargs = tuple(map(passed, args)), {name: passed(value) for name, value in kwargs.items()}
    return args, kwargs, list(aliases.values())


def _given_back(outputs: Any, aliases: Sequence[tuple[Tensor, Tensor, int]]) -> Any:
    """``outputs``, with inputs in place of their aliases. What was done to an alias in place is done to the input."""
    for value, alias, version in aliases:
        if not alias.requires_grad:
            value.detach_()
        elif (now := value._version) != version:
            if value.layout == torch.strided and (value.shape, value.stride()) != (alias.shape, alias.stride()):
                value.data = alias.data  # as behind t_()
            set_version(changed(value, alias), now)
    inputs = {id(alias): value for value, alias, _ in aliases}
    leaves, spec = pytree.tree_flatten(outputs)
    if inputs.keys().isdisjoint(map(id, leaves)):
        return outputs  # the same container, which the caller may hold
    return pytree.tree_unflatten([inputs.get(id(leaf), leaf) for leaf in leaves], spec)


def _passed_themselves(function: Any, values: Sequence[Any]) -> set[int]:
    """The ids of the arguments that the function also holds, or that share memory with another that it gets or holds:
    what it does to one in place is in the graph of the other, too."""
    inputs = [value for value in values if isinstance(value, Tensor)]
    containers = [value for value in values if not isinstance(value, Tensor)]
    held = {id(tensor): tensor for tensor in (*_held_by(function), *tensors_in(containers))}
    keys = {id(tensor): storage_key(tensor) or id(tensor) for tensor in (*inputs, *held.values())}
    sharing = Counter(keys.values())
    return {tensor for tensor, key in keys.items() if tensor in held or sharing[key] > 1}


def _held_by(function: Any) -> Iterator[Tensor]:
    """The tensors that ``function`` holds besides its arguments: in its closure, its defaults, a partial, or attributes
    of its module. Tensors nested deeper are not found."""
    values: list[Any] = []
    if isinstance(function, functools.partial):
        yield from _held_by(function.func)
        values = [*function.args, *function.keywords.values()]
    elif isinstance(function, MethodType):
        yield from _held_by(function.__func__)
        yield from _held_by(function.__self__)
    elif is_module(function):
        values = [value for module in function.modules() for value in vars(module).values()]
    elif isinstance(function, FunctionType):
        values = contents_of(function)
    yield from (value for value in values if isinstance(value, Tensor))


# Where Dynamo cannot trace a region, its graph ends before the call, which then runs as Python. Dynamo must not begin
# again inside: a replay, which a backward starts, runs outside of compiled code.
keep_from_dynamo(run, checkpoint)
