"""Balance: an ``nn.Sequential`` cut into stages that cost alike."""
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchckpt.command.shared import Parser, Unusable, add_command, count, give, line, shape
from torchckpt.command.target import CONTRACT, Target, layers_at, running
from torchckpt.errors import ArgumentError, named
from torchckpt.planning.order.schedule import number_of

if TYPE_CHECKING:
    from torchckpt.pipe import Balance

__all__ = ["add", "run"]

_EXAMPLES = f"""\
{CONTRACT}
It returns an nn.Sequential, or a list of modules, its layers; or the nn.Sequential itself is named. --input takes the
place of the example: random numbers, or zeros where they are integers, on the device of the parameters.

by what a stage is weighed, for --by:
  time      forward twice, as a Pipe that recomputes runs it, and backward
  bytes     parameters with gradients and Adam's state, and what one micro-batch keeps

examples:
  python -m torchckpt balance my_package.model:gpt --stages 4 --input 8,128 --dtype int64
  python -m torchckpt balance my_package.model:layers --stages 2 --input 8,64 --by bytes --json
"""
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32")


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    short = "cut an nn.Sequential into stages that cost alike"
    description = "Cut an nn.Sequential into stages that cost alike, by what its layers cost on a sample."
    balance = add_command(commands, "balance", short, description, _EXAMPLES)
    balance.add_argument("module", metavar="MODULE:FUNCTION", help="what returns the layers and an example of a call")
    balance.add_argument("--stages", type=count, required=True, metavar="P", help="of the whole pipeline")
    text = "of one micro-batch, such as 8,128, in place of the example; again for each further input"
    balance.add_argument("--input", type=shape, action="append", metavar="SHAPE", help=text)
    balance.add_argument("--dtype", choices=_DTYPES, help="of --input (default: float32)")
    balance.add_argument("--by", choices=("time", "bytes"), default="time", help="default: %(default)s")
    balance.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(options: argparse.Namespace) -> None:
    with running(options.module):
        balance = _balance(layers_at(options.module), options)
    layers = [{"name": name, balance.unit: cost} for name, cost in zip(balance.names, balance.costs)]
    counts = f"{number_of(len(balance), 'stage')}, {number_of(len(balance.costs), 'layer')}"
    give(
        options,
        lambda: {"balance": balance, "layers": layers, "stages": balance.stage_costs},
        f"{options.module}: {counts}", balance.table(), f"balance={balance}",
    )  # fmt: skip


def _balance(target: Target, options: argparse.Namespace) -> Balance:
    from torchckpt.pipe import balance_by_bytes, balance_by_time

    balance_by = {"time": balance_by_time, "bytes": balance_by_bytes}[options.by]
    try:
        return balance_by(options.stages, target.model, *_inputs(target, options))
    except Unusable:
        raise
    except ArgumentError as error:
        reason = line(error).replace("partitions=", "--stages ")
        raise Unusable(f"cannot balance {options.module}: {reason}") from error
    except Exception as error:  # of the user's code
        what = "its example" if options.input is None else "these inputs"
        raise Unusable(f"{options.module} does not run on {what}: {named(error)}") from error


def _inputs(target: Target, options: argparse.Namespace) -> tuple[Any, ...]:
    import torch

    if options.input is None:
        if options.dtype is not None:
            asked = f"--dtype {options.dtype}"
            raise Unusable(f"--dtype is given without --input; received: {asked}; works: --input 8,128 {asked}")
        if not target.has_example:
            received = f"{options.module}, without an example"
            works = "--input 8,128, or: return layers, tokens"
            raise Unusable(f"balance has no inputs; received: {received}; works: {works}")
        return target.inputs
    dtype = getattr(torch, options.dtype or "float32")
    make = torch.randn if dtype.is_floating_point else torch.zeros
    device = next((parameter.device for parameter in target.model.parameters()), torch.device("cpu"))
    return tuple(make(shape, dtype=dtype, device=device) for shape in options.input)
