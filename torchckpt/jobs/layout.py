"""Layout: how a job is split over GPUs, its batch and schedule, and what the software that runs it does."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import Any

from torchckpt.errors import ArgumentError, Fault, brief, called, check
from torchckpt.jobs.model import Model, odd_fields
from torchckpt.planning.order.schedule import Schedule, Visit, in_turn
from torchckpt.planning.order.schedules import CHUNKS, FOLDED, NAMES, full_name, named_schedule

__all__ = ["RECOMPUTES", "SOFTWARE", "STATES", "Layout", "Software", "schedule_of"]

RECOMPUTES = ("none", "selective", "full", "planned")
STATES = ("none", "zero1", "fsdp2")
"""What data-parallel ranks share of the state: nothing; the optimizer's (ZeRO-1); weights, gradients and optimizer's
(FSDP2)."""
_MOST_VISITS = 1_000_000
_CHOICES = {
    "schedule": (*NAMES, "zb-2p"), "head": ("last", "balanced", "split"), "recompute": RECOMPUTES, "state": STATES,
    "kernels": ("fused", "compiled", "eager"), "attention": ("flash1", "flash2", "fused", "unfused"),
    "selective": (
        "core_attn", "mlp", "layernorm", "moe_act", "moe", "shared_experts", "mla_up_proj", "products",
    ),
}  # fmt: skip
_RANGES = {
    "gpus": (64, 10**9), **dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "chunks", "ahead", "shards"), (1, 2**20)),
    "micro_batch": (1, 10**12), "global_batch": (256, 10**12), "sequence": (8192, 10**12), "recomputed_share": (0.5, 1),
    **dict.fromkeys(("parameter_bytes", "gradient_bytes", "reduce_bytes", "loss_bytes"), (4, 1000)),
    "optimizer_bytes": (12, 1000),
}  # fmt: skip
"""Of each number: what it may be, and the most."""


@dataclass(frozen=True)
class Software:
    """What a framework does; the defaults are those of Megatron."""

    kernels: str = "fused"
    """``fused``: hand-written kernels; ``compiled`` by Inductor; ``eager``, an operation a kernel."""
    attention: str = "fused"
    """A kernel of :attr:`Rates.attention`: ``flash1`` (2022, and Triton's), ``flash2``, ``fused`` (cuDNN 9 and
    FlashAttention 3); or ``unfused``, which writes the scores to memory."""
    dropout: bool = False
    selective: tuple[str, ...] = ("core_attn",)
    """What ``selective`` recomputes: modules as Megatron names them (``core_attn``, ``layernorm``; ``mlp``, of layers
    without experts; ``moe_act``, ``moe`` and ``shared_experts``, of those with; ``mla_up_proj``), or ``products``:
    torchtitan's policy, every second matrix product."""
    stops_early: bool = False
    """A replay ends before the last product, as that of ``torch.utils.checkpoint`` does since torch 2.1."""
    parameter_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    """Adam's two moments in float32, and a copy of the weight in float32."""
    gradients_shared: bool = False
    """Data-parallel ranks share the gradients too (ZeRO-2)."""
    reduce_bytes: float = 2.0
    """Of a gradient on the wire of FSDP."""
    loss_bytes: float = 10.0
    """Of each logit, at the loss."""
    resharded: bool = True
    """FSDP frees the weights of a layer after its forward."""
    overlaps_reduce: bool = True
    """The gradients of data-parallel ranks are reduced beside the backward."""
    async_tp: bool = False
    regathers: bool = True
    """With sequence parallel a rank keeps its share of what products read, gathers it again beside a product of the
    backward, and sums gradients of norms once a step (Megatron). If not, it keeps what it gathered, and where FSDP
    shares the state it sums them in each backward (DTensor of torch)."""
    scatters: bool = False
    """Without sequence parallel, ranks of ``tp`` send a share each of a message between stages, and gather it (Megatron
    of 2021 and 2022)."""
    offloads: bool = False

    @called("Software()")
    def __post_init__(self) -> None:
        check(odd_fields(self, "software", _RANGES, _CHOICES))


SOFTWARE = {
    "megatron": Software(),
    "torchtitan": Software(
        kernels="compiled", attention="flash2", selective=("products",), stops_early=True, parameter_bytes=4.0,
        optimizer_bytes=8.0, reduce_bytes=4.0, loss_bytes=4.0, regathers=False,
    ),
}  # fmt: skip
"""Frameworks by name: Megatron-Core with ZeRO-1, torchtitan with FSDP2 and torch.compile."""


