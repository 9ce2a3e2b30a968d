"""Ways: of one model, the steps that recompute by layers, by operators, as compiled, and within a budget."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.graph.subjects import Call, Subject, within
from benchmarks.stock import Stock
from tests.models.image import Basic, UNet
from tests.models.sequence import Block
from torchckpt import BudgetInfeasible, checkpoint_layers

__all__ = [
    "POLICIES", "SHARES", "Way", "budgeted", "compiled", "contexts", "every_kth", "keep_all", "selective", "traced",
]  # fmt: skip

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Budgets of torch's compiler, as shares of what a compiled graph saves."""
_STEPS = 4
"""The first step of a budget is counted, and the third."""


class Way(NamedTuple):
    """One way to run the step, and the budget that it was given, if any."""

    call: Call | None
    """What runs in place of the model; None: the model itself."""
    module: nn.Module
    budget_bytes: int | None = None

    def step(self, one: Subject) -> Callable[[], None]:
        return one.step(self.call, self.module)


def layers_of(module: nn.Module) -> list[str]:
    """The names of the layers that all ways by layers take."""
    return [name for name, child in module.named_modules() if name and _is_layer(module, name, child)]


def _is_layer(module: nn.Module, name: str, child: nn.Module) -> bool:
    parent = module.get_submodule(name.rpartition(".")[0])
    is_level = isinstance(parent, nn.ModuleList) and isinstance(child, nn.Sequential)
    return isinstance(child, (Basic, Block)) or is_level or (isinstance(parent, UNet) and child is parent.bottom)


def keep_all(one: Subject) -> Way:
    """A budget in which everything fits: no call is a region."""
    return budgeted(one, 1 << 50)


def every_kth(one: Subject) -> Iterator[tuple[int, Way]]:
    """The largest ``every`` of those that choose as many layers."""
    layers = layers_of(one.module)
    counts = {-(-len(layers) // every): every for every in range(1, len(layers) + 1)}
    for every in sorted(counts.values()):
        module = copy.deepcopy(one.module)
        checkpoint_layers(module, layers, every=every)
        yield every, Way(None, module)


def budgeted(one: Subject, budget_bytes: int) -> Way:
    """``checkpoint_layers(budget=)``; where nothing fits, within the least."""
    layers, module = layers_of(one.module), copy.deepcopy(one.module)
    handle = checkpoint_layers(module, layers, budget=budget_bytes)
    try:
        for _ in range(_STEPS):
            one.step(None, module)()
    except BudgetInfeasible as error:
        handle.remove()
        return budgeted(one, int(error.least_bytes))
    return Way(None, module, budget_bytes)


def traced(one: Subject, budget_bytes: int) -> Way:
    """``graph.rematerialize``."""
    return Way(within(one, budget_bytes), one.module, budget_bytes)


# torch's own ----------------------------------------------------------------------------------------------------------

_ATEN = torch.ops.aten
_PRODUCTS = (
    _ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.convolution, _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN._scaled_dot_product_flash_attention, _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
)  # fmt: skip


class _Products:
    """A policy that keeps every n-th product of a region, as torchtitan's keeps every second one."""

    def __init__(self, every: int) -> None:
        self._every, self._seen = every, {True: 0, False: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        if getattr(operator, "overloadpacket", operator) not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._seen[context.is_recompute] += 1
        is_kept = self._seen[context.is_recompute] % self._every == 0
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(every: int) -> Any:
    """Selective contexts that keep every n-th product of a region."""
    return create_selective_checkpoint_contexts(_Products(every))


POLICIES = {"SAC, products": 1, "SAC, every second product": 2}
"""Of every how many products a policy keeps one."""


def selective(one: Subject, every: int) -> Way:
    """torch's checkpoint around each layer, with a policy."""
    module = copy.deepcopy(one.module)
    for name in layers_of(module):
        parent, _, place = name.rpartition(".")
        layer = Stock(module.get_submodule(name), context_fn=partial(contexts, every))
        setattr(module.get_submodule(parent), place, layer)
    return Way(None, module)


def compiled(one: Subject, share: float) -> Way:
    """``torch.compile`` by Inductor, with its ``activation_memory_budget``."""
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:  # one for each share: else a graph of another share would be taken
        with config.patch(activation_memory_budget=share):
            return compile_fx(graph, inputs)

    torch._dynamo.config.recompile_limit = 64
    module = copy.deepcopy(one.module)
    way = Way(torch.compile(module, backend=backend).__call__, module)
    way.step(one)()
    return way
