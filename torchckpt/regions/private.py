"""Private: every private name of torch that regions import, each with its public counterpart or the reason.

The public wrappers call these names. Without the wrappers a region of tiny operations costs a fifth less. One test
searches the package for private names in other files; another compares each name here with its public counterpart.
Where a name gets around something in torch, its docstring says in which file of torch that is, and what ends it.
"""
from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import dropwhile
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from torchckpt.errors import CheckpointError, Fault
from torchckpt.features import warn_of_newer_torch
from torchckpt.modules import is_compiled_function

__all__ = [
    "DeviceContext", "DispatchMode", "after_backward", "alive", "alive_storage", "allow_kernels", "apply_of",
    "autocast_is_on", "batch_norm_layer", "caching_mode", "compiler_of", "compiler_stance", "dispatch_modes_are_active",
    "forward_ad", "frame_of_torch", "function_modes", "functorch_is_active", "heeds_hooks", "hooks_entered",
    "hooks_in_force", "is_exporting", "is_fake", "is_of_newest_node", "keep_from_dynamo", "kept_by_policies",
    "kernels_allowed", "keys_are_put_back", "leave_modes", "look_through", "modes_are_active", "mutation_is_allowed",
    "negated", "newest_node", "norm_layer", "number_of", "only_hooks", "outside_transforms", "packed_by",
    "parametrized", "pop_hooks", "profiler_is_on", "push_hooks", "put_under_modes", "running_node", "set_grad_enabled",
    "set_version", "settings_of_torch", "storage_key", "take_from_modes", "torch_functions_are_seen", "use_count",
    "use_stance", "with_torch_functions", "without_selective_modes",
]

try:
    from torch._C import _are_functorch_transforms_active as functorch_is_active  # Function.apply asks; no public form
    from torch._C import _current_autograd_node as running_node  # the one whose backward runs, or None; no public form
    from torch._C import (
        _get_dispatch_stack_at,
        _get_tracing_state,  # None where torch.jit.is_tracing() is false, and in graphs of Dynamo
        _pop_torch_dispatch_stack,
        _push_on_torch_dispatch_stack,
        _storage_Use_Count,
    )
    from torch._C import _is_any_autocast_enabled as autocast_is_on  # torch.is_autocast_enabled, on all devices
    from torch._C import _is_torch_function_enabled as torch_functions_are_seen  # by subclasses; no public form
    from torch._C import _len_torch_dispatch_stack as dispatch_modes_are_active  # TorchDispatchMode; no public form
    from torch._C import _len_torch_function_stack as modes_are_active  # a torch.device context is a mode on that stack
    from torch._C import _set_grad_enabled as set_grad_enabled  # torch.set_grad_enabled
    from torch._C._autograd import _get_sequence_nr as _next_node  # no public form
    from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_hooks  # saved_tensors_hooks.__exit__
    from torch._C._autograd import _profiler_enabled as profiler_is_on  # in this thread; no public form
    from torch._C._autograd import _push_saved_tensors_default_hooks as push_hooks  # saved_tensors_hooks.__enter__
    from torch._C._autograd import _top_saved_tensors_default_hooks as hooks_in_force  # no public form
    from torch._C._autograd import _unsafe_set_version_counter as _set_versions
    from torch._C._functorch import is_functorch_wrapped_tensor as _is_transformed
    from torch.autograd import forward_ad  # its _current_level: whether a dual_level is entered; no public form
    from torch.nn.modules.batchnorm import _BatchNorm as batch_norm_layer  # the base of BatchNorm and SyncBatchNorm
    from torch.nn.modules.batchnorm import _NormBase as norm_layer  # the base of BatchNorm, InstanceNorm, SyncBatchNorm
    from torch.overrides import _get_current_function_mode_stack as function_modes  # TorchFunctionMode; no public form
    from torch.utils._device import DeviceContext  # the mode that torch.device is as a context
    from torch.utils._python_dispatch import TorchDispatchMode  # public in all but its module
    from torch.utils.checkpoint import _CachedTorchDispatchMode as cached_mode  # that of a selective replay
    from torch.utils.checkpoint import _CachingTorchDispatchMode as caching_mode  # of a selective forward; none public
    from torch.utils.checkpoint import _checkpoint_debug_enabled  # noqa: F401  # see settings_of_torch

    _KINDS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp", "cudnn", "mkldnn")
    _1, _2, _3, _4, _5, _6 = (getattr(torch._C, f"_get_{kind}_enabled") for kind in _KINDS)