@dataclass(frozen=True)
class Layout:
    """How a job is split, and its batch.

    >>> layout = Layout(gpus=64, tp=8, pp=4, dp=2, global_batch=256)
    >>> layout.micro_batches
    128

    Raises:
        ArgumentError: values of another type, out of range, or none of the choices. The message lists all of them.
    """

    gpus: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    sequence: int = 8192
    schedule: str = "1f1b"
    """One of ``NAMES``, or torch's name of it; or ``zb-2p``."""
    chunks: int = 1
    """Stages on a rank."""
    ahead: int = 0
    """Forwards that 1F1B runs ahead, beside its own."""
    head: str = "last"
    """Where the head is: on the ``last`` stage; there, with layers moved away from it (``balanced``); or ``split`` over
    all stages (Yeung et al. 2024, arXiv:2411.05288)."""
    recompute: str = "none"
    recomputed_share: float = 1.0
    """The share of the layers of each stage that ``full`` recomputes, from its first."""
    state: str = "zero1"
    shards: int = 0
    """Ranks that share the state; fewer than all where groups of them are replicas (HSDP). Default: ``dp * cp``."""
    sequence_parallel: bool = True
    software: Software = field(default_factory=Software)

    @called("Layout()")
    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", full_name(self.schedule) or self.schedule)
        faults = list(odd_fields(self, "layout", _RANGES, _CHOICES))
        if not isinstance(self.software, Software):
            rule, works = "software of the layout is not a Software", 'software=SOFTWARE["megatron"]'
            faults.append(Fault(rule, f"software={brief(self.software)}", works))
        check(faults)

    @property
    def micro_batches(self) -> int:
        """Those of one data-parallel rank."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def context(self) -> int:
        """The tokens of a sequence on one rank."""
        return self.sequence // self.cp

    @property
    def tokens(self) -> int:
        """Those of a micro-batch on one rank."""
        return self.micro_batch * self.context

    @property
    def state_ranks(self) -> int:
        """The ranks that share the state."""
        return 1 if self.state == "none" else self.shards or self.dp * self.cp

    @property
    def etp(self) -> int:
        """The ranks that an expert is split over: those of ``tp`` (the default of Megatron), or as many of them as
        ``ep`` leaves; one where ``ep`` takes all of ``tp x cp x dp``."""
        return gcd(self.tp, self.tp * self.cp * self.dp // self.ep)

    @property
    def expert_ranks(self) -> int:
        """The ranks that hold the same experts: what ``dp x cp`` is for all else."""
        return self.dp * self.cp // gcd(self.ep, self.dp * self.cp)

    @property
    def expert_state_ranks(self) -> int:
        """Those of them that share the state of their experts."""
        return max(1, self.state_ranks // gcd(self.ep, self.dp * self.cp))

    def as_json(self) -> dict[str, Any]:
        """What a search chooses, and the batch, for a file."""
        names = ("gpus", "tp", "cp", "ep", "pp", "dp", "micro_batch", "global_batch", "sequence", "schedule", "chunks")
        return {name: getattr(self, name) for name in (*names, "recompute", "state")}

    def stride(self, dimension: str) -> int:
        """How far apart the ranks of a dimension lie: of ``tp``, ``cp``, ``ep``, ``dp``, ``pp``; of ``replicas``, whose
        groups share the state, of ``expert_dp``, that hold the same experts, and of ``ends``, of the pipeline."""
        apart = {"tp": 1, "ep": self.etp, "expert_dp": self.etp * self.ep, "replicas": self.tp * self.state_ranks,
                 "pp": self.gpus // self.pp, "ends": self.gpus // self.pp * (self.pp - 1)}  # fmt: skip
        return apart.get(dimension, self.tp)

    @property
    def stages(self) -> int:
        each = 2 if self.schedule in FOLDED else self.chunks
        return 1 if self.pp == 1 else self.pp * each

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of a pipeline that each stage is on."""
        if self.stages == 2 * self.pp and self.schedule in FOLDED:
            return (*range(self.pp), *range(self.pp)[::-1])
        return tuple(stage % self.pp for stage in range(self.stages))

    def layers_of(self, model: Model) -> list[int]:
        """The layers on each stage. Where only all layers and two more divide, both ends have one less, for the
        embedding and the head."""
        layers, stages = model.layers, self.stages
        if layers % stages and (layers + 2) % stages == 0:
            return [(layers + 2) // stages - (stage in (0, stages - 1)) for stage in range(stages)]
        return [layers // stages + (stage < layers % stages) for stage in range(stages)]

    def faults(self, model: Model) -> Iterator[Fault]:
        """What keeps the model and the layout apart."""
        product = self.tp * self.cp * self.pp * self.dp
        if product != self.gpus:
            received = f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp} = {product}, gpus={self.gpus}"
            yield Fault("the GPUs are not tp x cp x pp x dp", received, self._dividing(model))
        kv = model.kv_heads or model.heads
        pairs = (
            ("the heads do not divide by tp", "heads", model.heads, "tp", self.tp),
            ("the heads of keys and values do not divide by tp", "kv_heads", kv if self.tp % kv else self.tp, "tp",
             self.tp),
            ("the MLP does not divide by tp", "ffn", model.ffn, "tp", self.tp),
            ("the experts do not divide by ep", "experts", model.experts or 1, "ep", self.ep),
            ("the data-parallel ranks do not divide by ep", "(dp x cp x tp)", self.dp * self.cp * self.tp, "ep",
             self.ep),
        )
        for rule, whole, amount, part, divisor in pairs:
            if amount % divisor:
                yield Fault(rule, f"{whole}={amount}, {part}={divisor}", self._dividing(model))
        if self.state != "none" and self.shards and self.dp * self.cp % self.shards:
            received = f"shards={self.shards}, dp={self.dp}, cp={self.cp}"
            yield Fault("dp x cp does not divide by the shards", received, f"shards={gcd(self.shards, self.dp)}")
        if self.head == "balanced" and not 1 < self.stages == self.pp:
            received = f"head='balanced', {self.stages} stages, pp={self.pp}"
            yield Fault("a balanced head needs several ranks with one stage each", received, "head='last'")
        if self.ahead and self.schedule != "1f1b":
            received = f"ahead={self.ahead}, schedule={self.schedule!r}"
            yield Fault("no schedule but 1F1B runs more forwards ahead", received, "ahead=0")
        at_once = self.dp * self.micro_batch
        if self.global_batch % at_once:
            received = f"global_batch={self.global_batch}, dp={self.dp}, micro_batch={self.micro_batch}"
            batch = f"global_batch={-(-self.global_batch // at_once) * at_once}"
            yield Fault("the batch does not divide by dp x micro-batch", received, batch)
        if self.cp > 1 and self.sequence % (2 * self.cp):
            received = f"sequence={self.sequence}, cp={self.cp}"
            yield Fault("the sequence does not divide by twice cp", received, self._dividing(model))
        if self.chunks > 1 and self.schedule not in CHUNKS and not (self.schedule in FOLDED and self.chunks == 2):
            rule = f"the schedule {self.schedule} fixes its number of stages on a rank"
            yield Fault(rule, f"chunks={self.chunks}", "schedule='interleaved_1f1b', or chunks=1")
        stages = min(self.stages, model.layers)
        if self.pp > 1 and stages * self.micro_batches > _MOST_VISITS:
            rule = f"stages times micro-batches are more than {_MOST_VISITS}"
            batch = f"global_batch={_MOST_VISITS // stages * at_once}"
            yield Fault(rule, f"global_batch={self.global_batch}", batch)
        if model.layers < self.stages:
            received = f"{model.layers} layers, {self.stages} stages"
            yield Fault("there are fewer layers than stages", received, self._dividing(model))

    def _dividing(self, model: Model) -> str:
        """The fields of the nearest smaller split that divides: with as many GPUs as that has, and the same ``dp``, on
        which the batch depends."""
        heads, kv = model.heads, model.kv_heads or model.heads
        tp = _most(min(self.tp, heads), lambda tp: not (heads % tp or model.ffn % tp or (kv % tp and tp % kv)))
        cp = _most(min(self.cp, self.sequence), lambda cp: cp == 1 or self.sequence % (2 * cp) == 0)
        pp = _most(min(self.pp, model.layers), lambda pp: pp == 1 or pp * self.stages <= model.layers * self.pp)
        experts = gcd(model.experts or 1, tp * cp * self.dp)
        split = {"tp": tp, "cp": cp, "pp": pp, "ep": _most(min(self.ep, experts), lambda ep: experts % ep == 0),
                 "gpus": tp * cp * pp * self.dp}  # fmt: skip
        return ", ".join(f"{name}={value}" for name, value in split.items() if value != getattr(self, name))


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, as 1 does."""
    return next(filter(fits, range(limit, 0, -1)), 1)


def schedule_of(layout: Layout) -> Schedule:
    """The order of actions, of one micro-batch where a rank has the whole model. 1F1B may have fewer micro-batches than
    ranks. An ArgumentError, if they do not suit another schedule."""
    chunks = layout.chunks if layout.schedule in CHUNKS else None
    try:
        return _schedule(layout.schedule, layout.pp, layout.micro_batches, chunks, layout.ahead)
    except ArgumentError as error:
        sequences = layout.dp * layout.micro_batch
        text = re.sub(r"\bm=(\d+)", lambda m: f"global_batch={int(m[1]) * sequences}", str(error))
        raise ArgumentError(text) from None


@lru_cache(maxsize=16)
def _schedule(name: str, ranks: int, count: int, chunks: int | None, extra: int) -> Schedule:
    if ranks == 1:
        return named_schedule("1f1b", 1, 1)
    if name == "zb-2p":
        return _ordered(name, ranks, count, ahead=2, behind=2)
    if name == "1f1b":
        return _ordered(name, ranks, count, extra=extra)
    return named_schedule(name, ranks, count, chunks)


def _ordered(name: str, ranks: int, count: int, ahead: int = 1, behind: int | None = None, extra: int = 0) -> Schedule:
    """1F1B with more forwards ahead: so many times as many, and some more. ZB-H2 has twice as many, and its weight
    gradients wait twice as long as those of ZB-H1 (Qi et al. 2024, arXiv:2401.10241, section 2.2)."""
    orders = []
    for rank in range(ranks):
        visits: list[Visit] = [(rank, micro_batch) for micro_batch in range(count)]
        weights = None if behind is None else behind * rank
        orders.append(tuple(in_turn(visits, visits, ahead * (ranks - 1 - rank) + extra, weights)))
    return Schedule(name, tuple(orders), tuple(range(ranks)), count)
