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
    software, is_fsdp = job.layout.software, job.layout.state == "fsdp2"
    parameters, shared = sum(job.rank_parameters[rank]), job.shared(*job.rank_parameters[rank])
    held = job.held_loss_bytes(rank)
    peak += 0.0 if job.holds_loss else held
    if software.offloads:
        peak = held + 0.1 * (peak - held)
    return RankMemory(
        (shared if is_fsdp else parameters) * software.parameter_bytes,
        (shared if is_fsdp or software.gradients_shared else parameters) * software.gradient_bytes
        - job.missing_bytes(rank, peak),
        shared * software.optimizer_bytes,
        _gathered(job, rank, parameters) if is_fsdp else 0.0,
        peak,
        job.working_bytes(rank),
    )


def _gathered(job: Job, rank: int, parameters: float) -> float:
    """FSDP2 gathers two layers at once, and the ends. In a pipeline it keeps what it gathered, and gradients whole."""
    if job.layout.pp > 1:
        return 2 * parameters + 4 * parameters
    if not job.layout.software.resharded:
        return 2 * parameters
    unit = max((sum(job.held_parameters(layer)) for layer in job.rank_layers[rank]), default=0.0)
    return 4 * unit + 2 * (job.model.embedding_parameters / job.layout.tp * (1 if job.model.tied else 2))
