"""Costs: stages for ``plan`` from a function of the user's that makes them, instead of numbers."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from torchckpt.command.shared import Unusable, amount, given, in_options, line, size, state_bytes
from torchckpt.command.target import running, stages_at
from torchckpt.errors import ArgumentError
from torchckpt.planning.device import DEVICES, device_named, left_to_tensors

if TYPE_CHECKING:
    from torchckpt.costs import PipelineCosts

__all__ = ["ORDER", "add_model", "model_costs", "model_faults"]

ORDER = "--schedule 1f1b --microbatches 8"
"""What a call says beside a model and its device."""
_OF_MODEL = ("device", "efficiency", "dtype", "optimizer_bytes", "device_memory", "link_bandwidth", "kernels", "mesh",
             "profile")  # fmt: skip
_DTYPES = ("bf16", "fp16", "fp32", "tf32", "fp64")
_OF_NUMBERS = (
    "stages", "blocks", "forward", "backward", "weight_grad", "recompute", "saved", "boundary", "first", "last",
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the target, and what its costs depend on."""
    text = (
        "what returns the stages, what the first is called with, and maybe the loss; in place of --stages, --blocks "
        "and what a block takes"
    )
    parser.add_argument("target", nargs="?", metavar="MODULE:FUNCTION", help=text)
    group = parser.add_argument_group("model", "with MODULE:FUNCTION: counted without running it")
    group.add_argument("--device", type=_device, metavar="NAME", help=f"one of {', '.join(DEVICES)}")
    text = "of its peak of FLOPs, whatever is computed; default: by kind and size of operation"
    group.add_argument("--efficiency", type=_efficiency, metavar="SHARE", help=text)
    text = f"torch's default while the stages are made: {', '.join(_DTYPES)}; default: as the function makes them"
    group.add_argument("--dtype", choices=_DTYPES, metavar="NAME", help=text)
    text = (
        "of state for a parameter, beside weight and gradient, such as 12, or 12/64 where 64 ranks share it; default: "
        "Adam's, 12 where it has two bytes, 8 where four, 16 where eight"
    )
    group.add_argument("--optimizer-bytes", type=state_bytes, metavar="BYTES", help=text)
    text = (
        "that tensors may take, in place of --budget: what is left of it beside parameters, gradients and the "
        "optimizer's state; default: what --device has, but 5 %% for the allocator and 1.5 GiB for context and buffers"
    )
    group.add_argument("--device-memory", type=size, metavar="SIZE", help=text)
    group.add_argument("--link-bandwidth", type=size, metavar="SIZE", help="a second; default: inside a node")
    text = "accelerator: dropout, norms and attention keep what they keep there (default); cpu: what a CPU keeps"
    group.add_argument("--kernels", choices=("accelerator", "cpu"), metavar="NAME", help=text)
    text = (
        "ranks that a stage is spread over, such as dp=2,tp=8: the function is called with a DeviceMesh of them, and "
        "the share of one rank is counted"
    )
    group.add_argument("--mesh", type=_mesh, metavar="NAME=SIZE,...", help=text)
    text = "run the stages on the device that is there, and take their seconds in place of those of --device"
    group.add_argument("--profile", action="store_true", default=None, help=text)


def model_faults(options: argparse.Namespace) -> None:
    """Raise Unusable for arguments that do not go together."""
    misplaced = given(options, _OF_NUMBERS if options.target is not None else _OF_MODEL)
    if options.target is None:
        if misplaced:
            works = f"plan my_package.model:stages --device h100 {ORDER}"
            raise Unusable(f"{misplaced[0]} is given without a model; works: {works}")
        missing = [name for name in ("blocks", "budget") if getattr(options, name) is None]
        if missing:
            named = ", ".join(f"--{name}" for name in missing)
            works = "plan --schedule 1f1b --stages 4 --microbatches 8 --blocks 8 --budget 50%"
            raise Unusable(f"the following arguments are required: {named}; works: {works}")
        return
    if misplaced:
        raise Unusable(f"{misplaced[0]} is given beside a model; {options.target} says what stages are and take")
    clash = next((name for name in ("mesh", "efficiency") if options.profile and getattr(options, name)), None)
    if clash is not None:
        why = "the ranks of a mesh are not there to run" if clash == "mesh" else "what is run has no need of a share"
        works = f"plan {options.target} --device h100 --profile {ORDER}"
        raise Unusable(f"--profile and --{clash} are both given, and {why}; works: {works}")
    if options.device is None:
        profile = " --profile" if options.profile else ""
        raise Unusable(f"the model has no device; works: plan {options.target} --device h100{profile} {ORDER}")
    if options.budget is not None and options.device_memory is not None:
        raise Unusable("--budget and --device-memory are both given; works: --budget 60GB")
    options.is_memory_of_device = options.budget is None and options.device_memory is None
    if options.is_memory_of_device:
        options.device_memory = max(0.0, left_to_tensors(device_named(options.device).memory_bytes))


def model_costs(options: argparse.Namespace) -> PipelineCosts:
    """The costs of the stages that ``target`` makes."""
    from torchckpt.costs import fake_mesh, pipeline_costs

    values = {name: getattr(options, name) for name in ("efficiency", "dtype", "optimizer_bytes", "kernels", "profile")}
    values["link_bytes_per_second"] = options.link_bandwidth
    chosen = {name: value for name, value in values.items() if value is not None}
    try:
        with running(options.target), ExitStack() as stack:
            arguments = [] if options.mesh is None else [stack.enter_context(fake_mesh(**options.mesh))]
            build = _holding(stages_at(options.target, *arguments), options)
            return pipeline_costs(build, options.device, **chosen)
    except ArgumentError as error:
        raise Unusable(f"cannot plan {options.target}: {line(error)}") from error


def _holding(build: Callable[[], Any], options: argparse.Namespace) -> Callable[[], Any]:
    """``build``, which fails before anything is counted if a device of so much memory cannot hold a stage."""
    from torchckpt.costs.count import static_of

    if options.device_memory is None:
        return build
    received, works = f"{options.device_memory:.12g} bytes", "--budget 60GB without --device-memory"
    if options.is_memory_of_device:
        received, works = f"{received} that {options.device} leaves to tensors", "--budget 60GB"

    def built() -> Any:
        model = build()
        for number, stage in enumerate(model[0]):
            static = sum(map(sum, static_of(stage, options.optimizer_bytes).values()))
            if static >= options.device_memory:
                raise Unusable(
                    "the device is too small: parameters, gradients and optimizer state leave no memory; "
                    f"received: {received}, of which those of stage {number} take {static:.12g}; works: {works}, "
                    "to plan activations alone; or more stages, or sharded state, such as --optimizer-bytes 12/64"
                )
        return model

    return built


def _device(text: str) -> str:
    try:
        device_named(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(in_options(line(error))) from None
    return text


def _mesh(text: str) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    sizes = {name: int(size) for name, _, size in pairs if name.isidentifier() and size.isdecimal() and int(size)}
    if len(sizes) < len(pairs) or "rank" in sizes:
        raise argparse.ArgumentTypeError(f"not sizes by name such as dp=2,tp=8; received: {text}")
    return sizes


def _efficiency(text: str) -> float:
    with suppress(argparse.ArgumentTypeError):
        if 0 < (share := amount(text)) <= 1:
            return share
    raise argparse.ArgumentTypeError(f"not a share above 0 and at most 1, such as 0.5; received: {text}")
