"""Large: a Llama of 1.1 billion parameters on one accelerator: byte budgets beside what users have otherwise.

    python benchmarks/layers/large.py --rounds 20

All ways share their parameters, so that they can take turns. A step is a forward and a backward, without an optimizer.
"""
from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs from any folder

import torchckpt
from benchmarks.devices import chosen, half, module_of, name_of, synchronize
from benchmarks.graph.subjects import settled
from benchmarks.layers.ways import contexts
from benchmarks.offload.peers import PEERS
from benchmarks.options import write
from benchmarks.turns import Spread, in_turn, ratios, spread
from torchckpt import BudgetInfeasible
from torchckpt.planning.remat.frontier_svg import draw_frontier

__all__ = ["SMALL", "Sizes", "draw", "measure", "show"]

OURS, ON_HOST = "budget=", "budget=, host="
SHARES = (0.75, 0.5, 0.25)
"""Budgets, over the peak of the step that keeps everything."""
_STEPS = 5
"""What a budget counts and plans is done after so many steps, and so are the first copies to the host."""


class Sizes(NamedTuple):
    """Sizes of the model and of a batch; the defaults are those of TinyLlama 1.1B, which fit a device of 80 GB."""

    layers: int = 22
    width: int = 2048
    inner: int = 5632
    heads: int = 32
    groups: int = 4
    words: int = 32000
    length: int = 2048
    rows: int = 4
    host: str = "48GiB"


SMALL = Sizes(layers=4, width=64, inner=128, heads=4, groups=2, words=61, length=32, rows=16, host="1GiB")


class Trial:
    """The model, a batch, and steps of copies that share its parameters."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(0)
        self.model = _llama(sizes, device).train()
        self.text = torch.randint(sizes.words, (sizes.rows, sizes.length)).to(device)
        self.expected = self.gradients(self.step())
        self.plain_bytes = self.peak_bytes(self.step())

    def copied(self) -> nn.Module:
        shared: dict[int, Any] = {id(one): one for one in chain(self.model.parameters(), self.model.buffers())}
        return copy.deepcopy(self.model, shared)

    def step(
        self, model: nn.Module | None = None, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Callable[[], None]:
        called = model or self.model

        def run() -> None:
            called.zero_grad(set_to_none=True)
            with around():
                loss = called(input_ids=self.text, labels=self.text).loss
            loss.backward()

        return run

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Of the allocator, above what is there before the step, which has no gradients."""
        run()
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        before = settled(self.device)
        run()
        synchronize()
        return int(module_of(self.device).max_memory_allocated(self.device) - before)

    def gradients(self, run: Callable[[], None]) -> list[Tensor]:
        """By kernels that add in one order."""
        torch.use_deterministic_algorithms(True)
        try:
            torch.manual_seed(1)
            run()
        finally:
            torch.use_deterministic_algorithms(False)
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return gradients

    def is_equal(self, run: Callable[[], None]) -> bool:
        found = self.gradients(run)
        return len(found) == len(self.expected) and all(map(torch.equal, found, self.expected))


