"""``checkpoint`` and ``Checkpointing``: a region, in one call or by hand."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from torchckpt.errors import Fault, RegionError, TransformError
from torchckpt.kernel.checkpoint import checkpoint as checkpoint_input
from torchckpt.kernel.checkpoint import held_by
from torchckpt.kernel.dependency import fork, join
from torchckpt.kernel.flags import thread
from torchckpt.kernel.frame import Frame
from torchckpt.kernel.options import DEFAULT, Options, checked
from torchckpt.kernel.private import forward_ad, functorch_is_active
from torchckpt.kernel.recompute import recompute
from torchckpt.kernel.trees import tensors_of
from torchckpt.typing import ContextFunction, DeterminismCheck, Function

__all__ = ["Checkpointing", "checkpoint", "outside", "refuse_transforms", "run"]

_REENTRANT = Fault(
    "use_reentrant must be False or None: a nested backward breaks autograd.grad, inputs=, double backward and split "
    "backward, and cannot stop early",
    "use_reentrant=True",
    "checkpoint(function, x)",
)
_DEBUG = Fault(
    "debug must be False: errors name the tensor that differs without a trace of operators",
    "debug=True",
    'checkpoint(function, x, determinism_check="values")',
)


def run(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """``function(*args, **kwargs)`` as a region."""
    if torch.compiler.is_exporting():  # what is exported has no backward of its own, and torch.export no regions
        return function(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():  # a constant for Dynamo, which reads this line while it traces the caller
        return in_graph(function, args, kwargs, options)
    if options is not DEFAULT or not callable(function):
        checked("checkpoint", function, options)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    refuse_transforms()
    if thread.scope is not None:
        return thread.scope.run(function, args, kwargs, options)[0]
    return Frame(options).forward(function, args, kwargs)


def in_graph(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """What :func:`torch.utils.checkpoint.checkpoint` is in a graph that Dynamo traces: an operator of torch's."""
    if options.generators:
        return outside(run, function, args, kwargs, options)
    if options.context_fn is not None:
        kwargs = {**kwargs, "context_fn": options.context_fn}
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
    from torchckpt.kernel.outside_graph import outside_graph

    return outside_graph(call, *args)


def refuse_transforms() -> None:
    """Raise ``TransformError`` inside a transform that regions do not support."""
    # The check is here, and not left to autograd: under torch.func.grad the hooks would be passed by in silence.
    if functorch_is_active() or forward_ad._current_level >= 0:
        raise TransformError(
            "a region cannot be entered under vmap, jvp, torch.func.grad or forward-mode AD\n"
            "  received: a call inside such a transform\n"
            "  works:    block(x) itself inside the transform; or torch.autograd.grad, double backward included, "
            "through checkpoint(block, x)"
        )


