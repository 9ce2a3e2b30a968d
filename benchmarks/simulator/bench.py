"""How long does the simulator take for a step, and does the time per event stay flat as the pipeline grows?

    python benchmarks/simulator/bench.py [--rounds 5] [--largest-rounds 2] [--json FILE]

Each round runs every size once, one after the other, so that all sizes see the machine in the same state; ratios are
taken within a round. An event is an action or a message. Seconds are those of the processor (one core, plain Python),
so that others on the machine disturb less.
"""
from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from torchckpt.planning import Block, Link, ahead, exempt, with_recompute
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.order.schedules import one_f_one_b
from torchckpt.planning.step.simulated import simulate

COSTS, LINK = Block(), Link(latency_seconds=0.25)
BUDGET_SECONDS = 2.0


@dataclass
class Size:
    """One row of the table: 1F1B with ``p`` stages and ``m`` micro-batches."""

    p: int
    m: int
    recomputed: bool = False
    events: int = 0
    schedule_seconds: list[float] = field(default_factory=list)
    simulate_seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    def schedule(self) -> Schedule:
        plain = one_f_one_b(self.p, self.m)
        return with_recompute(plain, exempt(plain, ahead(plain), "last_stage")) if self.recomputed else plain

    def run(self, number: int) -> None:
        gc.collect()
        begin = process_time()
        schedule = self.schedule()
        made = process_time()
        timeline = simulate(schedule, COSTS, LINK, exposed=not self.recomputed)
        done = process_time()
        self.events = len(timeline.events) + len(timeline.messages)
        self.schedule_seconds.append(made - begin)
        self.simulate_seconds.append(done - made)
        self.rounds.append(number)

    def microseconds(self) -> list[float]:
        """Microseconds per event, for each round."""
        return [1e6 * seconds / self.events for seconds in self.simulate_seconds]

    def ratios(self, smallest: Size) -> list[float]:
        """The time per event over that of ``smallest`` in the same round."""
        reference = dict(zip(smallest.rounds, smallest.microseconds()))
        return [own / reference[number] for number, own in zip(self.rounds, self.microseconds())]


def measure(rounds: int, largest_rounds: int) -> list[Size]:
    sizes = [Size(p, 4096) for p in (4, 16, 64, 256)] + [Size(64, 1024), Size(64, 1024, recomputed=True)]
    for number in range(rounds):
        for size in sizes:
            if size.p * size.m < 2**20 or number < largest_rounds:
                size.run(number)
    return [size for size in sizes if size.rounds]


def table(sizes: list[Size]) -> str:
    lines = [
        "| p | m | recompute | events | schedule, s | simulate, s | us per event: median (min - max) | to p = 4 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        each = size.microseconds()
        lines.append(
            f"| {size.p} | {size.m} | {'one ahead' if size.recomputed else 'none'} | {size.events:,} "
            f"| {median(size.schedule_seconds):.2f} | {median(size.simulate_seconds):.2f} "
            f"| {median(each):.2f} ({min(each):.2f} - {max(each):.2f}) | {median(size.ratios(sizes[0])):.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest-rounds", type=int, default=2, help="of p = 256, m = 4096; needs 2 GB (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    arguments = parser.parse_args()
    sizes = measure(arguments.rounds, arguments.largest_rounds)
    print(table(sizes))
    named = next(size for size in sizes if (size.p, size.m, size.recomputed) == (64, 1024, False))
    slowest = max(map(sum, zip(named.schedule_seconds, named.simulate_seconds)))
    verdict = "within" if slowest < BUDGET_SECONDS else "OVER"
    print(f"\np = 64, m = 1024, schedule and simulation, slowest: {slowest:.2f} s, {verdict} {BUDGET_SECONDS:g} s.")
    if arguments.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
        arguments.json.write_text(json.dumps({"machine": machine, "sizes": [asdict(size) for size in sizes]}, indent=1))
    return 0 if slowest < BUDGET_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
