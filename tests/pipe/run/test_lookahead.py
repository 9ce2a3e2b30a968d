"""Lanes: in which order one stage replays and runs backward, and how much of it is alive."""
from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.pipe.stages import run, stages_of
from tests.slow import few, slow

Pipeline = Callable[[Tensor], Tensor]


class Watched(nn.Module):
    """A stage that writes down its replays and backwards, and counts the recomputed activations that are alive."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self.linear, self.name, self.events = nn.Linear(4, 4), name, events
        self.alive: Counter[str] = Counter()
        self.forwards, self.replays = itertools.count(), itertools.count()

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.linear(input).exp()  # exp saves its result
        number = int(input[0, 0].item()) if self.name == "a" else None
        mark = "" if number is None else str(number)
        if torchckpt.is_recomputing():
            self.events.append(f"R{mark}")
            self._watch(hidden)
        elif hidden.requires_grad:
            hidden.register_hook(lambda grad: self.events.append(f"B{mark}"))
        return hidden.sin()

    def _watch(self, hidden: Tensor) -> None:
        self.alive["now"] += 1
        self.alive["peak"] = max(self.alive["peak"], self.alive["now"])
        weakref.finalize(hidden.untyped_storage(), self._dead)

    def _dead(self) -> None:
        self.alive["now"] -= 1


def one_stage(chunks: int, lookahead: int, checkpointed: int) -> list[str]:
    """What one stage does in its backward: Ri and Bi for micro-batch i, whose rows are filled with i."""
    events: list[str] = []
    module = Watched("a", events)
    batch = torch.arange(chunks, dtype=torch.float32)[:, None].expand(chunks, 4)
    run(stages_of([module]), batch, chunks, checkpointed, lookahead, threads=False).sum().backward()
    return events


@pytest.mark.parametrize(
    ("lookahead", "checkpointed", "picture"),
    [
        #        always
        (1, 4, "R3 B3 R2 B2 R1 B1 R0 B0"),
        (2, 4, "R3 R2 B3 R1 B2 R0 B1 B0"),
        (3, 4, "R3 R2 R1 B3 R0 B2 B1 B0"),
        (9, 4, "R3 R2 R1 R0 B3 B2 B1 B0"),
        #        except last
        (1, 3, "B3 R2 B2 R1 B1 R0 B0"),
        (2, 3, "R2 B3 R1 B2 R0 B1 B0"),
        #        never
        (1, 0, "B3 B2 B1 B0"),
    ],
)
def test_the_order_of_one_lane(lookahead: int, checkpointed: int, picture: str) -> None:
    assert " ".join(one_stage(4, lookahead, checkpointed)) == picture


@few(17)
@pytest.mark.parametrize("threads", [False, True], ids=["caller", "threads"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5, *slow([4, 6, 7, 8])])
@pytest.mark.parametrize("count", [1, 2, 3, *slow([4])])
def test_exactly_lookahead_micro_batches_are_recomputed_and_alive(
    count: int, chunks: int, lookahead: int, checkpoint: str, threads: bool
) -> None:
    stages = [Watched(f"stage {j}", []) for j in range(count)]
    batch = torch.randn(chunks, 4)
    checkpointed = chunks if checkpoint == "always" else chunks - 1
    parts = stages_of(stages)
    with torchckpt.testing.count_recomputes() as recomputes:
        run(parts, batch, chunks, checkpointed, lookahead, threads).sum().backward()
    assert [stage.alive["peak"] for stage in stages] == [min(lookahead, checkpointed)] * count
    assert [stage.alive["now"] for stage in stages] == [0] * count
    assert recomputes.total == checkpointed * count


def test_no_data_tensor_changes_its_requires_grad() -> None:
    seen: list[bool] = []

    class Seen(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            seen.extend(tensor.requires_grad for tensor in pair)
            return pair

    class First(nn.Linear):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            seen.extend(tensor.requires_grad for tensor in pair)
            return super().forward(pair[0]), pair[1]

    pipe = torchckpt.Pipe(nn.Sequential(First(4, 4), Seen()), balance=[1, 1], chunks=2, checkpoint="always")
    out, mask = pipe((torch.randn(4, 4), torch.rand(4)))
    #               stage 0, twice              and stage 1, in clock order
    assert seen == [False, False, False, False, True, False, True, False]
    assert (out.requires_grad, mask.requires_grad) == (True, False)
