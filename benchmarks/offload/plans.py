"""Plans with a host beside the device: steps over keeping all, and how far they are from the bound.

    python benchmarks/offload/plans.py                      # the table, some six minutes
    python benchmarks/offload/plans.py --cases AF --shares 30 --copies 2 4
"""
from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from tests.planning.plan.published import AWAY, CASES
from tests.planning.plan.recount_moves import recount
from torchckpt.planning import Host
from torchckpt.planning.plan import plan_pipeline

SHARES, COPIES = (10, 20, 30, 50), (0.25, 0.5, 1.0, 2.0, 4.0)
"""The budget in percent of the peak; seconds of the copy of a block one way, over those of its forward."""


def over(seconds: float, keep_all: float) -> str:
    return f"{100 * (seconds / keep_all - 1):.1f}" if math.isfinite(seconds) else "-"


def line(case: str, share: int, copy: float) -> str:
    schedule, stages, link = CASES[case]
    begin = time.process_time()
    plan = plan_pipeline(schedule, stages, f"{share}%", link, host=Host(1e9, out=1 / copy))
    took = time.process_time() - begin
    counted = recount(plan.step)
    assert math.isclose(counted.step_seconds, plan.step_seconds)
    for levels, budget in zip(counted.levels, plan.problem.budget_bytes):
        assert max(highest for highest, _ in levels.values()) <= budget * (1 + 1e-9)
    alone = plan.alone or (math.nan, math.nan)
    cells = [case, str(share), f"{copy:g}"]
    cells += [over(seconds, plan.keep_all_seconds) for seconds in (*alone, plan.step_seconds, plan.bound_seconds)]
    sketch = AWAY[case][share][int(copy).bit_length() - 1] if copy >= 1 else math.nan
    return f"| {' | '.join([*cells, f'{sketch:.1f}' if copy >= 1 else '', f'{took:.1f}'])} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="".join(CASES))
    parser.add_argument("--shares", type=int, nargs="*", default=SHARES)
    parser.add_argument("--copies", type=float, nargs="*", default=COPIES)
    options = parser.parse_args(arguments)
    print("| case | % | copy | recompute only | offload only | both | bound | sketch | seconds to plan |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in options.cases:
        for share in options.shares:
            for copy in options.copies:
                print(line(case, share, copy), flush=True)


if __name__ == "__main__":
    main()
