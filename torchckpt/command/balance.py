"""Balance: an ``nn.Sequential`` cut into stages that cost alike."""
from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from torchckpt.command.shared import Parser, Unusable, is_module, module_at, shape
from torchckpt.errors import ArgumentError

if TYPE_CHECKING:
    from torchckpt.pipe import Balance

__all__ = ["add", "run"]

_EXAMPLES = """\
the module is an nn.Sequential, or a function without arguments that returns one. It gets inputs of random numbers, or
of zeros where they are integers, on the device of its parameters

by what a stage is weighed, for --by:
  time      forward twice, as a Pipe that recomputes runs it, and backward
  bytes     parameters with gradients and Adam's state, and what one micro-batch keeps

examples:
  python -m torchckpt balance my_package.model:gpt --stages 4 --input 8,128 --dtype int64
  python -m torchckpt balance my_package.model:layers --stages 2 --input 8,64 --by bytes --json
"""
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32")


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    balance = commands.add_parser(
        "balance",
        help="cut an nn.Sequential into stages that cost alike",
        description="Cut an nn.Sequential into stages that cost alike, by what its layers cost on a sample.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    balance.add_argument("module", metavar="MODULE:ATTRIBUTE", help="where the nn.Sequential is")
    balance.add_argument("--stages", type=int, required=True, metavar="P", help="of the whole pipeline")
    balance.add_argument(
        "--input",
        type=shape,
        action="append",
        required=True,
        metavar="SHAPE",
        help="of one micro-batch, such as 8,128; again for each further input of the first layer",
    )
    balance.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the inputs (default: %(default)s)")
    balance.add_argument("--by", choices=("time", "bytes"), default="time", help="default: %(default)s")
    balance.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(options: argparse.Namespace) -> None:
    found = _balanced(module_at(options.module), options)
    if options.json:
        layers = [{"name": name, found.unit: cost} for name, cost in zip(found.names, found.costs)]
        print(json.dumps({"balance": found, "layers": layers, "stages": found.stage_costs}, indent=2))
        return
    print(f"{options.module}: {len(found)} stages, {len(found.costs)} layers\n\n{found.table()}\n\nbalance={found}")


def _balanced(module: Any, options: argparse.Namespace) -> Balance:
    import torch

    from torchckpt.pipe import balance_by_bytes, balance_by_time

    balance_by = {"time": balance_by_time, "bytes": balance_by_bytes}[options.by]
    dtype = getattr(torch, options.dtype)
    make = torch.randn if dtype.is_floating_point else torch.zeros
    try:
        parameters = module.parameters() if is_module(module) else ()
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        inputs = [make(shape, dtype=dtype, device=device) for shape in options.input]
        return balance_by(options.stages, module, *inputs)
    except ArgumentError:
        raise
    except Exception as error:  # of the user's code
        raise Unusable(f"{options.module} does not run on these inputs: {type(error).__name__}: {error}") from error
