"""Runtime: operators and their properties, storages, allocations, and what torch wraps modules in."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "BATCH_NORM", "BATCH_NORM_AGAIN", "BATCH_NORM_BACKWARD", "BATCH_NORM_BY_STATISTICS", "FUSED_LSTM", "allocations",
    "argument_of", "branches_of", "call_with", "has_effect", "hooks_of_all_modules", "is_backward", "is_branching",
    "is_check", "is_collective", "is_flattened", "is_mutable", "is_random", "is_traced_by_others", "is_transformed",
    "note_branches", "operating", "parts_of", "signed", "storage_number", "without_modes",
]

BATCH_NORM: Any = torch.ops.aten._native_batch_norm_legit_functional.default
BATCH_NORM_AGAIN: Any = torch.ops.aten._native_batch_norm_legit.no_stats
BATCH_NORM_BY_STATISTICS: Any = torch.ops.aten._native_batch_norm_legit_no_training.default
BATCH_NORM_BACKWARD: Any = torch.ops.aten.native_batch_norm_backward.default
FUSED_LSTM: Any = torch.ops.aten.mkldnn_rnn_layer.default
_CHECKS: Any = (
    torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg,
    torch.ops.aten._functional_assert_async.msg, torch.ops.aten._assert_scalar.default,
)
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")


def is_random(target: object) -> bool:
    """Whether an operator draws from a generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def argument_of(node: fx.Node, name: str) -> Any:
    """The value of the operator's parameter ``name`` at ``node``, or its default; None if it has no such parameter."""
    parameters = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    for place, parameter in enumerate(parameters):
        if parameter.name == name:
            value = node.args[place] if place < len(node.args) else parameter.default_value
            return node.kwargs.get(name, value)
    return None


def is_backward(node: fx.Node) -> bool:
    """Whether the backward has made ``node`` of a joint graph."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_collective(target: object) -> bool:
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVES


def is_mutable(target: object) -> bool:
    """Whether an operator writes to one of its arguments."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_check(target: object) -> bool:
    """Whether an operator is an assertion: it only raises an error if a value is wrong."""
    return target in _CHECKS


def has_effect(target: object) -> bool:
    """Whether an operator runs for its side effect, such as an assertion, and not for its result."""
    return target is torch.ops.higher_order.with_effects or is_check(target)


def is_branching(target: object) -> bool:
    """Whether an operator is ``torch.cond``, which runs one of two graphs, depending on a value."""
    return target is torch.ops.higher_order.cond


def note_branches(module: fx.GraphModule) -> None:
    """Store each branch graph of control flow in ``meta["val"]`` of the node that reads it from ``module``."""
    for node in module.graph.find_nodes(op="get_attr"):
        part: Any = module
        for name in str(node.target).split("."):
            part = getattr(part, name, None)
        if isinstance(part, fx.GraphModule):
            node.meta["val"] = part


def branches_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that an operator of control flow may run."""
    parts = [source.meta.get("val") for source in node.all_input_nodes if source.op == "get_attr"]
    return [part for part in parts if isinstance(part, fx.GraphModule)]


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


def is_flattened(module: nn.Module) -> bool:
    """Whether FSDP1 has replaced the parameters of ``module`` by plain tensors, views of its flat parameter."""
    is_managed = bool(getattr(module, "_is_fsdp_managed_module", False))
    return is_managed and any(isinstance(value, Tensor) for value in vars(module).values())


def storage_number(tensor: Tensor) -> int:
    """The number of the tensor's storage: equal for views of one tensor. A sparse tensor has its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with storages that make up ``tensor``: itself, or the indices and values of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout == torch.strided else []


def signed(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` as a conjugate or a negative view, where ``like`` is one: a kernel may make a copy of such a view."""
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


def call_with(module: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """Call ``module`` with ``state`` in place of its parameters and buffers. In it, parameters are still instances of
    ``nn.Parameter``."""
    for name, _ in module.named_parameters():
        state[name]._is_param = True
    return torch.func.functional_call(module, state, args, kwargs)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    from torch.autograd import forward_ad

    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_traced_by_others() -> bool:
    """Whether ``torch.export`` or ``make_fx`` traces."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return mode is not None or torch.compiler._is_exporting_flag


def hooks_of_all_modules() -> tuple[Any, ...]:
    """The global module hooks, without torch's own: those come and go, and do not change results."""
    from torch.nn.modules import module

    kinds = (
        module._global_forward_pre_hooks, module._global_forward_hooks,
        module._global_backward_pre_hooks, module._global_backward_hooks,
    )
    if not any(kinds):
        return ()
    return tuple(
        (place, hook) for place, kind in enumerate(kinds) for hook in kind.values()
        if str(getattr(hook, "__module__", "")).partition(".")[0] != "torch"
    )


def without_modes() -> AbstractContextManager[Any]:
    """Inside this context, operations really run, also during a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def allocations(run: Callable[[], Any], device: str = "cpu") -> list[int]:
    """The bytes that ``run()`` allocates on ``device``, in order of time; negative numbers are bytes that it frees.

    The numbers come from the legacy memory profiler, which starts without a tracing library.
    """
    from torch._C._profiler import _ExperimentalConfig

    autograd: Any = torch.autograd

    autograd._enable_profiler_legacy(
        autograd.ProfilerConfig(autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )
    try:
        run()
    finally:
        threads = autograd._disable_profiler_legacy()
    events = (event for thread in threads for event in thread if event.kind() == "memory_alloc")
    return [int(event.cpu_memory_usage() if device == "cpu" else event.cuda_memory_usage()) for event in events]
