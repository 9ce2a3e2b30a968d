"""Trains a ResNet-110 within 100 MB: its step keeps less, recomputes the rest, and is bit-equal to eager.

    python examples/fit_resnet.py --budget 100MB
    python -m torchckpt fit examples.fit_resnet:model --budget 100MB
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

# Set before torch is loaded, to silence its profiler's messages about start and end.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from torchckpt import graph
from torchckpt.errors import CheckpointError

DEPTH, BATCH = 110, 32
SIDE = 32  # pixels
CLASSES = ("disk", "square", "stripes", "cross")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# the model ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions and a skip. Where the width grows, the skip takes every other pixel and pads channels."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.stride, self.padding = outer // inner, (outer - inner) // 2
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        skip = x[:, :, :: self.stride, :: self.stride]
        return (y + nn.functional.pad(skip, (0, 0, 0, 0, self.padding, self.padding))).relu()


class ResNet(nn.Module):
    """The ResNet for CIFAR with 6n + 2 layers, without parameters in its skips (He et al. 2015, section 4.2)."""

    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        widths = [width] + [width * 2**stage for stage in range(3) for _ in range((depth - 2) // 6)]
        self.conv, self.bn = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Block(inner, outer) for inner, outer in pairwise(widths)))
        self.head = nn.Linear(widths[-1], len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.bn(self.conv(x)).relu()).mean((2, 3)))
        return y


def model(depth: int = DEPTH, batch: int = BATCH) -> tuple[nn.Module, Tensor]:
    """A ResNet and an example of its inputs, for ``python -m torchckpt fit``."""
    torch.manual_seed(0)
    return ResNet(depth).to(DEVICE), draw(batch, seed=0)[0]


# the images ---------------------------------------------------------------------------------------------------------


def draw(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images, each of one shape in a random colour, and the class of each shape."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(len(CLASSES), (rows,), generator=generator)
    places = torch.randint(SIDE // 4, SIDE * 3 // 4, (2, rows, 1, 1), generator=generator)
    radius = torch.randint(SIDE // 8, SIDE // 4, (rows, 1, 1), generator=generator)
    y, x = torch.arange(SIDE)[:, None] - places[0], torch.arange(SIDE) - places[1]
    square = torch.maximum(abs(x), abs(y)) < radius
    shapes = [x**2 + y**2 < radius**2, square, square & ((x + y) % 4 < 2), square & (torch.minimum(abs(x), abs(y)) < 2)]
    shape = torch.stack(shapes)[classes, torch.arange(rows)]
    colours = torch.rand(rows, 3, 1, 1, generator=generator) + 0.5
    noise = torch.randn(rows, 3, SIDE, SIDE, generator=generator)
    return (shape[:, None] * colours + 0.3 * noise).to(DEVICE), classes.to(DEVICE)


# the training -------------------------------------------------------------------------------------------------------


class Course:
    """A network, its optimizer, its losses, and the seconds of its steps."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        # The learning rate of the paper's warm-up: with 110 layers, a larger one is too large at first.
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []

    def step(self, images: Tensor, classes: Tensor) -> None:
        began = time.perf_counter()
        self.losses.append(self.loss_and_gradients(images, classes))
        self.optimizer.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)

    def loss_and_gradients(self, images: Tensor, classes: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.network(images), classes)
        loss.backward()
        return loss.detach()

    def results(self) -> list[Tensor]:
        """Losses, parameters and running statistics."""
        return [*self.losses, *self.network.parameters(), *self.network.buffers()]


def are_equal(one: Course, other: Course) -> bool:
    """Whether all tensors are bit-equal."""
    return all(torch.equal(mine, yours) for mine, yours in zip(one.results(), other.results(), strict=True))


# the memory ---------------------------------------------------------------------------------------------------------


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes that ``function()`` allocates at its peak, above those before it, as the allocator reports them."""
    if DEVICE.type == "cpu":
        return max(accumulate(allocations(function)), default=0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def allocations(function: Callable[[], object]) -> Iterator[int]:
    """Bytes of each allocation on the CPU, temporaries included, in order; negative numbers are bytes freed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            function()
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    sizes: dict[int, int] = {}
    for told in (event["args"] for event in events):
        if told["Bytes"] > 0:
            sizes[told["Addr"]] = told["Bytes"]
            yield told["Bytes"]
        elif told["Addr"] in sizes:  # older allocations do not count
            yield -sizes.pop(told["Addr"])


# the command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    options = parsed_options()
    torch.backends.cudnn.deterministic = True  # otherwise, on a GPU, even two eager steps differ
    network, example = model(options.depth, options.batch)
    began = time.perf_counter()
    try:
        fitted = graph.rematerialize(copy.deepcopy(network), example, budget=options.budget)
    except CheckpointError as error:
        sys.exit(str(error))
    print(f"{fitted.plan}\n\nplanned in {time.perf_counter() - began:.1f} s\n")
    courses = {"eager": Course(network), "fitted": Course(fitted)}
    print(f"{'':18}" + "".join(f"{name:>14}" for name in courses))
    train(list(courses.values()), options.steps, options.batch)
    report(list(courses.values()), fitted.plan, draw(options.batch, seed=options.steps))


def train(courses: list[Course], steps: int, rows: int) -> None:
    for step in range(steps):
        batch = draw(rows, seed=step)
        for course in courses[:: -1 if step % 2 else 1]:  # take turns: the machine's speed may change
            course.step(*batch)
        if step % 5 == 4 or step == steps - 1:
            print(f"loss, step {step + 1:<7}" + "".join(f"{course.losses[-1].item():14.8f}" for course in courses))


def report(courses: list[Course], plan: graph.Plan, batch: tuple[Tensor, Tensor]) -> None:
    eager, fitted = courses
    equal = are_equal(eager, fitted)
    count = f"{len(eager.losses)} losses, {len([*eager.network.parameters()])} parameters, "
    count += f"{len([*eager.network.buffers()])} running statistics"
    print(f"{'all bit-equal':18}{'yes' if equal else 'NO':>28}   {count}\n")
    measured = [peak_bytes(partial(course.loss_and_gradients, *batch)) for course in courses]
    for name, numbers in {"peak, bytes": measured, "as planned": [plan.eager_peak_bytes, plan.peak_bytes]}.items():
        print(f"{name:18}{numbers[0]:14,}{numbers[1]:14,}   x {numbers[1] / numbers[0]:.2f}")
    medians = [statistics.median(course.seconds) for course in courses]
    print(f"{'step, s':18}{medians[0]:14.3f}{medians[1]:14.3f}   {ratio(eager, fitted)}")
    print("\nPeak: of activations and gradients in one step. Seconds: the median of the steps, and of their ratios.")
    if not equal:
        sys.exit("Losses, parameters or running statistics differ: the plan has changed the training.")


def ratio(eager: Course, fitted: Course) -> str:
    """The ratio of the seconds of each step: its median and quartiles."""
    ratios = [ours / theirs for ours, theirs in zip(fitted.seconds, eager.seconds)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"x {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget", type=size_or_share, default="100MB", metavar="SIZE",
        help="of activations and gradients; or a share of eager's peak, such as 0.4 (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--depth", type=int, default=DEPTH, help="layers: 6n + 2 (%(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="images in a mini-batch (%(default)s)")
    options = parser.parse_args()
    if min(options.steps, options.batch) < 1:
        parser.error("--steps and --batch are at least 1")
    if options.depth < 8 or options.depth % 6 != 2:
        parser.error(f"--depth is 6n + 2, such as 20, 56 or 110; received: {options.depth}")
    return options


def size_or_share(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