except (AttributeError, ImportError) as missing:
    rule = "torchckpt needs something of torchckpt/regions/private.py that this torch does not have"
    works = "pip install 'torch>=2.11', or the release of torchckpt that was made for this torch"
    raise CheckpointError(str(Fault(rule, str(missing), works))) from missing

warn_of_newer_torch(torch.__version__)


def alive(reference: weakref.ref[Tensor]) -> Tensor | None:
    """The tensor, if it is still alive: what calling a ``TensorWeakRef`` does (torch/utils/weak.py)."""
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined]  # missing in torch's stubs
    return tensor


def set_version(tensor: Tensor, version: int) -> Tensor:
    """``tensor``, whose counter of changes in place now says ``version``; no public form."""
    if not tensor.is_inference() and tensor._version != version:
        _set_versions((tensor,), (version,))
    return tensor


def is_of_newest_node(tensor: Tensor) -> bool:
    """Whether the node that made ``tensor`` is the last that this thread has made; no public form."""
    node: Any = tensor.grad_fn
    return node is not None and node._sequence_nr() + 1 == _next_node()


def newest_node() -> int:
    """The number of the autograd node that this thread made last; no public form."""
    return _next_node() - 1


def number_of(node: Node) -> int:
    """The number of an autograd node: nodes that were made later have larger ones. No public form."""
    return int(node._sequence_nr())


def packed_by(node: Node) -> Iterator[object]:
    """What is saved for ``node``: what hooks have packed, or tensors; None if it is released. No public form."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(AttributeError, RuntimeError):
                raw = getattr(node, name)
                yield from [saved.data for saved in (raw if isinstance(raw, tuple) else (raw,)) if saved is not None]


def apply_of(function: type[Function]) -> Callable[..., Any]:
    """``function.apply`` without its check for functorch transforms (torch/autograd/function.py), which regions refuse
    when they are entered."""
    apply: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]  # untyped in torch
    return apply


def storage_key(tensor: Tensor) -> int | None:
    """The key of the tensor's storage: equal for two live tensors that share memory. None if sparse, as it has none.
    A ``StorageWeakRef`` (torch/multiprocessing/reductions.py) has the same address, but takes four times as long."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided and not _is_transformed(tensor) else None


def use_count(held: Tensor | StorageWeakRef) -> int:
    """How many tensors hold a storage. No public form; torch/_inductor/cudagraph_trees.py counts its own look, too."""
    address = held.untyped_storage()._cdata if isinstance(held, Tensor) else held.cdata
    return int(_storage_Use_Count(address)) - 1


def negated(tensor: Tensor) -> Tensor:
    """A view that is read as the negative of ``tensor``. No public form makes it of a real tensor."""
    view: Tensor = torch._neg_view(tensor)
    return view


def alive_storage(storage: StorageWeakRef) -> Any:
    """The storage; None if it was freed. No public form."""
    return torch.UntypedStorage._new_with_weak_ptr(storage.cdata)


def is_fake() -> bool:
    """Whether operators make tensors without data, as while AOTAutograd traces. No public form."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_exporting() -> bool:
    """Whether ``torch.export`` or ``torch.jit.trace`` traces. ``torch.compiler.is_exporting()`` is public, but true in
    every graph that Dynamo of torch 2.11 traces. When that release is no longer supported, call it instead."""
    return torch.compiler._is_exporting_flag or _get_tracing_state() is not None


def mutation_is_allowed() -> bool:
    """Whether ``torch.autograd.graph.allow_mutation_on_saved_tensors`` is entered. No public form."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def compiler_of(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """The compiler that made ``compiled``, with the arguments given to ``torch.compile``; None if it is not found. No
    public form: it is in the closure of what torch/_dynamo/eval_frame.py returns."""
    closure = inspect.getclosurevars(compiled).nonlocals if inspect.isfunction(compiled) else {}
    compiler: Callable[..., Any] | None = closure.get("self")
    return compiler if is_compiled_function(compiled) and callable(compiler) else None


def compiler_stance() -> Any:
    """The stance that ``torch.compiler.set_stance`` has set; None where Dynamo was not imported. Public code can set a
    stance and cannot read it (torch/_dynamo/eval_frame.py)."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return None if dynamo is None else getattr(dynamo, "_stance", None)


