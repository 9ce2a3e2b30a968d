"""Llama 3 70B on 64 GPUs, and beside it what others have published: planned and measured tokens a second.

    python examples/plan_job.py             # seconds; nothing runs, and torch is not imported
    python examples/plan_job.py --best      # also the best layout of 64 H100 and of 64 A100

FlagPerf ran Megatron on 8 x 8 H100, and torchtitan FSDP2 with tensor parallelism on 256 H100 of 500 W. Of 64 A100 no
run is published. docs/accuracy.md has all 353 runs.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchckpt.jobs import MACHINES, Job, JobPlan, Layout, Machine, model_named, plan_job, search_layouts
from torchckpt.jobs.layout import SOFTWARE

MODEL = model_named("llama3-70b")
LAYOUT = Layout(gpus=64, tp=8, pp=4, dp=2, global_batch=512, recompute="planned")
SHARDED = Layout(
    gpus=256, tp=8, dp=32, micro_batch=16, global_batch=512, state="fsdp2", recompute="full",
    software=SOFTWARE["torchtitan"],
)  # fmt: skip
PUBLISHED = {
    "64 H100": "851, [Megatron by FlagPerf](docs/accuracy.md)",
    "256 H100, 500 W": "597, [torchtitan](docs/accuracy.md)",
    "64 A100": "none",
}
"""Tokens a second and GPU: FlagOpen/FlagPerf, training/nvidia/llama3_70B-megatron/README.md; pytorch/torchtitan,
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md."""


def capped() -> Machine:
    """The H100 of torchtitan's runs: 96 GB of HBM2e, and 500 W of 700. The clock falls with the root of the power."""
    device = MACHINES["h100"].device
    peak = {dtype: flops * (500 / 700) ** 0.5 for dtype, flops in device.peak_flops.items()}
    return replace(
        MACHINES["h100"], device=replace(device, bytes_per_second=2.4e12, memory_bytes=96e9, peak_flops=peak)
    )


def plans() -> dict[str, JobPlan]:
    jobs = {
        "64 H100": Job(MODEL, LAYOUT, MACHINES["h100"]),
        "256 H100, 500 W": Job(MODEL, SHARDED, capped()),
        "64 A100": Job(MODEL, LAYOUT, MACHINES["a100"]),
    }
    return {name: plan_job(job) for name, job in jobs.items()}


def table() -> Iterator[str]:
    yield "| Llama 3 70B | layout | recomputed | memory | tokens a second and GPU | published |"
    yield "|---|---|---|---|---|---|"
    for name, plan in plans().items():
        layout, memory = plan.job.layout, plan.job.machine.device.memory_bytes
        split = ", ".join(f"{word} {ranks}" for word, ranks in _ranks(layout) if ranks > 1)
        yield (
            f"| {name} | {split} | {plan.recomputed_share:.0%} | {plan.peak_bytes / 1e9:.1f} of {memory / 1e9:.0f} GB "
            f"| {plan.tokens_per_second:.0f} | {PUBLISHED[name]} |"
        )


def _ranks(layout: Layout) -> list[tuple[str, int]]:
    data = "FSDP2" if layout.state == "fsdp2" else "dp"
    return [("tp", layout.tp), ("pp", layout.pp), (data, layout.dp)]


def best(device: str) -> JobPlan:
    """The shortest step of all layouts that fit 64 of these devices."""
    base = replace(LAYOUT, tp=1, pp=1, dp=64, recompute="none")
    return search_layouts(MODEL, MACHINES[device], base).best[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--best", action="store_true", help="also the best layout of 64 H100 and of 64 A100")
    options = parser.parse_args(arguments)
    print("\n".join(table()))
    if options.best:
        for device in ("h100", "a100"):
            plan = best(device)
            print(f"\nthe best of 64 x {device}: {plan.head}\n{plan.summary}")


if __name__ == "__main__":
    main()
