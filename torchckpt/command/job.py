"""Job: ``plan`` for a described model in a layout, in place of numbers or of a function that makes it."""
from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import fields, replace

from torchckpt.command.shared import Unusable, count, give, given, line, size, tell
from torchckpt.errors import ArgumentError, BudgetInfeasible
from torchckpt.jobs import MODELS, Job, Layout, Machine, machine_named, model_named, plan_job, search_layouts
from torchckpt.jobs.layout import RECOMPUTES, SOFTWARE, STATES
from torchckpt.jobs.plan import drawn
from torchckpt.planning.order.schedules import CHUNKS
from torchckpt.planning.plan.pipeline import plan_of
from torchckpt.planning.work.host import Host

__all__ = ["add_job", "job_faults", "run_job"]

_COUNTS = ("gpus", "tp", "cp", "ep", "pp", "dp", "micro_batch", "global_batch", "sequence", "chunks", "node")
_ALONE = (*_COUNTS, "policy", "sharding", "framework", "network", "search")
"""Options of a described model alone."""
_NOT_WITH = (
    "target", "csv", "ranks", "stages", "microbatches", "blocks", "forward", "backward", "weight_grad", "recompute",
    "saved", "boundary", "first", "last", "efficiency", "dtype", "optimizer_bytes", "kernels", "link_bandwidth",
    "budget", "mesh", "profile", "link", "balance",
)  # fmt: skip
_WORKS = "works: plan --model llama3-70b --gpus 64 --device h100 --tp 8 --pp 4 --dp 2 --global-batch 256"
_HELP = {
    "gpus": "of all", "tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "pp": "stages of a "
    "pipeline", "dp": "data parallel; default: what is left of --gpus", "micro_batch": "sequences; default: 1",
    "global_batch": "sequences of a step", "sequence": "tokens; default: 8192", "chunks": "stages of a rank; default: "
    "1, or 2 where the schedule needs them", "node": "GPUs of a node; default: 8",
}  # fmt: skip
_FIELDS = {"policy": "recompute", "sharding": "state", "framework": "software"}
"""By option, the field of a layout, where they have two names."""
_OPTIONS = {field: option for option, field in _FIELDS.items()}
_FIXED = ("tp", "cp", "ep", "pp", "dp", "micro_batch", "chunks", "schedule", *_FIELDS)
"""Options that a search keeps."""


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the options of a described model."""
    group = parser.add_argument_group("described model", "in place of MODULE:FUNCTION and of stages")
    names = f"{', '.join(MODELS)}, or a JSON file, such as a config.json of transformers"
    group.add_argument("--model", metavar="NAME", help=names)
    for name in _COUNTS:
        group.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N", help=_HELP[name])
    text = "what is recomputed: planned (default; --search: where that may be best), none, selective or full"
    group.add_argument("--policy", choices=RECOMPUTES, metavar="NAME", help=text)
    text = "what data-parallel ranks share: none, zero1 (default) or fsdp2"
    group.add_argument("--sharding", choices=STATES, metavar="NAME", help=text)
    text = "whose kernels and dtypes: megatron, or torchtitan (default with fsdp2)"
    group.add_argument("--framework", choices=tuple(SOFTWARE), metavar="NAME", help=text)
    group.add_argument("--network", type=size, metavar="SIZE", help="a second, between nodes and for each GPU")
    text = "all layouts on --gpus that are as the other options say; the best 20"
    group.add_argument("--search", action="store_true", default=None, help=text)


def job_faults(options: argparse.Namespace) -> None:
    """Raise Unusable for options that do not go together."""
    named = given(options, _ALONE if options.model is None else _NOT_WITH)
    if named and options.model is None:
        raise Unusable(f"{named[0]} is given without --model; {_WORKS}")
    if options.model is None and options.schedule == "zb-2p":
        raise Unusable(f"--schedule zb-2p is given without --model; {_WORKS} --schedule zb-2p")
    if named:
        raise Unusable(f"{named[0]} is given with --model, which says what stages are and take; {_WORKS}")


def run_job(options: argparse.Namespace, host: Host | None) -> None:
    missing = [name for name in ("device", "gpus", "global_batch") if getattr(options, name) is None]
    if missing:
        raise Unusable(f"--model is given without --{missing[0].replace('_', '-')}; {_WORKS}")
    try:
        _run(options, host)
    except (ArgumentError, BudgetInfeasible) as error:
        raise Unusable(_in_options(line(error))) from error


def _run(options: argparse.Namespace, host: Host | None) -> None:
    model, machine, layout, stop = model_named(options.model), _machine(options), _layout(options), None
    if options.search:
        fixed = [_FIELDS.get(name, name) for name in _FIXED if getattr(options, name) is not None]
        result = search_layouts(model, machine, layout, options.device_memory, host, _Progress(), fixed)
        best, text, numbers = result.best[0] if result.best else None, str(result), result.as_json()
    else:
        try:
            best = plan_job(Job(model, layout, machine), options.device_memory, host)
        except KeyboardInterrupt as interrupt:
            if (best := plan_of(stop := interrupt)) is None:
                raise
        text, numbers = str(best), best.as_json()
        if best.pipeline is not None and (best.recomputed_share or best.away_share):
            text += f"\n\n{best.pipeline.by_stage()}"
            numbers["plan"] = json.loads(best.pipeline.to_json())
    give(options, lambda: numbers, text, **({} if best is None else {"svg": lambda: drawn(best)}))
    if stop is not None:
        raise stop


def _machine(options: argparse.Namespace) -> Machine:
    machine = machine_named(options.device)
    network = machine.network
    if options.network is not None:
        network = replace(network, outer_bytes_per_second=options.network)
    if options.node is not None:
        network = replace(network, node_devices=options.node)
    return replace(machine, device=replace(machine.device, network=network))


def _layout(options: argparse.Namespace) -> Layout:
    named = {name: getattr(options, name) for name in _COUNTS if name != "node" and getattr(options, name) is not None}
    split = [named.get(name, 1) for name in ("tp", "cp", "pp")]
    ranks = split[0] * split[1] * split[2]
    if "dp" not in named and options.gpus // ranks > 2**20:  # as many as a layout may have
        raise Unusable(f"there are more replicas than {2**20}; received: --gpus {options.gpus}; works: --gpus "
                       f"{ranks * 2**20}")
    named.setdefault("dp", max(1, options.gpus // ranks))
    state = options.sharding or "zero1"
    schedule = options.schedule or "1f1b"
    if schedule == "all":
        raise Unusable("--schedule all is given with --model; works: --search, or --schedule 1f1b")
    if split[2] == 1 and not (options.search and options.pp is None):
        chunks = named.get("chunks", 1)
        idle = [f"--schedule {schedule}"] * (schedule != "1f1b") + [f"--chunks {chunks}"] * (chunks > 1)
        if idle:
            several = schedule if schedule != "1f1b" else "interleaved_1f1b"
            works = f"works: the same without {' and '.join(idle)}, or with --pp 2 --schedule {several}"
            raise Unusable(f"a pipeline of one stage has no schedule; received: {' '.join(idle)}, --pp 1; {works}")
    named.setdefault("chunks", CHUNKS.get(schedule, 1))
    framework = options.framework or ("torchtitan" if state == "fsdp2" else "megatron")
    recompute = options.policy or "planned"
    return Layout(**named, schedule=schedule, recompute=recompute, state=state, software=SOFTWARE[framework])


def _in_options(text: str) -> str:
    """``text`` with options in place of the fields of a layout."""
    names = "|".join(field.name for field in fields(Layout))

    def option(name: str) -> str:
        return f"--{_OPTIONS.get(name, name).replace('_', '-')}"

    def listed(match: re.Match[str]) -> str:
        return re.sub(r"\w+", lambda name: option(name[0]), match[0])

    text = re.sub(r"(?<=other values of )[\w, ]+$", listed, text)
    value = r"([\"'])?((?(2).*?|[\w.\-/]+))(?(2)\2)"
    return re.sub(rf"\b({names}|model)={value}", lambda match: f"{option(match[1])} {match[3]}", text)


class _Progress:
    """Says on standard error how far a search is, each second."""

    def __init__(self) -> None:
        self._next = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + 1
            tell(f"search: {done} of at most {of} layouts")
