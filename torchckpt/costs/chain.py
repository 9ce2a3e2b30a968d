"""Chain: run the stages that a user's function makes, one after the other, on tensors without memory."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchckpt.costs.count import Counted
from torchckpt.costs.operation import kernels_of
from torchckpt.costs.parts import RegionSeen, repeated_children
from torchckpt.costs.private import VALUES_ASKED, is_unallocated, sharded_kind, unallocated
from torchckpt.costs.profile import Spent, profiled
from torchckpt.errors import ArgumentError, CheckpointError, Fault, named
from torchckpt.regions.flags import state_lock
from torchckpt.tensors import tensors_in

__all__ = ["Build", "Mesh", "counted_chain", "profiled_chain"]

Build: TypeAlias = Callable[[], Any]
"""Returns the stages and the input of the first stage; optionally also a loss function of the last stage's output."""

_T = TypeVar("_T")
Count: TypeAlias = Callable[[nn.Module, Callable[[], Any], Any, "Sequence[nn.Module] | None"], "tuple[_T, Any]"]
"""Runs a stage, by its call and inputs, with these children as blocks; the result, and what the stage returns."""
Mesh: TypeAlias = Callable[[], "AbstractContextManager[None]"]
"""Makes what is entered where ranks are not there."""

_one_at_a_time = threading.RLock()
"""Held by who counts: each setting that it changes is one of the whole process, and is put back as it was found."""
_WORKS = "def stages(): return [first, second], tokens; or: return [first, second], tokens, loss"


@dataclass(frozen=True)
class _Chain:
    """What the user's function returned, checked."""

    stages: list[nn.Module]
    inputs: tuple[Any, ...]
    loss: Callable[[Any], Any] | None

    def ends_with_loss(self, index: int) -> bool:
        return self.loss is not None and index == len(self.stages) - 1

    def call(self, index: int, inputs: tuple[Any, ...]) -> Any:
        """Call the stage; after the last one, the loss."""
        outputs = self.stages[index](*inputs)
        return self.loss(outputs) if self.loss is not None and self.ends_with_loss(index) else outputs


def counted_chain(
    build: Build, count: Count[Counted], kernels: str, dtype: torch.dtype | None, mesh: Mesh | None
) -> list[Counted]:
    """Count each stage, called with the output of the previous stage. An ArgumentError, if ``build`` raises or returns
    something else, or if a stage does not run. ``mesh`` is entered around all for stages that are shares of larger
    ones; None where such stages are refused."""
    with _environment(kernels, dtype, mesh):
        with _stand_ins(_checked(build, mesh is not None)) as chain:
            with suppress(RegionSeen):
                return _each(chain, count, repeated_children(chain.stages))
            if mesh is None:
                return _each(chain, count, None)
        # The forward that was interrupted leaves FSDP2 in the middle of a step, so the stages are made anew.
        with _stand_ins(_checked(build, mesh is not None)) as chain:
            return _each(chain, count, None)


def profiled_chain(build: Build, dtype: torch.dtype | None, device: torch.device) -> list[Spent]:
    """Run each stage on ``device``, where ``build`` makes it; what its parts take. Errors as of `counted_chain`."""
    with _one_at_a_time, _default_dtype(dtype), torch.device(device), torch.enable_grad():
        chain, run = _checked(build, False), partial(profiled, device=device)
        with suppress(RegionSeen):
            return _each(chain, run, repeated_children(chain.stages))
        return _each(chain, run, None)


def _each(chain: _Chain, count: Count[_T], children: Sequence[nn.Module] | None) -> list[_T]:
    results: list[_T] = []
    inputs = chain.inputs
    for index, stage in enumerate(chain.stages):
        call = partial(chain.call, index, inputs)
        blocks = None if children is None else [module for module in stage.modules() if module in set(children)]
        with _explained(index, chain, inputs):
            result, outputs = count(stage, call, inputs, blocks)
        if not tensors_in(outputs):
            works = "a stage that returns a tensor, or a tuple, list or dict of tensors"
            _refuse("a stage returns no tensor that is seen", f"stage {index} returns {_kind(outputs)}", works=works)
        results.append(result)
        inputs = _handed_on(outputs)
    return results


