"""What does one region add, over what torch adds? The least of many rounds of thread CPU time, in several processes."""
from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import thread_time_ns

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from benchmarks.options import options
from benchmarks.overhead.bench import VARIANTS, two_tiny_ops

CALLS = 20


def that_saves_its_result(x: Tensor) -> Tensor:
    return (x * 2).exp()


FUNCTIONS = {"(x * 2).sin()": two_tiny_ops, "(x * 2).exp()": that_saves_its_result}


def least(rounds: int) -> dict[tuple[str, str], float]:
    """The least microseconds a call, forward and backward, of each function by each variant, which take turns."""
    x, gradient = torch.randn(4, 4, requires_grad=True), torch.ones(4, 4)
    pairs = [(name, function) for name in FUNCTIONS for function in VARIANTS]
    found = dict.fromkeys(pairs, float("inf"))
    gc.disable()
    for turn in range(rounds):
        for name, variant in pairs:
            run = partial(VARIANTS[variant], FUNCTIONS[name], x)
            begin = thread_time_ns()
            for _ in range(CALLS):
                run().backward(gradient)
            found[name, variant] = min(found[name, variant], (thread_time_ns() - begin) / CALLS / 1e3)
        if turn % 50 == 0:
            gc.collect()
    gc.enable()
    return found


def ratios(rounds: int) -> list[float]:
    """For each function: what torchckpt adds to the plain call, over what ``torch.utils.checkpoint`` adds."""
    found = least(rounds)
    added = [[found[name, one] - found[name, "no checkpointing"] for one in VARIANTS] for name in FUNCTIONS]
    ours, theirs = (list(VARIANTS).index(name) for name in ("torchckpt", "torch.utils.checkpoint"))
    return [one[ours] / one[theirs] for one in added]


def main() -> None:
    parser = options(__doc__, rounds=600)
    parser.add_argument("--processes", type=int, default=10, help="one after the other (default: 10)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.processes == 1:
        print(*ratios(arguments.rounds))
        return
    command = [sys.executable, __file__, "--processes", "1", "--rounds", str(arguments.rounds)]
    runs = range(arguments.processes)
    printed = [subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout for _ in runs]
    for name, values in zip(FUNCTIONS, zip(*(map(float, line.split()) for line in printed))):
        low, high = min(values), max(values)
        print(f"{name}: torchckpt adds {low:.2f} to {high:.2f} of what torch.utils.checkpoint adds")


if __name__ == "__main__":
    main()