def checkpoint(
    function: Function,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    generators: Sequence[torch.Generator] = (),
    determinism_check: DeterminismCheck = "default",
    context_fn: ContextFunction | None = None,
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` without keeping its activations; the backward computes them again.

    A drop-in for :func:`torch.utils.checkpoint.checkpoint`. Outputs and gradients are equal to the bit to those of the
    plain call, with dropout, double backward, ``torch.autograd.grad`` and every other way through autograd.

    >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    >>> y = torchckpt.checkpoint(block, torch.randn(4, 8))
    >>> y.sum().backward()

    Args:
        function: any callable. What it returns is returned. It may close over tensors; state that it changes itself
            is changed again by the replay, unless under ``if not torchckpt.is_recomputing():`` (torch's norm layers
            need no guard).
        *args, **kwargs: its arguments: tensors, anything else, and pytrees of both. Their tensors are all that is kept.
        use_reentrant: False or None, for callers of torch's function. There is no reentrant mode.
        preserve_rng_state: replay with the random numbers of the forward: CPU, and every accelerator among the
            arguments. Off saves the snapshot, for functions that draw none.
        generators: further ``torch.Generator`` objects that the function draws from.
        determinism_check: ``"default"`` compares shape, dtype and device of what the replay saves with the forward's;
            ``"values"`` the bits as well, by a checksum that costs a pass over each saved tensor, and on an accelerator
            a synchronisation; ``"none"`` nothing.
        context_fn: returns two context managers, one for the forward, one for the replay, as
            :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts` makes them. Each is entered once, so a
            backward whose replay raised cannot be tried again.
        debug: False, for callers of torch's function; ``determinism_check="values"`` serves its purpose.
        early_stop: end the replay with the last tensor that is needed. Off runs the function to its end.

    Returns:
        What ``function`` returns. Under ``no_grad`` and ``inference_mode`` that is all that happens.

    Raises:
        ArgumentError: a wrong call, all its faults in one message.
        TransformError: under ``vmap``, ``jvp`` or ``torch.func.grad``.
        RecomputationError: at backward, when the replay does not do what the forward did.

    The saved-tensor hooks are those of non-reentrant checkpointing in torch; the idea is Chen et al., "Training Deep
    Nets with Sublinear Memory Cost", 2016.
    """
    options = DEFAULT
    if not (preserve_rng_state is early_stop is True and determinism_check == "default") or generators or context_fn:
        options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop)
    if use_reentrant or debug:
        unsupported = [fault for fault, given in ((_REENTRANT, use_reentrant), (_DEBUG, debug)) if given]
        checked("checkpoint", function, options, unsupported)
    return run(function, args, kwargs, options)


class Checkpointing:
    """The pair by hand: one region whose forward, and the place of whose replay, the caller chooses.

    >>> region = torchckpt.Checkpointing(block, x)
    >>> y = region.checkpoint()       # forward; the activations are dropped
    >>> y = region.recompute(y)       # backward recomputes when it gets to this point, before it goes on
    >>> region.prefetch()             # or: recompute now, before there is any gradient
    >>> y.sum().backward()

    Takes the arguments of :func:`checkpoint`. It is for one forward. While it is referenced, so are the region's
    inputs, until they have been recomputed.

    In the graph stand two autograd Functions, ``Checkpoint`` at the region's inputs and ``Recompute`` where
    :meth:`recompute` is called; they are torchgpipe's (Kim et al., 2020). Behind ``Checkpoint`` the function gets an
    alias of an input that was computed with a gradient. A leaf it gets itself, and so a tensor that it closes over or
    that is an attribute of its module: it could tell that from an alias.
    """

    def __init__(
        self,
        function: Function,
        *args: Any,
        preserve_rng_state: bool = True,
        generators: Sequence[torch.Generator] = (),
        determinism_check: DeterminismCheck = "default",
        context_fn: ContextFunction | None = None,
        early_stop: bool = True,
        **kwargs: Any,
    ) -> None:
        self._options = Options(preserve_rng_state, generators, determinism_check, context_fn, early_stop)
        checked("Checkpointing", function, self._options)
        self._call: tuple[Function, tuple[Any, ...], dict[str, Any]] | None = (function, args, kwargs)
        self._frame: Frame | None = None  # of a forward that has returned, where gradients were on

    def checkpoint(self) -> Any:
        """Run the forward, drop the activations, and return what the function returns. Once."""
        if torch.compiler.is_dynamo_compiling():
            return outside(self.checkpoint)
        if self._call is None:
            raise RegionError(
                "a region runs its forward once\n  received: a second checkpoint()\n"
                "  works:    torchckpt.Checkpointing(function, *args).checkpoint(), a new region for each forward"
            )
        (function, args, kwargs), self._call = self._call, None
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        refuse_transforms()
        if thread.scope is not None:
            outputs, self._frame = thread.scope.run(function, args, kwargs, self._options)
            return outputs
        frame = Frame(self._options)
        outputs = frame.forward(function, *_passed(frame, function, args, kwargs))
        self._frame = frame
        return outputs

    def recompute(self, outputs: Any) -> Any:
        """Place the replay here: a backward that reaches ``outputs`` recomputes before it goes on to the region.

        Args:
            outputs: what :meth:`checkpoint` returned, or what was made from it: a tensor or a pytree.

        Returns:
            The same, with the tensors that require grad replaced by ones that carry the edges.
        """
        if torch.compiler.is_dynamo_compiling():
            return outside(self.recompute, outputs)
        self._must_have_run("recompute(outputs)")
        if self._frame is None:
            return outputs
        leaves, spec = pytree.tree_flatten(outputs)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                # One node for each: had they one in common, a loss of one would run the backward into all.
                forked, edge = fork(leaf)
                leaves[place] = join(forked, recompute(self._frame, edge))
        return pytree.tree_unflatten(leaves, spec)

    def prefetch(self) -> None:
        """Recompute now, on this thread and its current stream, unless it is done already.

        The stream waits for the forward's inputs, and a backward on another stream waits for this. On a stream other
        than the forward's, tensors that the function closes over are the caller's to keep until the stream is done.
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
            raise RegionError(
                f"a region must run its forward first\n  received: {call} before checkpoint()\n"
                "  works:    outputs = region.checkpoint(); outputs = region.recompute(outputs); region.prefetch()"
            )


def _passed(
    frame: Frame, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with the inputs that have a gradient of their own behind the ``Checkpoint`` of ``frame``."""
    tensors, put_back = tensors_of((args, kwargs))
    held = {id(tensor) for tensor in held_by(function)}
    inner = [tensor.requires_grad and not tensor.is_leaf and id(tensor) not in held for tensor in tensors]
    return put_back([checkpoint_input(frame, t) if is_inner else t for t, is_inner in zip(tensors, inner)])  # type: ignore[no-any-return]
