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
    """What the step of the schedule holds at most, with the logits at the loss."""
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
    of_rank = [stage for stage, place in enumerate(layout.placement) if place == rank]
    layers = job.rank_layers[rank]
    logits = sum(map(job.loss_bytes, of_rank))
    peak += 0.0 if job.holds_loss else logits
    working = _working(job, layers)
    if software.offloads:
        peak = logits + 0.1 * (peak - logits)
    if layout.state == "fsdp2":
        return _fsdp(job, parameters, shared, layers, peak, logits, working)
    gradients = shared if software.gradients_shared else parameters
    return RankMemory(
        parameters * software.parameter_bytes,
        gradients * software.gradient_bytes,
        shared * software.optimizer_bytes,
        0.0,
        peak,
        max(0.0, working - logits),
    )


def _working(job: Job, layers: list[int]) -> float:
    if not layers:
        return 0.0
    saved = max((job.work[job.model.is_dense(layer)].saved for layer in layers), key=lambda saved: saved.whole)
    return max(0.3 * saved.whole, saved.whole - saved.kept)


def _fsdp(
    job: Job, parameters: float, shared: float, layers: list[int], peak: float, logits: float, working: float
) -> RankMemory:
    """FSDP2 gathers two layers at once, and the ends. In a pipeline it keeps what it gathered, and gradients whole."""
    layout, software, model = job.layout, job.layout.software, job.model
    unit = max((sum(job.held_parameters(layer)) for layer in layers), default=0.0)
    ends = model.embedding_parameters / layout.tp * (1 if model.tied else 2)
    whole = layout.pp > 1 or not software.resharded
    gathered = 2 * parameters if whole else 4 * unit + 2 * ends
    gathered += 4 * parameters if layout.pp > 1 else 0.0
    gradients = software.gradient_bytes * shared
    late = gradients if layout.pp == 1 and layout.micro_batches == 1 else 0.0  # which are not there yet at the loss
    replay = unit * (software.reduce_bytes + 2) + working
    is_at_loss = logits + 0.9 * late > late + replay
    return RankMemory(
        software.parameter_bytes * shared,
        gradients - (late if is_at_loss else 0.9 * late),
        software.optimizer_bytes * shared,
        gathered,
        peak if is_at_loss else peak - logits,
        0.0 if is_at_loss else replay,
    )
