"""GPU: one GPU as two devices: each stage on its own stream, with paced copies through pinned memory between them.

One thread launches the actions of a :class:`~torchckpt.planning.Schedule`, each on the stream of its stage. CUDA events
make an action wait for its inputs::

    stage 0    F0 ----- F1 ----- ......... R0 -- B0 ----------
                  [1] copy, pause [2]            ^ [4]
    stage 1            ....... F0 -- B0 ------ [3] copy, pause

[1] A link's stream waits for what it sends, [2] and the receiver's for the link: device, pinned memory, device, and
then a pause, up to ``tc``. [3] Gradients go the other way, on a stream of their own. [4] Only the backward waits for
its gradient: R stands before it in the stream, so it runs while the copy is on its way.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.devices import Pace, half, module_of, name_of, seconds_of
from benchmarks.transformer import Block, Embedding
from torchckpt import Checkpointing
from torchckpt.planning import (
    Action,
    Kind,
    Link,
    Schedule,
    ahead,
    arrival,
    exempt,
    one_f_one_b,
    quickest,
    simulate,
)
from torchckpt.planning import Block as Costs
from torchckpt.planning.work.choice import free_to_keep

__all__ = ["measure", "rehearse"]

M = 8
"""Micro-batches of the 1F1B schedule."""
DEVIATION = 0.05
VARIANTS = ("none", "stock", "ours")

Stage: TypeAlias = Callable[[Tensor], Tensor]


# the pipeline -------------------------------------------------------------------------------------------------------


class Throttled:
    """One direction of a link. A copy takes ``seconds``, or longer if the real copy takes longer."""

    def __init__(self, pace: Pace, seconds: float, like: Tensor) -> None:
        self._pace = pace
        self._stream = module_of().Stream()
        self._pinned = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        alone = min(seconds_of(partial(self._copy, like)) for _ in range(5))
        self._pause_seconds = seconds - alone

    def send(self, tensor: Tensor) -> tuple[Tensor, torch.Event]:
        """Send ``tensor``; return the arriving tensor, and an event for its arrival."""
        tensor = tensor.detach()
        self._stream.wait_stream(module_of().current_stream())  # [1]
        with module_of().stream(self._stream):
            arrived = self._copy(tensor)
            self._pace.pause(self._pause_seconds)
        tensor.record_stream(self._stream)
        return arrived, self._stream.record_event()

    def _copy(self, tensor: Tensor) -> Tensor:
        self._pinned.copy_(tensor, non_blocking=True)
        return torch.empty_like(tensor).copy_(self._pinned, non_blocking=True)


class Pipeline:
    """Runs the schedule of one variant over two stages."""

    def __init__(self, variant: str, stages: Sequence[Stage], schedule: Schedule, links: Sequence[Throttled]) -> None:
        self._variant, self._stages, self._schedule, self._links = variant, stages, schedule, links
        self._streams = [module_of().Stream() for _ in stages]
        self._recomputed = {(j, i) for order in schedule.ranks for j, kind, i in order if kind is Kind.RECOMPUTE}
        self._mail: dict[tuple[Kind, int], tuple[Tensor, torch.Event]] = {}
        self._regions: dict[tuple[int, int], Checkpointing] = {}
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def step(self, inputs: Sequence[Tensor], loss: Callable[[Tensor, int], Tensor]) -> float:
        """Run one step; return its seconds, by the clock of the GPU."""
        begin, end = (module_of().Event(enable_timing=True) for _ in range(2))
        begin.record()
        for stream in self._streams:
            stream.wait_stream(module_of().current_stream())
        for action in in_turn(self._schedule):
            with module_of().stream(self._streams[action.stage]):
                self._run(action, inputs, loss)
        for stream in self._streams:
            module_of().current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _run(self, action: Action, inputs: Sequence[Tensor], loss: Callable[[Tensor, int], Tensor]) -> None:
        j, kind, i = action
        if kind is Kind.FORWARD:
            self._forward(j, i, inputs[i] if j == 0 else self._received(Kind.FORWARD, i), loss)
        elif kind is Kind.RECOMPUTE:
            self._regions.pop((j, i)).prefetch()
        else:
            self._backward(j, i)

    def _forward(self, j: int, i: int, x: Tensor, loss: Callable[[Tensor, int], Tensor]) -> None:
        x.requires_grad_(j == 1)
        y = self._call(j, i, x)
        if j == 0:
            self._mail[Kind.FORWARD, i] = self._links[0].send(y)
        self._made[j, i] = x, loss(y, i) if j == 1 else y

    def _call(self, j: int, i: int, x: Tensor) -> Tensor:
        if self._variant == "stock":
            return checkpoint(self._stages[j], x, use_reentrant=False)  # type: ignore[no-any-return]
        if (j, i) not in self._recomputed:
            return self._stages[j](x)
        self._regions[j, i] = region = Checkpointing(self._stages[j], x)
        return region.checkpoint()  # type: ignore[no-any-return]

    def _backward(self, j: int, i: int) -> None:
        x, y = self._made.pop((j, i))
        y.backward(self._received(Kind.BACKWARD, i) if j == 0 else None)  # [4]
        if j == 1 and x.grad is not None:
            self._mail[Kind.BACKWARD, i] = self._links[1].send(x.grad)  # [3]

    def _received(self, kind: Kind, i: int) -> Tensor:
        tensor, arrived = self._mail.pop((kind, i))
        module_of().current_stream().wait_event(arrived)  # [2]
        tensor.record_stream(module_of().current_stream())
        return tensor


def in_turn(schedule: Schedule) -> Iterator[Action]:
    """The actions of all ranks in the order in which a simulation ends them, so that each comes after what it needs."""
    events = simulate(schedule, exposed=False).events
    yield from (event.action for event in sorted(events, key=lambda event: (event.end_seconds, event.start_seconds)))


def schedules(costs: Sequence[Costs], link: Link) -> dict[str, Schedule]:
    """The schedule of each variant. Stock recomputes inside its backwards, so it has the schedule of none."""
    plain = one_f_one_b(2, M)
    ours = quickest(plain, exempt(plain, ahead(plain), *free_to_keep(plain)), costs, link)
    return {"none": plain, "stock": plain, "ours": ours}


def simulated(orders: dict[str, Schedule], costs: Sequence[Costs], link: Link) -> dict[str, float]:
    late = {"stock": arrival(orders["stock"])}
    steps = {name: simulate(order, costs, link, late.get(name), exposed=False) for name, order in orders.items()}
    return {name: step.step_seconds for name, step in steps.items()}


# stages that pause --------------------------------------------------------------------------------------------------


class Pausing(nn.Module):
    """A stage that pauses for a set time: ``tf`` in the forward, twice that in the backward. The GPU stays free."""

    def __init__(self, pace: Pace, forward_seconds: float, width: int = 256) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.pace, self.seconds = pace, forward_seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Pause.apply(self.linear(x), self.pace, self.seconds)
        return y


class _Pause(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, seconds: float) -> Tensor:
        ctx.pace, ctx.seconds = pace, seconds
        pace.pause(seconds)
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.saved_tensors  # noqa: B018  # recomputes it
        ctx.pace.pause(2 * ctx.seconds)
        return grad, None, None


class Work(NamedTuple):
    """The device and the settings of a measurement."""

    device: torch.device
    rounds: int
    shares: Sequence[float] = (0.1, 0.25, 0.5, 1.0)
    """tc/tf: copy time over forward time."""
    forward_seconds: float = 0.004
    """Forward seconds of the stages that pause."""


def against_simulator(pace: Pace, work: Work) -> list[dict[str, Any]]:
    """For each tc/tf, the measured beside the simulated time of each variant; they must agree within 5 %."""
    rows = []
    device, forward_seconds = work.device, work.forward_seconds
    like = torch.empty(64, 256, device=device)
    inputs = [torch.randn(64, 256, device=device) for _ in range(M)]
    stages = [Pausing(pace, forward_seconds).to(device) for _ in range(2)]
    costs = [Costs(*[forward_seconds] * 4)] * 2
    for share in (0.0, *work.shares):
        link = Link(share * forward_seconds)
        seconds, equal = _in_rounds(stages, costs, link, pace, like, inputs, _mean_square, work.rounds)
        on_paper = simulated(schedules(costs, link), costs, link)
        deviations = {name: median(values) / on_paper[name] - 1 for name, values in seconds.items()}
        rows.append({"tc/tf": share, **_summary(seconds), "simulated": on_paper, "deviation": deviations})
        rows[-1]["gradients bit-equal"] = equal
        rows[-1]["holds"] = equal and all(abs(deviation) <= DEVIATION for deviation in deviations.values())
        print(f"  tc/tf {share:4}: " + ", ".join(f"{name} {value:+.1%}" for name, value in deviations.items()))
    return rows


def _mean_square(y: Tensor, i: int) -> Tensor:
    return y.square().mean()


def _in_rounds(
    stages: Sequence[nn.Module],
    costs: Sequence[Costs],
    link: Link,
    pace: Pace,
    like: Tensor,
    inputs: Sequence[Tensor],
    loss: Callable[[Tensor, int], Tensor],
    rounds: int,
) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each variant, run in turn after two warm-up rounds; and whether all gradients are bit-equal."""
    orders = schedules(costs, link)
    links = [Throttled(pace, link.latency_seconds, like) for _ in range(2)]
    pipelines = {name: Pipeline(name, stages, order, links) for name, order in orders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    equal = True
    for turn in range(rounds + 2):
        gradients = []
        for name, pipeline in pipelines.items():
            for parameter in parameters:
                parameter.grad = None
            torch.manual_seed(turn)
            seconds[name].append(pipeline.step(inputs, loss))
            gradients.append([parameter.grad for parameter in parameters])
        equal &= all(all(map(torch.equal, one, gradients[0])) for one in gradients[1:])
    return {name: values[2:] for name, values in seconds.items()}, equal


def _summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    none, stock, ours = (seconds[name] for name in VARIANTS)
    return {
        "seconds": {name: median(values) for name, values in seconds.items()},
        "ours / none": median(a / b for a, b in zip(ours, none)),
        "ours / stock": median(a / b for a, b in zip(ours, stock)),
        "stock / none": median(a / b for a, b in zip(stock, none)),
    }


# a real model -------------------------------------------------------------------------------------------------------

class Sizes(NamedTuple):
    """Sizes of the model and of a micro-batch; the defaults are GPT-2 small."""

    width: int = 768
    heads: int = 12
    length: int = 1024
    blocks: int = 12
    vocabulary: int = 50304
    rows: int = 16
    dtype: torch.dtype = torch.bfloat16


def gpt_stages(sizes: Sizes, device: torch.device) -> list[nn.Sequential]:
    """Two stages with half of the blocks each, all in one dtype."""
    torch.manual_seed(0)
    width = sizes.width
    first, last = ([Block(width, sizes.heads) for _ in range(sizes.blocks // 2)] for _ in range(2))
    head = nn.LayerNorm(width), nn.Linear(width, sizes.vocabulary)
    stages = nn.Sequential(Embedding(sizes.vocabulary, sizes.length, width), *first), nn.Sequential(*last, *head)
    return [stage.to(device, sizes.dtype) for stage in stages]


def of_gpt(pace: Pace, work: Work, sizes: Sizes) -> list[dict[str, Any]]:
    """Ratios of step times, for each tc/tf. Both stages share one GPU, so only its idle time can hide recomputation.

    Bit-equality of gradients is recorded, but not required: attention kernels may not be deterministic.
    """
    stages = gpt_stages(sizes, work.device)
    text = torch.randint(sizes.vocabulary, (M, sizes.rows, sizes.length + 1), device=work.device)
    inputs, targets = [own[:, :-1].float() for own in text], [own[:, 1:] for own in text]
    like = torch.empty(sizes.rows, sizes.length, sizes.width, device=work.device, dtype=sizes.dtype)
    costs = [_costs_of(stages[0], inputs[0], like), _costs_of(stages[1], like, None)]

    def loss(y: Tensor, i: int) -> Tensor:
        return cross_entropy(y.flatten(0, 1), targets[i].flatten()) / M

    rows = []
    for share in work.shares:
        link = Link(share * costs[0].forward_seconds)
        seconds, equal = _in_rounds(stages, costs, link, pace, like, inputs, loss, work.rounds)
        rows.append({"tc/tf": share, **_summary(seconds), "gradients bit-equal": equal})
        ratios = (f"{name} {rows[-1][name]:.3f}" for name in ("stock / none", "ours / none", "ours / stock"))
        print(f"  tc/tf {share:4}: " + ", ".join(ratios))
    return rows


def _costs_of(stage: nn.Module, x: Tensor, grad: Tensor | None) -> Costs:
    """The costs of a stage that runs alone on the GPU, from the fastest of five runs."""
    x = x.detach().clone().requires_grad_()
    forwards, backwards = [], []
    for _ in range(5):
        made: list[Tensor] = []
        forwards.append(seconds_of(lambda made=made: made.append(stage(x))))
        y = made[0] if grad is not None else made[0].float().logsumexp(-1).mean()
        backwards.append(seconds_of(partial(y.backward, grad)))
    return Costs(min(forwards), min(backwards) / 2, min(backwards) / 2, min(forwards))


def measure(device: torch.device, rounds: int) -> dict[str, Any]:
    return _measured(Work(device, rounds), Sizes())


def rehearse(device: torch.device, rounds: int) -> dict[str, Any]:
    sizes = Sizes(width=32, heads=2, length=16, blocks=2, vocabulary=64, rows=2, dtype=half(device))
    return _measured(Work(device, rounds, shares=(0.5,), forward_seconds=0.005), sizes)


def _measured(work: Work, sizes: Sizes) -> dict[str, Any]:
    began = perf_counter()
    with module_of().device(work.device):
        pace = Pace()
        print("stages that pause, % over simulated; within 5 %")
        pausing = against_simulator(pace, work)
        print(f"GPT, {sizes.blocks} x {sizes.width}, T = {sizes.length}, {sizes.dtype}, both stages on one GPU")
        gpt = of_gpt(pace, work, sizes)
    wrong = [row["tc/tf"] for row in pausing if not row["holds"]]
    failures = [f"stages that pause, tc/tf {share}: not within 5 %, or gradients differ" for share in wrong]
    print("\n".join(failures) or "all of what is required holds")
    return {
        "device": name_of(work.device),
        "torch": torch.__version__,
        "rounds": work.rounds,
        "stages that pause": pausing,
        "GPT-2 small": gpt,
        "failures": failures,
        "minutes": (perf_counter() - began) / 60,
    }
