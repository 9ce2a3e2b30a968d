"""A case: one small model of one family, with its input and its library's switch; trained plainly and in both ways."""
from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchckpt
from benchmarks.peers.bits import WAYS, Left, Switch, called, differing, seed, train

__all__ = ["BUDGET", "BUDGET_STEPS", "Case", "compared", "planned"]

_ROWS = 8
BUDGET, BUDGET_STEPS, DROPOUT = "60%", 5, 0.1


class Case(NamedTuple):
    """What a library gives for a family."""

    model: str
    """The name of the class, or of the model in the library."""
    build: Callable[[], tuple[nn.Module, Any]]
    """Makes the model, whose weights are random, and its input: a tensor, or a dict of keywords."""
    switch: Switch


def compared(case: Case, steps: int) -> dict[str, Any]:
    """What plain training leaves, twice, and what training with regions leaves, in both ways."""
    build, dropout = _copies(case)
    plain, again = train(build, None, steps), train(build, None, steps)
    found: dict[str, Any] = {
        "model": case.model,
        "itself": differing(plain, again),
        "saved": {"plain": plain.saved_bytes},
        "is_finite": _is_finite(plain),
        "dropout": dropout,
        "inputs": _names_of(build),
    }
    for way, function in WAYS.items():
        try:
            left = train(build, function, steps, case.switch)
        except Exception as error:
            found[way] = [said(error)]
            continue
        found[way] = differing(plain, left)
        found["saved"][way] = left.saved_bytes
        found["counts"] = {**found.get("counts", {}), way: (left.regions, left.reached, left.replays)}
    return found


def planned(case: Case) -> dict[str, Any]:
    """The same model with ``checkpoint_layers(budget=)``, which finds its blocks. Its batch is of more rows: in a small
    model with a small batch the gradients alone take most of the bytes."""
    (build, _), handles = _copies(case, _ROWS), []

    def with_budget() -> tuple[nn.Module, Any]:
        model, inputs = build()
        handles.append(torchckpt.checkpoint_layers(model, budget=BUDGET))
        return model, inputs

    plain = train(build, None, BUDGET_STEPS)
    try:
        left = train(with_budget, None, BUDGET_STEPS)
    except torchckpt.BudgetInfeasible as error:
        return {"blocks": len(handles[0].names), "reason": said(error)}
    except Exception as error:
        return {"reason": said(error)}
    plan = handles[0].plan
    found = {"blocks": len(handles[0].names), "first": handles[0].names[0], "differs": differing(plain, left)}
    if plan is None:
        return {**found, "reason": "no plan"}
    return {**found, **_bytes_of(plan)}


def _bytes_of(plan: Any) -> dict[str, Any]:
    return {
        "calls": len(plan.took.calls),
        "kept": len(plan.kept),
        "everything": plan.everything_kept_bytes,
        "recomputed": plan.everything_recomputed_bytes,
        "budget": plan.budget_bytes,
        "planned": plan.peak_bytes,
        "measured": plan.measured_peak_bytes,
    }


def _copies(case: Case, rows: int = 1) -> tuple[Callable[[], tuple[nn.Module, Any]], str]:
    """What makes the model of ``case``, with dropout in its regions, and whose that is.

    The model is made once, and copied, so that weights which nobody fills are the same in all. If none of its regions
    has dropout of its own, its linear maps get some, by hooks.
    """
    seed()
    model, inputs = case.build()
    with suppress(Exception):  # not each model takes another number of rows
        more = _repeated(inputs, rows)
        called(_again(model, inputs)[0], more)
        inputs = more
    has_own = _draws(case, *_again(model, inputs))
    if not has_own:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(_drop)
    return partial(_again, model, inputs), "its own" if has_own else "added"


def _repeated(inputs: Any, times: int) -> Any:
    """A batch of so many times two rows."""
    return pytree.tree_map_only(torch.Tensor, lambda x: torch.cat([x] * times) if len(x) == 2 else x, inputs)


def _again(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    return copy.deepcopy(model), copy.deepcopy(inputs)


def _is_finite(left: Left) -> bool:
    """Whether losses and gradients are numbers, so that equality says something, and some gradient is there."""
    gradients = [gradient for gradient in left.values["gradients"] if gradient is not None]
    losses = [loss for loss in left.values["losses"] if loss is not None]
    return bool(gradients) and all(bool(torch.isfinite(value).all()) for value in [*losses, *gradients])


def _draws(case: Case, model: nn.Module, inputs: Any) -> bool:
    """Whether a region takes random numbers."""
    drew = []

    def look(function: Callable[..., Any], *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        outputs = function(*args, **kwargs)
        drew.append(not torch.equal(before, torch.get_rng_state()))
        return outputs

    with case.switch(model, look):
        called(model.train(), inputs)
    return any(drew)


def _drop(module: nn.Module, _: Any, output: Any) -> Any:
    return nn.functional.dropout(output, DROPOUT, module.training)


def _names_of(build: Callable[[], tuple[nn.Module, Any]]) -> list[str]:
    """Of the inputs: which parts of a model were run."""
    inputs = build()[1]
    return [*inputs] if isinstance(inputs, dict) else []


def said(error: BaseException) -> str:
    """The first line of an error, with its class."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
