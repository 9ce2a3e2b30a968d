"""Llama 3 70B on 64 GPUs: the layout of a published run, what it holds and takes, and the best layouts beside it.

    python examples/plan_job.py

FlagPerf publishes this layout with Megatron on 8 x 8 H100: 851 tokens a second and GPU, with 55 GiB in use. Of
torchtitan docs/accuracy.md has this model on 256 GPUs, and of 64 A100 no row. Nothing runs here, and torch is not
imported.
"""
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torchckpt.jobs import MACHINES, Job, JobPlan, Layout, model_named, plan_job, search_layouts

PUBLISHED = 851.0
"""Tokens a second and GPU: FlagOpen/FlagPerf, training/nvidia/llama3_70B-megatron/README.md."""
LAYOUT = Layout(gpus=64, tp=8, pp=4, dp=2, micro_batch=1, global_batch=512, sequence=8192, recompute="planned")


def planned(device: str) -> JobPlan:
    return plan_job(Job(model_named("llama3-70b"), LAYOUT, MACHINES[device]))


def main() -> None:
    for device in ("h100", "a100"):
        plan = planned(device)
        print(f"{plan}\n")
        if device == "h100":
            over = plan.tokens_per_second / PUBLISHED - 1
            print(f"published: {PUBLISHED:.0f} tokens a second and GPU; planned: {over:+.1%}\n")
        base = replace(LAYOUT, tp=1, pp=1, dp=64, recompute="none")
        best = search_layouts(plan.job.model, plan.job.machine, base).best[0]
        print(f"the best of all layouts: {best.head}\n{best.summary}\n")


if __name__ == "__main__":
    main()
