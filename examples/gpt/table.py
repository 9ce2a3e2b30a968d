"""Table: the measurements of all variants, side by side."""
from __future__ import annotations

from dataclasses import dataclass

from .memory import Curve

__all__ = ["MIB", "Measured", "table"]

MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """The measurements of one variant, after the same number of steps for all."""

    name: str
    loss: float
    gradients_equal: bool  # bit-equal to those without checkpointing
    kept_bytes: list[int]  # by stage
    curve: Curve
    step_flops: int
    step_seconds: float  # median


def table(measured: list[Measured], steps: int) -> str:
    """A table with one column for each variant. The first is the one without checkpointing."""
    plain = measured[0]
    rows = [
        ("", [m.name for m in measured]),
        (f"loss after {steps} steps", [f"{m.loss:.8f}" for m in measured]),
        ("gradients bit-equal", ["yes" if m.gradients_equal else "NO" for m in measured]),
        *((f"kept by stage {stage}, MiB", [_mib(m.kept_bytes[stage]) for m in measured]) for stage in range(2)),
        ("peak of a step, MiB", [_mib(m.curve.peak) for m in measured]),
        ("recomputed a step, GFLOP", [f"{(m.step_flops - plain.step_flops) / 1e9:.3f}" for m in measured]),
        ("seconds a step, median", [f"{m.step_seconds:.3f}" for m in measured]),
    ]
    return "\n".join(_line(label, cells) for label, cells in rows)


def _mib(number: int) -> str:
    return f"{number / MIB:.2f}"


def _line(label: str, cells: list[str]) -> str:
    return f"{label:25}" + "".join(f"{cell:>25}" for cell in cells)
