"""Costs: the stages of a pipeline in seconds and bytes, of a model that is never run.

The problem: a plan needs costs, and a model that is worth planning needs machines before it can be measured. The
answer: the stages are made and run, forwards and backwards, with tensors that have a shape and no memory. Bytes are
those of a run, exactly; FLOPs are counted by torch's flop counter; seconds are those of each operation by its kind and
size (:mod:`torchckpt.costs.operation`). What eager mode runs is counted, one operation after the other: a compiler that
fuses operations moves less.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from traceback import walk_tb

import torch

from torchckpt.costs.chain import Build, Mesh, counted_chain, profiled_chain
from torchckpt.costs.count import Counted, Part, Static, counted
from torchckpt.costs.mesh import Layout, layout_around
from torchckpt.costs.operation import KERNELS, Ledger, Pace, pace_of
from torchckpt.costs.profile import device_here, with_seconds
from torchckpt.errors import CheckpointError, Fault, called, check, raise_fault, text_of
from torchckpt.planning.device import Device, device_named
from torchckpt.planning.draw.units import aligned
from torchckpt.planning.work.block import COLLECTIVE_HEADS, Block, Collective, Link, Stage, fixed, is_amount, is_number

__all__ = ["EFFICIENCY", "PipelineCosts", "pipeline_costs"]

EFFICIENCY = 0.5
"""The share of peak FLOPs of a device that ``torchckpt.planning.rates`` does not know. Large models reach 0.3 to 0.6 in
training."""
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
}
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class PipelineCosts:
    """The result of :func:`pipeline_costs`, for ``plan_pipeline(schedule, costs.stages, budget, costs.link)``."""

    device: Device
    efficiency: float | None
    """The share of peak FLOPs, if one stands for all operations."""
    stages: tuple[Stage, ...]
    counted: tuple[Counted, ...]
    """The same in FLOPs and bytes, by block."""
    link: Link
    optimizer_bytes: float | None = None
    """The bytes of state for each trained parameter, as the caller gave them."""
    profiled_on: str = ""
    """The device whose seconds these are; empty if they are counted for ``device``."""

    def __str__(self) -> str:
        heads = ("stage", "blocks", "parameters", "forward", "backward", "TFLOPs", "moved", "saved", "boundary")
        gathers = any(counted.gathered_bytes for counted in self.counted)
        rows = [(*heads, *Static._fields, *(["gathered"] if gathers else []))]
        for index, numbers in enumerate(self._numbers()):
            blocks, parameters, forward, backward, flops, *sizes = numbers.values()
            rows.append((
                str(index),
                str(blocks),
                f"{parameters / 1e9:.3g} G",
                *(f"{seconds * 1e3:.4g} ms" for seconds in (forward, backward)),
                f"{flops / 1e12:.4g}",
                *(f"{size / 1e9:.4g} GB" for size in sizes[: len(rows[0]) - 6]),
            ))
        seconds = "by kind and size of operation" if self.efficiency is None else f"{self.efficiency:.0%} of its peak"
        seconds = f"seconds of this {self.profiled_on}" if self.profiled_on else seconds
        head = f"{self.device.name}: {seconds}, link {self.link.bandwidth / 1e9:.4g} GB/s"
        size = self.optimizer_bytes
        state = "Adam's state" if size is None else f"{size:g} bytes of state a parameter"
        gathered = "; gathered: what FSDP2 has whole at once" if gathers else ""
        tables = f"{self._sharded()}{self._collectives()}"
        return f"{head}; of one micro-batch:\n\n{aligned(rows)}\n\noptimizer: {state}{gathered}{tables}"

    def as_json(self) -> dict[str, object]:
        """The numbers of its text, for a file."""
        sharded = [{over: held._asdict() for over, held in counted.sharded.items()} for counted in self.counted]
        return {
            "device": self.device.name,
            "efficiency": self.efficiency,
            "profiled_on": self.profiled_on or None,
            "link_bytes_per_second": self.link.bandwidth,
            "optimizer_bytes": self.optimizer_bytes,
            "stages": [{**numbers, "sharded": over} for numbers, over in zip(self._numbers(), sharded)],
            "collectives": [each._asdict() for each in self._most_collectives],
        }

    def _numbers(self) -> Iterator[dict[str, float]]:
        """Those of each stage, in the order of the table."""
        for stage, counts in zip(self.stages, self.counted):
            yield {
                "blocks": len(stage.blocks),
                "parameters": counts.parameters,
                "forward": stage.forward_seconds,
                "backward": stage.input_grad_seconds + stage.weight_grad_seconds,
                "flops": sum(part.forward_flops + part.backward_flops for part in counts.parts),
                "moved": sum(part.forward_moved_bytes + part.backward_moved_bytes for part in counts.parts),
                "saved": stage.saved_bytes,
                "boundary": sum(block.boundary_bytes for block in stage.blocks),
                **counts.static._asdict(),
                "gathered": counts.gathered_bytes,
            }

    def _sharded(self) -> str:
        """What is sharded over which dimensions of the mesh, as a table; empty where nothing is."""
        rows = [
            (str(stage), over or "nothing", *(f"{size / 1e9:.4g} GB" for size in held))
            for stage, counted in enumerate(self.counted)
            for over, held in counted.sharded.items()
        ]
        is_sharded = any(over for counted in self.counted for over in counted.sharded)
        return f"\n\n{aligned([('stage', 'sharded over', *Static._fields), *rows])}" if is_sharded else ""

    @property
    def _most_collectives(self) -> tuple[Collective, ...]:
        """Those of the first block that has most. The first of a stage may have no gradient to pass on, and FSDP2 then
        reduces its own after the backward."""
        return max((part.collectives for counted in self.counted for part in counted.blocks), key=len, default=())

    def _collectives(self) -> str:
        """The collectives of a block, as a table."""
        rows = [each.cells for each in self._most_collectives]
        return f"\n\n{aligned([COLLECTIVE_HEADS, *rows])}" if rows else ""


@called("pipeline_costs()")
def pipeline_costs(
    build: Build,
    device: str | Device,
    *,
    efficiency: float | None = None,
    dtype: str | None = None,
    optimizer_bytes: float | None = None,
    link_bytes_per_second: float | None = None,
    kernels: str = "accelerator",
    profile: bool = False,
) -> PipelineCosts:
    """Count the seconds and bytes of the stages that ``build`` makes, without running them on a device.

    Inside of :func:`~torchckpt.costs.fake_mesh` the stages may be parallelized: tensor, sequence, context and expert
    parallelism, FSDP2. Then counts are those of one rank, with its collectives, and ``static_bytes`` has what FSDP2
    gathers at once. A collective takes seconds by the device's ``network``. A block waits for it. Those of FSDP2 start
    ahead and run beside the block's work, which waits for what they take longer, and is slower meanwhile
    (:attr:`Rates.unhidden <torchckpt.planning.rates.Rates.unhidden>`). ``build`` is called twice there if blocks are
    regions.

    >>> def stages():
    ...     first, second = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2))
    ...     return [first, second], torch.randn(8, 64)
    >>> costs = pipeline_costs(stages, "h100")
    >>> [len(stage.blocks) for stage in costs.stages], costs.stages[0].saved_bytes
    ([4, 4], 8192)

    Args:
        build: a function without arguments that returns the stages, a list of modules, and what the first one is called
            with, a micro-batch: a tensor or a tuple. A third value is the loss, a function of what the last stage
            returns. It runs where tensors have no memory, so it may make a model of any size; it must not ask for
            values. What a stage returns, a tensor or a tuple, the next one is called with. Blocks are regions
            (``torchckpt.checkpoint``); without any, the children of ``nn.Sequential`` and ``nn.ModuleList`` whose
            class occurs more than once.
        device: one of ``torchckpt.planning.device.DEVICES``, or a ``Device``.
        efficiency: the share of peak FLOPs that any operation reaches, beside all of the memory's bandwidth. Default:
            by kind and size of the operation, as ``torchckpt.planning.rates`` has it; 0.5 of a device not found there.
        dtype: torch's default while ``build`` and the stages run: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"tf32"``
            (float32, multiplied as TF32), ``"fp64"``. Default: torch's default, that is, what ``build`` makes.
        optimizer_bytes: of each trained parameter, beside itself and its gradient. Default: those of Adam, two moments
            in float32, or in the dtype of a larger parameter, and a copy in float32 of a smaller one: with weight and
            gradient 16 bytes a parameter of two or four bytes, 32 of eight. A state sharded over 64 ranks has 12 / 64.
        link_bytes_per_second: between neighbouring stages, in one direction. Default: the device's, inside a node.
        kernels: ``"accelerator"``: dropout, RMS norm and attention save what their kernels on an accelerator save.
            ``"cpu"``: what a run on a CPU saves, to the byte.
        profile: also run the stages on the device that is there, an accelerator or else the CPU. The seconds of each
            block, and of what is around the blocks, are the least of four such rounds; bytes are still counted. The
            whole model has to fit there. Default: False.

    Raises:
        ArgumentError: an argument is wrong, or the stages do not run without values, or not on one another, or have
            other blocks when they run.
    """
    machine = device_named(device) if not isinstance(device, Device) else device
    check(_faults(efficiency, dtype, optimizer_bytes, link_bytes_per_second, kernels, profile))
    default, layout = None if dtype is None else _DTYPES[dtype], layout_around()
    pace = pace_of(_multiplying(machine, dtype), efficiency, EFFICIENCY)
    ledger, mesh = (partial(Ledger, pace), None) if layout is None else _in_mesh(layout, machine, pace)
    count = partial(counted, ledger_of=ledger, optimizer_bytes=optimizer_bytes)
    with _named():
        chain = counted_chain(build, count, kernels, default, mesh)
    here = device_here() if profile else None
    if here is not None:
        spent = profiled_chain(build, default, here)
        chain = [with_seconds(*pair, f"stage {number}") for number, pair in enumerate(zip(chain, spent))]
    stages = tuple(_stage(*pair) for pair in enumerate(chain))
    if not any(stage.blocks for stage in stages):
        rule = "no stage has blocks: regions, or children of an nn.ModuleList or nn.Sequential that repeat"
        raise_fault(Fault(rule, f"{len(stages)} stages without any", "torchckpt.checkpoint(block, x)"))
    bandwidth = machine.link_bytes_per_second if link_bytes_per_second is None else link_bytes_per_second
    link, profiled_on = Link(bandwidth=bandwidth), "" if here is None else here.type
    return PipelineCosts(machine, pace.efficiency, stages, tuple(chain), link, optimizer_bytes, profiled_on)


@contextmanager
def _named() -> Iterator[None]:
    """Name what of torch asks for memory in an error that comes out of its code."""
    try:
        yield
    except CheckpointError as error:
        cause, made = error.__cause__, torch.nn.parallel.DistributedDataParallel.__init__.__code__
        if cause is not None and any(frame.f_code is made for frame, _ in walk_tb(cause.__traceback__)):
            rule = "DistributedDataParallel sends parameters to other ranks, and they have no values there"
            raise_fault(Fault(rule, "DistributedDataParallel(), or replicate()", "the plain module; or fully_shard()"))
        if cause is not None and "aten._pin_memory" in text_of(cause):
            rule = "memory is pinned where tensors have none"
            works = "tensors that are not pinned; of fully_shard() CPUOffloadPolicy(pin_memory=False)"
            raise_fault(Fault(rule, "pin_memory(), or CPUOffloadPolicy()", works))
        raise


def _multiplying(device: Device, dtype: str | None) -> Device:
    """The device as it multiplies float32."""
    if dtype != "tf32" or "tf32" not in device.peak_flops:
        return device
    return replace(device, peak_flops={**device.peak_flops, "float32": device.peak_flops["tf32"]})


def _in_mesh(layout: Layout, device: Device, pace: Pace) -> tuple[Callable[[], Ledger], Mesh]:
    """What counts stages that their code has parallelized over the ranks of ``layout``, and what it is counted in."""
    from torchckpt.costs.parallel import ParallelLedger
    from torchckpt.costs.private.mesh import without_values

    node_devices = 1 if device.network is None else device.network.node_devices
    return partial(ParallelLedger, pace, layout, device), partial(without_values, node_devices)


def _stage(index: int, counted: Counted) -> Stage:
    """The planner's stage. A part that has no backward, saves nothing, or changes its input in place is not a block.
    What FSDP2 gathers at once is there at any time, and counts as static."""
    blocks = list(counted.blocks)
    first = next((place for place, part in enumerate(blocks) if _is_block(part)), len(blocks))
    before = _fixed([counted.before, *blocks[:first]])
    return Stage(
        tuple(_block(part) for part in blocks if _is_block(part)),
        replace(before, static_bytes=before.static_bytes + counted.gathered_bytes),
        _fixed([*(part for part in blocks[first:] if not _is_block(part)), counted.after]),
        float(counted.message_bytes) if index else 0.0,
    )


def _is_block(part: Part) -> bool:
    work = part.work
    takes_time = work.forward_seconds > 0 and work.input_grad_seconds + work.weight_grad_seconds > 0
    return takes_time and work.saved_bytes > 0 and not part.changes_input


def _block(part: Part) -> Block:
    work, replay_seconds = part.work, max(part.work.recompute_seconds, _LEAST_SECONDS)
    return replace(work, recompute_seconds=replay_seconds, saved_bytes=work.saved_bytes + part.unsaved_bytes)


def _fixed(parts: Sequence[Part]) -> Block:
    names = "forward_seconds", "input_grad_seconds", "weight_grad_seconds", "saved_bytes", "static_bytes"
    return fixed(*(sum(getattr(part.work, name) for part in parts) for name in names))


def _faults(
    efficiency: object, dtype: object, optimizer_bytes: object, bandwidth: object, kernels: object, profile: object
) -> Iterator[Fault]:
    if efficiency is not None and not (is_number(efficiency) and 0 < efficiency <= 1):
        rule = "efficiency is not a share of the peak, above 0 and at most 1"
        yield Fault(rule, f"efficiency={efficiency!r}", "efficiency=0.5")
    if dtype is not None and dtype not in _DTYPES:
        yield Fault(f"dtype is not one of {', '.join(_DTYPES)}", f"dtype={dtype!r}", 'dtype="bf16"')
    if optimizer_bytes is not None and not is_amount(optimizer_bytes):
        rule = "optimizer_bytes is not a number of bytes, 0 or more"
        yield Fault(rule, f"optimizer_bytes={optimizer_bytes!r}", "optimizer_bytes=12")
    if bandwidth is not None and not (is_number(bandwidth) and bandwidth > 0):
        rule = "link_bytes_per_second is not a number above 0"
        yield Fault(rule, f"link_bytes_per_second={bandwidth!r}", "link_bytes_per_second=50e9")
    if kernels not in KERNELS:
        rule, works = f"kernels is not {' or '.join(KERNELS)}", 'kernels="accelerator"'
        yield Fault(rule, f"kernels={kernels!r}", works)
    if profile and layout_around() is not None:
        rule = "profile runs on one device, and the ranks of a fake_mesh are not there"
        yield Fault(rule, f"profile={profile!r}", "profile=False, or stages that are not parallelized")
