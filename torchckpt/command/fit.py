"""Fit: a plan with which a model trains within a byte budget, and the line that runs it."""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchckpt.command.shared import Parser, Unusable, add_command, comma_list, file_to_write, give, with_unit
from torchckpt.command.target import CONTRACT, model_at, running
from torchckpt.errors import CheckpointError, named
from torchckpt.planning.budget import Budget, check_budget

if TYPE_CHECKING:
    from torchckpt.graph import Plan

__all__ = ["add", "run"]

_POLICIES = ("speed", "memory", "collection")
_EXAMPLES = f"""\
{CONTRACT}
The call is traced with its derivatives, and nothing of it is run. A list of modules runs one after the other.

the table:
  peak        of activations and gradients in one step, above what is there before it, such as parameters
  saved       from the forward to the backward
  dropped     what eager mode saves and this plan does not
  repeats     how many operations run again; recompute: what they cost

what to keep, for --keep:
  speed       outputs of convolutions and products of matrices
  memory      about the square root of the values that separate inputs from outputs
  collection  what is marked by graph.mark()
  NAMES       of modules and marks, with commas between; whole, as patterns (layers.*.mlp), or in part

examples:
  python -m torchckpt fit my_package.model:gpt
  python -m torchckpt fit my_package.model:gpt --budget 100MB --svg plan.svg --plan plan.json
  python -m torchckpt fit my_package.model:gpt --budget 40% --costs profile --explain layers.0.mlp
  python -m torchckpt fit my_package.model:gpt --keep speed --frontier frontier.svg --json
"""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    description = "Plan a training step within a byte budget: what to save for the backward, what to recompute."
    fit = add_command(commands, "fit", "plan a training step within a byte budget", description, _EXAMPLES)
    fit.add_argument("module", metavar="MODULE:FUNCTION", help="what returns the model and an example of a call")
    _add_plan(fit)
    _add_output(fit)


def run(options: argparse.Namespace) -> None:
    model, inputs, unpacked = model_at(options.module)
    with running(options.module):
        plan, curve = _planned(model, inputs, options)
    explained = None if options.explain is None else plan.explain(options.explain)
    arguments = ["model", "*example" if unpacked else "example"]
    arguments += [f"{name}={value if value is True else json.dumps(value)}" for name, value in _chosen(options).items()]
    call = f"graph.rematerialize({', '.join(arguments)})"
    give(
        options,
        lambda: {**_numbers(plan), **({"explain": explained} if explained else {}), "call": call},
        options.module, plan, explained, call,
        plan=plan.to_json,
        svg=lambda: plan.draw(title=f"Memory of one training step: {options.module}"),
        frontier=lambda: curve,
    )  # fmt: skip


def _planned(model: Any, inputs: tuple[Any, ...], options: argparse.Namespace) -> tuple[Plan, str]:
    """The plan; and the picture of the frontier, if it is wanted."""
    from torchckpt import graph

    try:
        plan = graph.rematerialize(model, **_chosen(options)).prepare(*inputs)
        if options.frontier is None:
            return plan, ""
        curve = graph.frontier(model, *inputs, costs=options.costs, rng=options.rng)
    except CheckpointError:
        raise
    except Exception as error:  # of the user's code
        raise Unusable(f"{options.module} does not run on its example: {named(error)}") from error
    others = {"this plan": [(plan.peak_bytes, plan.recompute_share)]}
    return plan, curve.draw(others=others, title=f"Memory and recomputation: {options.module}")


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of :func:`~torchckpt.graph.rematerialize` that are not as they are by default."""
    defaults = {"budget": None, "keep": None, "exact": False, "costs": "roofline", "rng": "keep"}
    values = {name: getattr(options, name) for name in defaults}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _numbers(plan: Plan) -> dict[str, Any]:
    return {
        "peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "lower_bound_bytes": plan.lower_bound,
        "eager_peak_bytes": plan.eager_peak_bytes,
        "recompute_share": plan.recompute_share,
        "recompute_flops": plan.recompute_flops,
        "saved": plan.saved,
        "recomputed": plan.recomputed,
        "modules": [asdict(row) for row in plan.modules],
    }


def _add_plan(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    text = "of activations and gradients: 100MB, 6GiB; or a share of eager's peak: 40%% (default: none)"
    group.add_argument("--budget", type=_budget, metavar="SIZE", help=text)
    group.add_argument("--keep", type=_keep, metavar="POLICY|NAMES", help="what to save for the backward")
    text = "count what operations take, or run each kind of them (default: %(default)s)"
    group.add_argument("--costs", choices=("roofline", "profile"), default="roofline", help=text)
    text = "keep what random operations made, or draw it again (default: %(default)s)"
    group.add_argument("--rng", choices=("keep", "replay"), default="keep", help=text)
    group.add_argument("--exact", action="store_true", help="prove the least time under the budget; for small models")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--explain", metavar="NAME", help="also print what becomes of a module, a mark or an operation")
    picture, data = file_to_write(".svg"), file_to_write(".json")
    group.add_argument("--plan", type=data, metavar="FILE", help="write the plan as JSON, for Plan.from_json()")
    group.add_argument("--svg", type=picture, metavar="FILE", help="draw the memory of the step over its operations")
    group.add_argument("--frontier", type=picture, metavar="FILE", help="draw what 20 budgets cost, and this plan")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _budget(text: str) -> Budget:
    try:
        budget = with_unit(text)
        check_budget(budget)
    except (ValueError, Unusable):
        rule = "not a size such as 100MB or 6GiB, or a share of eager's peak such as 40%"
        raise argparse.ArgumentTypeError(f"{rule}; received: {text}") from None
    return budget


def _keep(text: str) -> str | list[str]:
    names = comma_list(text)
    if "" in names:
        rule = f"not one of {', '.join(_POLICIES)}, or names with commas between"
        raise argparse.ArgumentTypeError(f"{rule}; received: {text}")
    return text if text in _POLICIES else names
