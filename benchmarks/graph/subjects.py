"""Subjects: the measured models, each with its loss as one module, and the measurements of one training step."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import flop_counter

from benchmarks.devices import module_of, synchronize
from tests.graph.allocations import measured_peak
from tests.graph.eager import Result, assert_same, step
from tests.models import BENCHMARK, MODELS, Case
from torchckpt import graph
from torchckpt.errors import BudgetInfeasible

__all__ = [
    "NAMES",
    "Call",
    "Subject",
    "WithLoss",
    "counted",
    "flops",
    "is_same",
    "likeness",
    "settled",
    "subject",
    "within",
]

Call = Callable[..., Tensor]
"""A function that runs a model and its loss on the model's inputs."""

NAMES = {
    "gpt6": "GPT-6",
    "gpt24": "GPT-24",
    "resnet20": "ResNet-20",
    "resnet110": "ResNet-110",
    "resnet200": "ResNet-200",
    "mlp24": "MLP-24",
    "unet": "U-Net",
    "lstm50": "LSTM, 50 steps",
    "moe": "mixture of experts",
}
"""The names of the models in tables."""


class WithLoss(nn.Module):
    """A model and its loss as one module: so the plan includes the bytes of the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.model(*inputs))


@dataclass
class Subject:
    """One model and its training step: a forward, the loss, a backward."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    before_bytes: int = 0
    """On an accelerator, what was allocated when the last step began, without the gradients of the one before."""

    def step(self, call: Call | None = None, module: nn.Module | None = None) -> Callable[[], None]:
        """A function that frees old gradients, then runs a step by ``call`` on the module or a copy of it."""
        module = module or self.module

        def run() -> None:
            module.zero_grad(set_to_none=True)
            if self.device.type != "cpu":
                self.before_bytes = settled(self.device)
            (call or module)(*self.inputs).backward()

        return run

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @cached_property
    def eager_peak_bytes(self) -> int:
        return self.peak_bytes(self.step())

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Bytes that a :meth:`step` of this subject allocates at its peak, above those before it. It runs once before,
        unmeasured, so that allocations that last, such as caches, do not count."""
        run()
        if self.device.type == "cpu":
            return measured_peak(run)
        run()
        synchronize()
        return int(module_of(self.device).max_memory_allocated(self.device)) - self.before_bytes

    @cached_property
    def eager_flops(self) -> int:
        return flops(self.step())

    def result(self, call: Call | None = None, module: nn.Module | None = None) -> Result:
        """Loss, gradients, buffers and states of generators after a step from seed 0."""
        return step(module or self.module, self.inputs, lambda loss: loss, call=call)


def subject(name: str, device: str = "cpu", sizes: Mapping[str, Any] | None = None) -> Subject:
    """A model of ``tests/models``, in the sizes of the benchmark unless others are given."""
    case: Case = MODELS[name](device=device, **(BENCHMARK.get(name, {}) if sizes is None else sizes))
    return Subject(name, WithLoss(case.model, case.loss), case.inputs)


def within(one: Subject, budget: int, **options: Any) -> Any:
    """The model rematerialized within ``budget`` bytes; if no plan fits, within the least bytes found."""
    try:
        return graph.rematerialize(one.module, *one.inputs, budget=budget, **options)
    except BudgetInfeasible as error:
        return graph.rematerialize(one.module, *one.inputs, keep=error.plan)


def counted(one: Subject, call: Any) -> dict[str, Any]:
    """A rematerialized step beside eager's: shares of its peak, FLOPs and planned seconds; whether bits are equal."""
    step = one.step(call)
    return {
        "peak": one.peak_bytes(step) / one.eager_peak_bytes,
        "flops": flops(step) / one.eager_flops - 1,
        "share": call.plan.recompute_share,
        "bit-equal": is_same(one.result(call), one.result()),
    }


def settled(device: torch.device) -> int:
    """What is allocated on an idle ``device``, whose peak begins there."""
    synchronize()
    module_of(device).reset_peak_memory_stats(device)
    return int(module_of(device).memory_allocated(device))


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flops(run: Callable[[], None]) -> int:
    """FLOPs of matrix products, convolutions and attention, with a CPU's fused attention, which torch leaves out."""
    own: dict[Any, Any] = {_ATTENTION: _attention_flops, _ATTENTION_BACKWARD: _attention_backward_flops}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=own) as counter:
        run()
    return int(counter.get_total_flops())


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query, key, value))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad, query, key, value))


def is_same(received: Result, expected: Result) -> bool:
    """Whether loss, gradients, buffers and generator states are bit-equal."""
    try:
        assert_same(received, expected)
    except AssertionError:
        return False
    return True


def likeness(received: Result, expected: Result) -> str:
    """All gradients compared: "equal" to the bit, "close" (difference below 1 % of their norm), or "wrong".

    They are compared in their order: in a copy of the module names may differ.
    """
    flat = [[g.flatten() for g in one.gradients.values() if g is not None] for one in (received, expected)]
    own, others = map(torch.cat, flat)
    if torch.equal(own, others):
        return "equal"
    return "close" if (own - others).norm() < 0.01 * others.norm() else "wrong"