settings_of_torch: Mapping[str, Any] = vars(torch.utils.checkpoint)
"""Its ``"_checkpoint_debug_enabled"`` is what ``torch.utils.checkpoint.set_checkpoint_debug_enabled`` has set. Public
code can set it and cannot read it. A dictionary, since to read it is no call."""
parametrized: dict[str, Any] = vars(torch.nn.utils.parametrize)
"""Its ``"_cache_enabled"`` and ``"_cache"`` are what ``parametrize.cached()`` has entered, and what is cached."""


def use_stance(stance: Any) -> AbstractContextManager[None]:
    """Set the stance of ``torch.compiler``, in all threads, from now to the end of the block."""
    skips = stance.skip_guard_eval_unsafe
    return torch.compiler.set_stance(stance.stance, skip_guard_eval_unsafe=skips, force_backend=stance.backend)  # type: ignore[no-any-return]


_TURNS = ("sdp_use_flash", "sdp_use_mem_efficient", "sdp_use_math", "sdp_use_cudnn", "cudnn_enabled", "mkldnn_enabled")


def kernels_allowed() -> list[bool]:
    """Whether kinds of attention, cuDNN and oneDNN may run, as ``sdpa_kernel`` and ``torch.backends`` set it in all
    threads. The public forms take ten times as long."""
    return [_1(), _2(), _3(), _4(), _5(), _6()]  # a comprehension would take twice as long


def allow_kernels(allowed: list[bool]) -> None:
    for name, is_on in zip(_TURNS, allowed):
        getattr(torch._C, f"_set_{name}")(is_on)


_FRAMES = {
    "_checkpoint_hook.__init__.<locals>.pack_hook": ("frame", False),
    "_recomputation_hook.__init__.<locals>.pack_hook": ("target_frame_ref", True),
}


def frame_of_torch(pack: Callable[..., Any]) -> tuple[Any, bool] | None:
    """The frame of a hook ``pack`` of torch's non-reentrant checkpointing, and whether it is replaying now. None for
    other hooks. No public form: the frame is in the closure of the hook (torch/utils/checkpoint.py)."""
    if getattr(pack, "__module__", None) != torch.utils.checkpoint.__name__:
        return None
    pack = inspect.unwrap(pack)
    name, is_replayed = _FRAMES.get(pack.__qualname__, ("", False))
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    content = cells[name].cell_contents if name in cells else None
    frame = content() if is_replayed and content is not None else content
    return None if frame is None else (frame, is_replayed)


@contextmanager
def without_selective_modes() -> Iterator[None]:
    """Inside the block, torch's selective contexts see (and count) no operators; other modes do. No public form."""
    above = [*dropwhile(lambda mode: not isinstance(mode, (caching_mode, cached_mode)), _dispatch_modes())]
    others = [mode for mode in above if not isinstance(mode, (caching_mode, cached_mode))]
    _exchange_modes(above, others)
    try:
        yield
    finally:
        _exchange_modes(others, above)


def _dispatch_modes() -> list[Any]:
    """The modes of this thread, from below to above. No public form."""
    return [_get_dispatch_stack_at(place) for place in range(dispatch_modes_are_active())]


def _exchange_modes(old: list[Any], new: list[Any]) -> None:
    for _ in old:
        _pop_torch_dispatch_stack(None)
    for mode in new:
        _push_on_torch_dispatch_stack(mode)


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside the block, no functorch transform is entered. No public form (torch/_functorch/pyfunctorch.py)."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # late: who transforms has imported it

    return temporarily_clear_interpreter_stack()