def _llama(sizes: Sizes, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # an extra of the tests

    config = LlamaConfig(
        hidden_size=sizes.width, intermediate_size=sizes.inner, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.groups, vocab_size=sizes.words,
        max_position_embeddings=sizes.length, use_cache=False, attention_dropout=0.1, attn_implementation="sdpa",
    )  # fmt: skip
    with device:
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(half(device))


# ways -----------------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """One way to run the step, and what was promised of it."""

    step: Callable[[], None]
    budget_bytes: int | None = None
    plan: Any = None


def ways(trial: Trial, sizes: Sizes, peers: Collection[str]) -> Iterator[tuple[str, Callable[[], Way]]]:
    """By name, what makes each."""
    yield "keep all", lambda: Way(trial.step())
    yield "torch.utils.checkpoint", partial(_stock, trial)
    yield "SAC, products", partial(_stock, trial, context_fn=partial(contexts, 1))
    yield "checkpoint_layers", partial(_layers, trial, torchckpt.checkpoint_layers)
    yield "every=2", partial(_layers, trial, torchckpt.checkpoint_layers, every=2)
    for share in SHARES:
        yield f"{OURS} {share:.0%}", partial(_budgeted, trial, share)
    for share in SHARES[1:]:
        yield f"{ON_HOST} {share:.0%}", partial(_budgeted, trial, share, host=sizes.host)
    yield "offload_layers", partial(_layers, trial, torchckpt.offload_layers)
    yield "offload_layers, every=2", partial(_layers, trial, torchckpt.offload_layers, every=2)
    for name, find in PEERS.items():
        if name in peers and (peer := find()) is not None:
            yield name, partial(_around, trial, peer)


def _stock(trial: Trial, **options: Any) -> Way:
    model: Any = trial.copied()
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    return Way(trial.step(model))


def _layers(trial: Trial, apply: Callable[..., Any], **options: Any) -> Way:
    model = trial.copied()
    apply(model, "model.layers.*", **options)
    return Way(trial.step(model))


def _around(trial: Trial, peer: Callable[[nn.Module], AbstractContextManager[Any]]) -> Way:
    return Way(trial.step(around=partial(peer, trial.model)))


def _budgeted(trial: Trial, share: float, **options: Any) -> Way:
    model, budget = trial.copied(), int(share * trial.plain_bytes)
    handle = torchckpt.checkpoint_layers(model, budget=budget, **options)
    step = trial.step(model)
    for _ in range(_STEPS):
        step()
    return Way(step, budget, handle.plan)


# measuring ------------------------------------------------------------------------------------------------------------


def measure(device: torch.device, rounds: int, sizes: Sizes, peers: Collection[str] = tuple(PEERS)) -> dict[str, Any]:
    """Of each way its peak, its step over the one that keeps all, and whether its gradients are equal."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    trial = Trial(sizes, device)
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name, make in ways(trial, sizes, peers):
        try:
            way = make()
            rows[name] = _counted(trial, way)
            runs[name] = way.step
        except (BudgetInfeasible, torch.OutOfMemoryError) as error:
            rows[name] = {"fails": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    seconds = in_turn(runs, rounds)
    for name, values in seconds.items():
        rows[name]["seconds"] = spread(values)
        rows[name]["step"] = ratios(values, seconds["keep all"])
    return {
        "device": name_of(device), "torch": torch.__version__, "rounds": rounds, "sizes": sizes._asdict(),
        "parameters": sum(one.numel() for one in trial.model.parameters()), "plain bytes": trial.plain_bytes,
        "rows": rows,
    }  # fmt: skip


def _counted(trial: Trial, way: Way) -> dict[str, Any]:
    found: dict[str, Any] = {"peak bytes": trial.peak_bytes(way.step), "equal": trial.is_equal(way.step)}
    if way.plan is not None:
        plan = way.plan
        found["budget bytes"], found["planned bytes"] = way.budget_bytes, plan.peak_bytes
        found["kept"], found["away"], found["calls"] = len(plan.kept), len(plan.away), len(plan.took.calls)
        found["recompute seconds"], found["layer seconds"] = plan.recompute_seconds, plan.plain_seconds
    return found


# tables ---------------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """A row for each way. *Planned* is the step of the plan: what was measured that keeps all, and the replays."""
    plain_bytes, rows = found["plain bytes"], found["rows"]
    plain_seconds = rows["keep all"]["seconds"][1]
    parameters = f"{found['parameters'] / 1e9:.2f} G parameters"
    print(f"\n{found['device']}, torch {found['torch']}: {parameters}; keep all: {plain_bytes / 1e9:.2f} GB, "
          f"{plain_seconds * 1e3:.0f} ms\n")  # fmt: skip
    print("| way | budget | peak | planned peak | step / keep all | planned | kept / away / calls | gradients |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        if "fails" in row:
            print(f"| {name} | {row['fails']} | | | | | | |")
            continue
        promised = (row.get(key) for key in ("budget bytes", "planned bytes"))
        budget, planned = ("" if size is None else f"{size / plain_bytes:.1%}" for size in promised)
        extra = f"{1 + row['recompute seconds'] / plain_seconds:.2f}" if "recompute seconds" in row else ""
        calls = f"{row['kept']} / {row['away']} / {row['calls']}" if "kept" in row else ""
        peak, step = f"{row['peak bytes'] / plain_bytes:.1%}", str(Spread(*row["step"]))
        cells = [name, budget, peak, planned, step, extra, calls]
        print(f"| {' | '.join(cells)} | {'equal' if row['equal'] else 'other'} |")


def draw(found: dict[str, Any], path: Path) -> None:
    """Peak bytes across, extra time up; without the ways that send all to the host, which are far above."""
    points: dict[str, list[tuple[int, float]]] = {OURS: []}
    for name, row in found["rows"].items():
        if "step" in row and name != "keep all" and not name.startswith(("offload", *PEERS)):
            tool = ON_HOST if name.startswith(ON_HOST) else OURS if name.startswith(OURS) else name
            points.setdefault(tool, []).append((row["peak bytes"], max(0.0, row["step"][1] - 1)))
    own = points.pop(OURS)
    title = f"Llama, 1.1 G parameters, on one {found['device']}"
    text = draw_frontier(
        own, points, eager_peak_bytes=found["plain bytes"], title=title, name="checkpoint_layers(budget=)",
        cost="extra time",
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a model of four small layers")
    parser.add_argument("--peers", nargs="*", default=tuple(PEERS), help="other ways to have tensors on the host")
    parser.add_argument("--draw", type=Path, help="a file for the picture")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    given = parser.parse_args()
    found = measure(chosen(given.device, 1), given.rounds, SMALL if given.small else Sizes(), given.peers)
    show(found)
    write(found, given.json)
    if given.draw:
        draw(found, given.draw)


if __name__ == "__main__":
    main()
