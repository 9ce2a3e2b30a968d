"""Memory: what each rank of a job holds at its peak, by part."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from torchckpt.jobs.job import Job

__all__ = ["RankMemory", "memory_of"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights and gradients of FSDP that are whole for a time."""
    activations: float
    """What the step of the schedule holds at most, with the logits at the loss, where these are more than ``working``.
    """
    working: float
    """What a backward needs beside what is saved: gradients of activations, or what a selective recompute makes again.
    The replay of a whole block is part of the step."""

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each part, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def memory_of(job: Job, peaks: Sequence[float] | None = None) -> list[RankMemory]:
    """The memory of each rank of a pipeline; ranks beside it hold as much.

    Args:
        peaks: what the step of each rank holds at most. Default: the step of the layout.
    """
    return [_rank(job, rank, peak) for rank, peak in enumerate(job.step.peak_bytes if peaks is None else peaks)]


def _rank(job: Job, rank: int, peak: float) -> RankMemory:
    layout, software = job.layout, job.layout.software
    parameters, shared = sum(job.rank_parameters[rank]), job.shared(*job.rank_parameters[rank])
    held, working = job.held_loss_bytes(rank), job.working_bytes(rank)
    peak += 0.0 if job.holds_loss else held
    if software.offloads:
        peak = held + 0.1 * (peak - held)
    if layout.state == "fsdp2":
        return _fsdp(job, rank, peak)
    gradients = shared if software.gradients_shared else parameters
    return RankMemory(
        parameters * software.parameter_bytes,
        gradients * software.gradient_bytes - job.missing_bytes(rank, peak),
        shared * software.optimizer_bytes,
        0.0,
        peak,
        working,
    )


def _fsdp(job: Job, rank: int, peak: float) -> RankMemory:
    """FSDP2 gathers two layers at once, and the ends. In a pipeline it keeps what it gathered, and gradients whole."""
    layout, software, model = job.layout, job.layout.software, job.model
    parameters, shared = sum(job.rank_parameters[rank]), job.shared(*job.rank_parameters[rank])
    unit = max((sum(job.held_parameters(layer)) for layer in job.rank_layers[rank]), default=0.0)
    ends = model.embedding_parameters / layout.tp * (1 if model.tied else 2)
    whole = layout.pp > 1 or not software.resharded
    gathered = 2 * parameters if whole else 4 * unit + 2 * ends
    gathered += 4 * parameters if layout.pp > 1 else 0.0
    return RankMemory(
        software.parameter_bytes * shared,
        software.gradient_bytes * shared - job.missing_bytes(rank, peak),
        software.optimizer_bytes * shared,
        gathered,
        peak,
        job.working_bytes(rank),
    )