@contextmanager
def _environment(kernels: str, dtype: torch.dtype | None, mesh: Mesh | None) -> Iterator[None]:
    with _one_at_a_time, state_lock, ExitStack() as stack:  # replays of other threads wait that need other settings
        if "torch._dynamo" in sys.modules:  # operators inside a compiled module cannot be seen
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_onednn())
        stack.enter_context(unallocated())
        if mesh is not None:
            stack.enter_context(mesh())
        stack.enter_context(kernels_of(kernels))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_default_dtype(dtype))
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Its kernel of an LSTM saves a workspace that is not known without memory, and torch counts no FLOPs of it."""
    backend: Any = torch.backends.mkldnn
    before, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = before


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


def _checked(build: Build, is_sharded: bool) -> _Chain:
    if isinstance(build, nn.Module) or not callable(build):
        _refuse("the first argument is not a function that makes the stages", _kind(build))
    try:
        returned = build()
    except CheckpointError:
        raise
    except Exception as error:  # of the user's code
        _refuse("the function that makes the stages failed; tensors have no values there", _text(error), error)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        _refuse("the function does not return the stages, and what the first is called with", _kind(returned))
    stages, example, loss = (*returned, None)[:3]
    if isinstance(stages, (nn.ModuleList, nn.Sequential)):
        stages = list(stages)
    if not isinstance(stages, (list, tuple)) or not stages or not all(isinstance(s, nn.Module) for s in stages):
        _refuse("the stages that the function returns are no list of modules", f"stages={_kind(stages)}")
    inputs = example if isinstance(example, tuple) else (example,)
    if not tensors_in(inputs):
        _refuse("the example that the function returns has no tensor", f"an example of {_kind(example)}")
    if loss is not None and not callable(loss):
        _refuse("the loss that the function returns is not callable", _kind(loss))
    _refuse_sharded(stages, inputs, is_sharded)
    return _Chain(list(stages), inputs, loss)


def _refuse_sharded(stages: Sequence[nn.Module], inputs: tuple[Any, ...], in_mesh: bool) -> None:
    """Refuse shares that would be counted wrong: outside of a mesh all, in one those with memory and those of FSDP1."""
    values = [(f"stage {index}: {name or 'it'}", value) for index, stage in enumerate(stages)
              for name, value in (*stage.named_modules(), *stage.named_parameters(), *stage.named_buffers())]
    for place, value in [*values, *(("an input of the first stage", tensor) for tensor in tensors_in(inputs))]:
        kind = sharded_kind(value)
        if kind is not None and not in_mesh:
            works = "with fake_mesh(dp=2, tp=4) as mesh: pipeline_costs(lambda: stages(mesh), device)"
            _refuse("a tensor is sharded over ranks, and no mesh was told", f"{place} is a {kind}", works=works)
        if kind is not None and (isinstance(value, nn.Module) or not is_unallocated(value)):
            rule = "a share of a larger tensor has memory, or is hidden by its module"
            works = "fully_shard(), or parallelize_module(), of a model that the function makes on the CPU"
            _refuse(rule, f"{place} is a {kind}", works=works)


@contextmanager
def _stand_ins(chain: _Chain) -> Iterator[_Chain]:
    """Inside this context, parameters, buffers and inputs that have memory, or are not on the CPU, are replaced by
    tensors that are counted."""
    replaced: dict[Tensor, Tensor] = {}
    changed: list[tuple[dict[str, Any], str, Tensor]] = []

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_unallocated(value):
            return value
        if value not in replaced:
            new = torch.empty_like(value, device="cpu", requires_grad=False)
            is_parameter = isinstance(value, nn.Parameter)
            replaced[value] = nn.Parameter(new, value.requires_grad) if is_parameter else new
            replaced[value].requires_grad_(value.requires_grad)
        return replaced[value]

    modules = [module for stage in chain.stages for module in stage.modules()]
    try:
        table: dict[str, Any]
        for table in (table for module in modules for table in (module._parameters, module._buffers)):
            for name, tensor in table.items():
                if tensor is not None and stand_in(tensor) is not tensor:
                    changed.append((table, name, tensor))
                    table[name] = stand_in(tensor)
        yield replace(chain, inputs=pytree.tree_map(stand_in, chain.inputs))
    finally:
        for table, name, tensor in changed:
            table[name] = tensor


def _handed_on(outputs: Any) -> tuple[Any, ...]:
    """The inputs of the next stage: ``outputs`` as leaves that need a gradient."""

    def leaf(value: Any) -> Any:
        return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value

    return pytree.tree_map(leaf, tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,))  # type: ignore[no-any-return]


@contextmanager
def _explained(index: int, chain: _Chain, inputs: tuple[Any, ...]) -> Iterator[None]:
    """Add the stage and its inputs to an error that the user's code raises."""
    try:
        yield
    except (CheckpointError, RegionSeen):
        raise
    except VALUES_ASKED as error:
        rule = "a stage asks for the values of tensors, and what is planned must not depend on them"
        _refuse(rule, f"stage {index}, {_text(error)}", error, "shapes that no value decides, such as a fixed capacity "
                "of experts in place of nonzero(), a mask in place of x[x > 0], torch.where in place of if")
    except Exception as error:
        source = "the example" if index == 0 else f"what stage {index - 1} returns"
        loss = " (or its loss)" if chain.ends_with_loss(index) else ""
        rule = f"stage {index}{loss} does not run on {source}"
        _refuse(rule, f"{', '.join(map(_kind, inputs))}: {_text(error)}", error, "stages that fit: first(x), "
                "then second(first(x)), on the CPU")


def _kind(value: Any) -> str:
    """A short description of a value, such as ``bfloat16[1, 4096]``."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_kind, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return type(value).__name__


def _text(error: Exception) -> str:
    return " ".join(named(error).split())[:300]


def _refuse(rule: str, received: str, error: Exception | None = None, works: str = _WORKS) -> NoReturn:
    raise ArgumentError(str(Fault(rule, received, works))) from error
