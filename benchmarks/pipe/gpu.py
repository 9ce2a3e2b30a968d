"""GPU: samples per second and bytes of three models in pipelines, and the time that early recomputation hides.

Stages go to as many GPUs as there are, in order; where there are fewer GPUs than stages, neighbours share one. Variants
are measured one after the other, each alone on the devices: of some only one fits. Three questions:

* ``throughput``: samples a second and peak bytes, beside the module on one GPU.
* ``ablation``: the same regions, recomputed early (``Pipe``) and late (regions inside the stages).
* ``overlap``: early and late, where copies between stages take a set time. Hidden is the share of what late adds to no
  recomputation that early does not.
"""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.devices import Pace, half, module_of, name_of, synchronize
from benchmarks.pipe.large import SMALL, gpt, resnet, unet
from benchmarks.pipe.variants import Job, Variant, accumulated, late_pipe_of, of_pipe, of_step, pipe_of, whole
from benchmarks.turns import in_turn, spread
from torchckpt.pipe import balance_by_time
from torchckpt.pipe.run import links

__all__ = ["JOBS", "Cell", "Work", "hidden", "measure", "placed", "rehearse", "throttled", "variants_of"]

JOBS: dict[str, Callable[..., Job]] = {
    "ResNet-101, 224": partial(resnet, rows=128),
    "U-Net(5, 64), 192": partial(unet, rows=32),
    "GPT, 12 x 768, T = 512, bf16": partial(gpt, rows=32),
}
FACTORIES = ("Pipe, never", "Pipe, except_last", "Pipe, always", "late", "late, torch.utils.checkpoint", "Pipe.step")


class Work(NamedTuple):
    """The models to measure, the devices, and the settings."""

    jobs: dict[str, Callable[..., Job]]
    devices: Sequence[str]
    rounds: int
    m: int = 8
    """Number of micro-batches; the ablation uses ``cuts``."""
    cuts: Sequence[int] = (4, 8, 32)
    shares: Sequence[float] = (0.0, 0.5, 1.0, 2.0, 4.0)
    """tc/tf: the time of a copy between stages, over the forward time of a stage on one micro-batch."""

    @property
    def ablated(self) -> str:
        """The last job, which ablation and overlap use."""
        return [*self.jobs][-1]


