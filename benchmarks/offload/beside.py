"""Offloaded layers beside ``save_on_cpu``, torchtune and TRL, on a simulated device: seconds, peak bytes, bits.

    python benchmarks/offload/beside.py             # the table, some four minutes
    python benchmarks/offload/beside.py --races     # the same programs with other delays in each run: whose race?
"""
from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

from tests.device import Rates, load, why_not

SIM = None if why_not() else load(1)  # before the first backward

import torchckpt  # noqa: E402
from benchmarks.offload.peers import PEERS  # noqa: E402
from benchmarks.transformer import Block  # noqa: E402

DEVICE = "sim:0"
LAYERS, WIDTH, HEADS, LENGTH, BATCH, WORDS = 16, 64, 4, 64, 4, 61
FORWARD_SECONDS = 0.02
"""Of one block."""
LINKS = (0.5, 1.0, 2.0, 4.0)
"""Seconds of the copy of a block one way, over those of its forward."""
SHORT_LAYERS, SHORT_RUNS = 6, 2


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(super().forward(x), 0.1)


class GPT(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Dropping(WIDTH, HEADS) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def layers_checkpointed(model: nn.Module) -> AbstractContextManager[Any]:
    return torchckpt.checkpoint_layers(model, "layers.*")


def layers_offloaded(model: nn.Module, every: int = 1) -> AbstractContextManager[Any]:
    return torchckpt.offload_layers(model, "layers.*", every=every, min_bytes=1024)


Way: TypeAlias = Callable[[nn.Module], AbstractContextManager[Any]]


def ways() -> dict[str, Way]:
    """What is compared: each makes a context for a forward of a model."""
    peers = {name: peer for name, find in PEERS.items() if (peer := find()) is not None}
    ours = {
        "checkpoint_layers": layers_checkpointed,
        "offload_layers": layers_offloaded,
        "offload_layers, every=2": partial(layers_offloaded, every=2),
    }
    return {"keep all": lambda model: nullcontext(), **peers, **ours}


class Step(NamedTuple):
    seconds: float
    peak_bytes: int
    """Above what was there before."""
    waits: int
    """Of the host for the device."""
    pins: int
    """Allocations of pinned memory."""
    is_equal: bool
    """Whether loss and gradients are those of the plain step."""


class Trial:
    """A model, a batch, and steps of it."""

    def __init__(self, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers).to(DEVICE)
        self.tokens = torch.randint(WORDS, (BATCH, LENGTH)).to(DEVICE)
        self.expected = self.step(nullcontext())

    def step(self, context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(1)
        with context:
            loss = self.model(self.tokens)
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return [loss.detach(), *gradients]

    def is_right(self, results: list[Tensor]) -> bool:
        return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(results, self.expected))

    def measured(self, make: Way, rates: Rates, rounds: int = 3) -> Step:
        """The shortest of ``rounds`` steps by the clock of the device, after two: a busy host makes some longer."""
        for _ in range(2):
            self.step(make(self.model))
        return min((self._measured(make, rates) for _ in range(rounds)), key=lambda step: step.seconds)

    def _measured(self, make: Way, rates: Rates) -> Step:
        gc.collect()
        SIM.synchronize()
        before = torch.accelerator.memory_allocated(0)
        torch.accelerator.reset_peak_memory_stats(0)
        with SIM.durations(rates), SIM.record() as ran:
            SIM.reset_counts()
            results = self.step(make(self.model))
            counts = SIM.counts()
        peak = torch.accelerator.max_memory_allocated(0) - before
        seconds = max(one.end_seconds for one in ran) - min(one.start_seconds for one in ran)
        return Step(seconds, peak, counts.waits, counts.pins, self.is_right(results))


def rates_of(model: GPT, link: float) -> Rates:
    """A device on which a block's forward takes FORWARD_SECONDS, and a copy of what it saves ``link`` times as long."""
    x = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE, requires_grad=True) * 1
    with torchckpt.testing.flops() as counted, torchckpt.testing.saved_bytes() as saved:
        model.layers[0](x)
    return Rates(
        flops_per_second=counted.total / FORWARD_SECONDS, link_bytes_per_second=saved.total / (link * FORWARD_SECONDS)
    )


def table(links: Sequence[float], layers: int, rounds: int = 3) -> list[dict[str, Any]]:
    rows = []
    trial = Trial(layers)
    for link in links:
        rates = rates_of(trial.model, link)
        found = {name: trial.measured(make, rates, rounds) for name, make in ways().items()}
        base = found["keep all"]
        for name, step in found.items():
            over = {"step": step.seconds / base.seconds, "peak": step.peak_bytes / base.peak_bytes}
            rows.append({"link": link, "way": name, **step._asdict(), **over})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A row for each way: a step and its peak over keeping all, for each link; and what the host did."""
    for name in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == name]
        steps, last = [f"{row['step']:.2f}" for row in own], own[-1]
        equal = "equal" if all(row["is_equal"] for row in own) else "OTHER"
        cells = [name, *steps, f"{last['peak']:.1%}", f"{last['waits']}", f"{last['pins']}", equal]
        print(f"| {' | '.join(cells)} |", flush=True)


def on_default_stream(trial: Trial, make: Way) -> bool:
    return trial.is_right(trial.step(make(trial.model)))


def on_another_stream(trial: Trial, make: Way) -> bool:
    stream = torch.Stream(DEVICE)
    with stream:
        results = trial.step(make(trial.model))
    stream.synchronize()
    return trial.is_right(results)


def changed_in_place(trial: Trial, make: Way) -> bool:
    """A layer's result is changed in place by the next one, which makes plain autograd raise an error."""
    x = torch.linspace(-2, 2, 4096, device=DEVICE).requires_grad_()
    layers = nn.ModuleDict({"layers": nn.ModuleList([nn.Tanh()])})
    with make(layers):
        y = layers["layers"][0](x)
        y.mul_(3)
    y.sum().backward()
    return torch.allclose(x.grad.cpu(), 3 * (1 - x.detach().cpu().tanh() ** 2), atol=1e-5)


PROGRAMS = {
    "on the default stream": on_default_stream,
    "on another stream": on_another_stream,
    "changed in place": changed_in_place,
}


def races(runs: int) -> dict[str, dict[str, dict[str, int]]]:
    """What becomes of so many runs of each program, with other delays in each run."""
    trial = Trial(layers=4)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name, make in ways().items():
        found[name] = {}
        for title, program in PROGRAMS.items():
            results = Counter(outcome(partial(program, trial, make), seed) for seed in range(runs))
            found[name][title] = dict(results)
    return found


def outcome(program: Callable[[], bool], seed: int) -> str:
    SIM.synchronize()
    with SIM.delays(seed):
        try:
            return "right" if program() else "wrong"
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return "an error"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, nargs="?", const=100, metavar="RUNS", help="of each program, with delays")
    parser.add_argument(
        "--short", type=int, nargs="?", const=SHORT_RUNS, metavar="RUNS",
        help="few layers, one link and one round; few runs: what the tests run",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")  # parameters were made on the default stream
    if SIM is None:
        sys.exit(f"benchmarks/offload/beside.py: {why_not()}")
    results: Any
    if arguments.short:
        results = {"steps": table([1.0], SHORT_LAYERS, rounds=1), "races": races(arguments.short)}
        print(json.dumps(results, indent=1))
    elif arguments.races:
        results = races(arguments.races)
        for name, found in results.items():
            cells = [", ".join(f"{count} {word}" for word, count in sorted(each.items())) for each in found.values()]
            print(f"| {' | '.join([name, *cells])} |")
    else:
        results = table(LINKS, LAYERS)
        show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
