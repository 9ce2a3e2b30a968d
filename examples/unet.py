"""Trains a small U-Net to tell disks from rectangles in noise: as a plain Sequential, and as a pipeline.

A U-Net's skips go from the first layers straight to the last ones, across the stages between, by ``stash`` and ``pop``.
The pipelines, with 2 and 4 stages, train bit-equal to the plain model, and keep less memory after each forward.

    python examples/unet.py
"""
from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from gpt.memory import LiveBytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d

from torchckpt import Pipe
from torchckpt.pipe import DeferredBatchNorm
from torchckpt.pipe.skip import Namespace, pop, stash

CHUNKS = 4
SIDE = 48  # pixels
CLASSES = ("ground", "disk", "rectangle")


# the model ----------------------------------------------------------------------------------------------------------


def unet(width: int, levels: int) -> nn.Sequential:
    """``levels`` layers down, one at the bottom, as many up, and a head."""
    spaces = [Namespace() for _ in range(levels)]  # keep the skips of the levels apart
    widths = [width * 2**level for level in range(levels + 1)]
    downs = [Down(space, inner, outer) for space, inner, outer in zip(spaces, [1, *widths], widths)]
    ups = [Up(space, 2 * outer, outer) for space, outer in zip(spaces, widths)]
    bottom, head = Convolutions(widths[-2], widths[-1]), nn.Conv2d(width, len(CLASSES), 1)
    return nn.Sequential(*downs, bottom, *reversed(ups), head)


class Convolutions(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
        )


class Down(nn.Module):
    def __init__(self, space: Namespace, inner: int, outer: int) -> None:
        super().__init__()
        self.space, self.convolutions = space, Convolutions(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions(x)
        stash("features", x, self.space)
        return max_pool2d(x, 2)


class Up(nn.Module):
    def __init__(self, space: Namespace, inner: int, outer: int) -> None:
        super().__init__()
        self.space, self.convolutions = space, Convolutions(inner + outer, outer)

    def forward(self, x: Tensor) -> Tensor:
        x = interpolate(x, scale_factor=2)
        y: Tensor = self.convolutions(torch.cat([x, pop("features", self.space)], dim=1))
        return y


# the images ---------------------------------------------------------------------------------------------------------


def draw(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images, each with a disk and a rectangle, and the class of each pixel."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    classes = torch.zeros(rows, SIDE, SIDE, dtype=torch.long)
    places = torch.randint(SIDE // 4, SIDE * 3 // 4, (rows, 4), generator=generator).tolist()
    sizes = torch.randint(SIDE // 8, SIDE // 4, (rows, 3), generator=generator).tolist()
    for image, (across, down, left, top), (radius, wide, high) in zip(classes, places, sizes):
        image[(x - across) ** 2 + (y - down) ** 2 < radius**2] = CLASSES.index("disk")
        image[(abs(x - left) < wide) & (abs(y - top) < high)] = CLASSES.index("rectangle")
    noise = torch.randn(rows, 1, SIDE, SIDE, generator=generator)
    return (classes > 0)[:, None] + 0.3 * noise, classes


# the training -------------------------------------------------------------------------------------------------------

Model: TypeAlias = Callable[[Tensor], Tensor]


class Course:
    """A model, its optimizer, and its losses."""

    def __init__(self, name: str, model: Model, layers: nn.Module) -> None:
        self.name, self.model, self.layers = name, model, layers
        self.optimizer = torch.optim.Adam(layers.parameters(), lr=5e-3)
        self.losses: list[float] = []

    def step(self, images: Tensor, classes: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(images), classes)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def bytes_alive(self, images: Tensor, classes: Tensor) -> tuple[int, int]:
        """Bytes alive between forward and backward, and the peak of the step."""
        self.optimizer.zero_grad()
        with LiveBytes() as ledger:
            loss = cross_entropy(self.model(images), classes)
            kept = ledger.curve[-1]
            loss.backward()
        return kept, max(ledger.curve)


def micro_batch_by_micro_batch(model: nn.Sequential) -> Model:
    """Computes like a pipeline, without one. The backward takes the last micro-batch first, as in a pipeline."""

    def run(images: Tensor) -> Tensor:
        with DeferredBatchNorm.mini_batch(model):
            return torch.cat([model(micro_batch) for micro_batch in images.tensor_split(CHUNKS)])

    return run


def courses(width: int, levels: int) -> Iterator[Course]:
    torch.manual_seed(0)
    model = unet(width, levels)
    plain = DeferredBatchNorm.convert(copy.deepcopy(model))
    yield Course("plain Sequential", micro_batch_by_micro_batch(plain), plain)
    layers = len(model)
    for stages in (2, 4):
        balance = [layers // stages] * stages
        layers_of_its_own = copy.deepcopy(model)
        pipe = Pipe(layers_of_its_own, balance, chunks=CHUNKS, checkpoint="always", deferred_batch_norm=True)
        yield Course(f"{stages} stages {balance}", pipe, pipe)


def is_equal(one: Course, other: Course) -> bool:
    """Whether losses, parameters and running statistics are bit-equal."""
    states = one.layers.state_dict(), other.layers.state_dict()
    return one.losses == other.losses and all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def main() -> None:
    options = parsed_options()
    contenders = list(courses(options.width, levels=3))
    print(f"{'loss after':16}" + "".join(f"{course.name:>26}" for course in contenders))
    for step in range(options.steps):
        batch = draw(options.rows, seed=step)
        for course in contenders:
            course.step(*batch)
        if step % 5 == 4 or step == options.steps - 1:
            print(f"{step + 1:4} steps      " + "".join(f"{course.losses[-1]:26.8f}" for course in contenders))
    report(contenders, draw(options.rows, seed=options.steps))


def report(contenders: list[Course], batch: tuple[Tensor, Tensor]) -> None:
    equal = [is_equal(course, contenders[0]) for course in contenders]
    alive = [course.bytes_alive(*batch) for course in contenders]
    print(f"{'all bit-equal':16}" + "".join(f"{'yes' if same else 'NO':>26}" for same in equal))
    for name, numbers in zip(("kept, MiB", "at most, MiB"), zip(*alive)):
        print(f"{name:16}" + "".join(f"{number / 2**20:26.2f}" for number in numbers))
    print("\nKept: bytes alive from forward to backward. At most: of a step, gradients included. Neither: parameters.")
    if not all(equal):
        sys.exit("Losses, parameters or running statistics differ: the pipeline has changed the training.")


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="images in a mini-batch (%(default)s)")
    parser.add_argument("--width", type=int, default=8, help="channels of the first level (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