class Cell(NamedTuple):
    """A job, and its division into stages and micro-batches."""

    job: Job
    balance: list[int]
    m: int
    devices: list[str]

    @classmethod
    def of(cls, job: Job, stages: int, m: int, devices: Sequence[str]) -> Cell:
        """A job divided by measured time, on the first of ``devices``, which has the mini-batch."""
        balance = balance_by_time(stages, job.copied(), job.x[: max(1, len(job.x) // m)])
        return cls(job, list(balance), m, placed(stages, devices))


def placed(stages: int, devices: Sequence[str]) -> list[str]:
    """A device for each stage."""
    used = devices[:stages]
    return [used[stage * len(used) // stages] for stage in range(stages)]


# variants -----------------------------------------------------------------------------------------------------------


def variants_of(cell: Cell, skips: bool) -> dict[str, Callable[[], Variant]]:
    """A function that makes each variant, called at its turn: memory may not hold all of them."""
    made: dict[str, Callable[[], Variant]] = {
        "plain, one GPU": partial(whole, cell.job),
        "plain, accumulated": partial(accumulated, cell.job, cell.m),
    }
    names = [name for name in FACTORIES if not (skips and name.startswith("late"))]  # a skip cannot leave such a region
    return {**made, **{name: partial(_pipeline, name, cell) for name in names}}


def _pipeline(name: str, cell: Cell) -> Variant:
    job, balance, m, devices = cell
    if name == "Pipe.step":
        return of_step(name, job, pipe_of(job, balance, m, "always", devices))
    if name.startswith("late"):
        return of_pipe(name, job, late_pipe_of(job, balance, m, name != "late", devices))
    mode: Any = name.removeprefix("Pipe, ")
    return of_pipe(name, job, pipe_of(job, balance, m, mode, devices))


# measuring ----------------------------------------------------------------------------------------------------------


def measured(make: Callable[[], Variant], samples: int, rounds: int) -> dict[str, Any]:
    """Samples per second, seconds per step, and the peak of allocated bytes of each GPU, parameters included."""
    _clear()
    try:
        variant = make()
        variant.step()
        synchronize()
        for device in _gpus():
            module_of().reset_peak_memory_stats(device)
        seconds = in_turn({"": variant.step}, rounds)[""]
        peaks = [module_of().max_memory_allocated(device) for device in _gpus()]
    except torch.OutOfMemoryError:
        return {"out of memory": True}
    return {
        "samples a second": spread([samples / one for one in seconds]),
        "seconds a step": spread(seconds),
        "peak bytes": peaks,
    }


def _gpus() -> range:
    return range(torch.accelerator.device_count())


def _clear() -> None:
    gc.collect()
    module_of().empty_cache()


# the three questions ------------------------------------------------------------------------------------------------


def throughput(work: Work) -> list[dict[str, Any]]:
    rows = []
    devices = work.devices
    for name, job_of in work.jobs.items():
        cell = Cell.of(job_of(devices[0]), max(2, min(4, len(devices))), work.m, devices)
        for variant, make in variants_of(cell, skips=name.startswith("U-Net")).items():
            found = measured(make, len(cell.job.x), work.rounds)
            cut = {"stages": len(cell.balance), "micro-batches": work.m}
            rows.append({"model": name, **cut, "variant": variant, **found})
            print(_line(name, variant, found))
    return rows


def ablation(work: Work) -> list[dict[str, Any]]:
    """{late, early} x {2, 4} stages x micro-batches."""
    rows = []
    job = work.jobs[work.ablated](work.devices[0])
    for stages in (2, 4):
        for m in work.cuts:
            cell = Cell.of(job, stages, m, work.devices)
            for name, variant in (("late", "late"), ("early", "Pipe, always")):
                found = measured(partial(_pipeline, variant, cell), len(job.x), work.rounds)
                rows.append({"stages": stages, "micro-batches": m, "recompute": name, **found})
                print(_line(f"{stages} stages, {m} micro-batches", name, found))
    return rows


def overlap(work: Work) -> list[dict[str, Any]]:
    """For each tc/tf, the step without, with late, and with early recomputation, in 2 stages."""
    rows = []
    pace = Pace()
    cell = Cell.of(work.jobs[work.ablated](work.devices[0]), 2, work.m, work.devices)
    forward_seconds = _forward_seconds(cell)
    for share in work.shares:
        steps = {}
        with throttled(pace, share * forward_seconds):
            for name, variant in (("never", "Pipe, never"), ("late", "late"), ("early", "Pipe, always")):
                steps[name] = measured(partial(_pipeline, variant, cell), len(cell.job.x), work.rounds)
        rows.append({"tc/tf": share, "tf seconds": forward_seconds, **steps, "hidden": hidden(steps)})
        print(f"  tc/tf {share:3}: hidden {rows[-1]['hidden']}")
    return rows


def hidden(steps: dict[str, dict[str, Any]]) -> float | None:
    """The share of late recomputation's extra time that early recomputation hides; None if it adds none or ran out of
    memory."""
    if any("seconds a step" not in found for found in steps.values()):
        return None
    never, late, early = (steps[name]["seconds a step"][1] for name in ("never", "late", "early"))
    return (late - early) / (late - never) if late > never else None


def _forward_seconds(cell: Cell) -> float:
    """Forward seconds of the first stage on one micro-batch."""
    _clear()
    stage = cell.job.copied()[: cell.balance[0]]
    x = cell.job.x[: max(1, len(cell.job.x) // cell.m)]
    with torch.no_grad():
        return median(in_turn({"": partial(stage, x)}, rounds=5)[""])


# copies that take a set time ----------------------------------------------------------------------------------------


@contextmanager
def throttled(pace: Pace, seconds: float) -> Iterator[None]:
    """Inside this context, copies between stages take ``seconds`` longer, on the stream of arrival only.

    The pause begins when the copied tensor has arrived. If two stages share a GPU, nothing is copied, and the stream of
    arrival waits for the sender's stream here.
    """
    moved = links._moved

    def slowly(tensor: Tensor, source: Any, leaves_on: Any, target: Any, enters_on: Any) -> Tensor:
        arrived = moved(tensor, source, leaves_on, target, enters_on)
        if leaves_on is not None and enters_on is not None:
            enters_on.wait_stream(leaves_on)
        with links.on(enters_on):
            pace.pause(seconds)
        return arrived

    links._moved = slowly
    try:
        yield
    finally:
        links._moved = moved


# report -------------------------------------------------------------------------------------------------------------


def _line(what: str, variant: str, found: dict[str, Any]) -> str:
    if "out of memory" in found:
        return f"  {what:32}{variant:32} out of memory"
    peaks = ", ".join(f"{peak / 2**30:.2f}" for peak in found["peak bytes"])
    return f"  {what:32}{variant:32}{found['samples a second']!s:>26} samples/s   peak GiB {peaks}"


def measure(device: torch.device, rounds: int) -> dict[str, Any]:
    return _measured(device, Work(JOBS, _all_of(device), rounds))


def rehearse(device: torch.device, rounds: int) -> dict[str, Any]:
    """All jobs on one device, and the last on all devices."""
    every, last = _all_of(device), {"GPT": partial(SMALL["GPT"], dtype=half(device))}
    one = Work({**SMALL, **last}, every[:1], rounds, m=4, cuts=(2, 4), shares=(0.0, 1.0))
    return {
        "one device": _measured(device, one),
        "all devices": _measured(device, one._replace(jobs=last, devices=every)),
    }


def _all_of(device: torch.device) -> list[str]:
    return [f"{device.type}:{number}" for number in _gpus()]


def _measured(device: torch.device, work: Work) -> dict[str, Any]:
    began = perf_counter()
    print(f"throughput, {work.m} micro-batches, on {len(work.devices)} of {name_of(device)}")
    found: dict[str, Any] = {"throughput": throughput(work)}
    print(f"ablation, {work.ablated}")
    found["ablation"] = ablation(work)
    print(f"overlap with copies that take tc, {work.ablated}")
    found["overlap"] = overlap(work)
    return {
        "device": name_of(device),
        "devices": len(work.devices),
        "torch": torch.__version__,
        "rounds": work.rounds,
        **found,
        "minutes": (perf_counter() - began) / 60,
    }