def with_torch_functions(seen: bool) -> AbstractContextManager[None]:
    """Inside the block, subclasses of Tensor see them, or not. The backward of a subclass runs unseen by it."""
    context: Any = torch._C._EnableTorchFunction if seen else torch._C.DisableTorchFunctionSubclass
    return context()  # type: ignore[no-any-return]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """torch's mode, but for how Dynamo skips it: torch's way imports Dynamo at the first operator, in seconds."""

    is_over = False

    def __init_subclass__(cls) -> None:
        keep_from_dynamo(cls.__torch_dispatch__)
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # likewise

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def kept_by_policies(pack: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside the block, ``pack`` gets each tensor that a selective policy keeps in eager code: these are no saved
    tensors (torch/utils/checkpoint.py). The policy holds what it returns, too. No public form."""
    wrapper: Any = torch.utils.checkpoint._VersionWrapper
    init = wrapper.__init__

    def watched(wrapped: Any, value: object) -> None:
        init(wrapped, value)
        wrapped.packed = pack(value) if type(value) is Tensor else None  # a tracer has other classes

    wrapper.__init__ = watched
    try:
        yield
    finally:
        wrapper.__init__ = init


def put_under_modes(mode: DispatchMode) -> None:
    """Enter ``mode`` below all modes of this thread, to leave it at any time: others leave the top. No public form."""
    modes = _dispatch_modes()
    _exchange_modes(modes, [mode, *(one for one in modes if one is not mode and not getattr(one, "is_over", False))])
    mode.is_over = False


def take_from_modes(mode: DispatchMode) -> None:
    """Leave what :func:`put_under_modes` has entered in this thread, if it has: now, or by :func:`leave_modes`.

    The end of inference mode, and of what :func:`keys_are_put_back` tells, puts back keys of a mode that is there no
    more, and no tensor could be made. Inside of them ``mode`` stays. The garbage collector may call this anywhere.
    """
    mode.is_over = True
    leave_modes()


def leave_modes() -> None:
    """Leave the modes of this thread that could not be left when :func:`take_from_modes` was called, if they can be."""
    modes = _dispatch_modes()
    left = [one for one in modes if not getattr(one, "is_over", False)]
    if len(left) < len(modes) and not torch.is_inference_mode_enabled() and not keys_are_put_back():
        _exchange_modes(modes, left)


def keys_are_put_back() -> bool:
    """Whether a mode's ``__torch_dispatch__`` runs, or what ``torch.compile`` returned (``compile_wrapper``)."""
    frame: FrameType | None = sys._getframe()
    ends = (".__torch_dispatch__", "torch._dynamo.eval_frame.compile_wrapper")
    while frame is not None and not f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}".endswith(ends):
        frame = frame.f_back
    return frame is not None


def after_backward(call: Callable[[], None]) -> None:
    """Inside a backward: call ``call`` when all of it is done. No public form; DDP and FSDP do the same."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def keep_from_dynamo(*functions: Callable[..., Any]) -> None:
    """Make Dynamo skip ``functions``, the functions defined inside them, and all that they call.

    Autograd and modules call them from compiled code. ``torch.compiler.disable`` does the same, but imports Dynamo
    (torch/compiler/__init__.py): when it no longer does, call it instead.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # Dynamo then compiles them too, in a region around compiled code
        return
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    codes = [function.__code__ for function in functions]
    for code in codes:
        set_code_exec_strategy(code, skip)
        codes.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))


def hooks_entered() -> list[tuple[Any, Any]]:
    """The saved-tensor hooks of this thread, from the outermost pair to the one in force. No public form."""
    stack: list[tuple[Any, Any]] = []
    while (hooks := hooks_in_force(True)) is not None:
        stack.append(hooks)
        pop_hooks()
    stack.reverse()
    _exchange_hooks((), stack)
    return stack


@contextmanager
def only_hooks(hooks: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Inside the block, ``hooks`` are in force in place of those that were entered. No public form."""
    stack = hooks_entered()
    _exchange_hooks(stack, hooks)
    try:
        yield
    finally:
        _exchange_hooks(hooks, stack)


def _exchange_hooks(old: Sequence[tuple[Any, Any]], new: Sequence[tuple[Any, Any]]) -> None:
    for _ in old:
        pop_hooks()
    for pack, unpack in new:
        push_hooks(pack, unpack)


_ASKS_FOR_HOOKS = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")


def look_through(*packs: Callable[..., Any], users: object = None) -> None:
    """Mark hooks as internal, so that torch does not take them for saved-tensor hooks of the user, which are ``users``.

    From torch 2.14 on, selective contexts warn of the user's hooks, because the tensors that they keep do not pass
    through such hooks. No public form.
    """
    if _ASKS_FOR_HOOKS:
        for pack in packs:
            pack.__dict__.update(_checkpoint_internal=True, _user_hooks=users)


heeds_hooks = "respect_saved_tensors_hooks" in inspect.signature(torch.utils.checkpoint.checkpoint).parameters
"""Whether selective contexts can pass what they keep through the user's hooks."""
