"""Job: a model on GPUs in a layout, as the stages of a pipeline, with its step and the memory of each rank."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torchckpt.jobs.layer import Head, LayerWork
from torchckpt.jobs.layout import Layout, schedule_of
from torchckpt.jobs.model import Model
from torchckpt.planning.order.schedule import Schedule, Visit
from torchckpt.planning.order.schedules import SPLIT
from torchckpt.planning.rates import Machine
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import NOTHING, Block, Collective, Link, Stage, fixed
from torchckpt.planning.work.choice import Choice, Choices

__all__ = ["Job"]

_SPLIT = (*SPLIT, "zb-2p")
"""Schedules with split backwards."""
_EARLY = 0.1
"""The share of a step's gradients that its first replays see."""


@dataclass(frozen=True)
class Job:
    """A model, how it is split, and on what."""

    model: Model
    layout: Layout
    machine: Machine

    @cached_property
    def schedule(self) -> Schedule:
        return schedule_of(self.layout)

    @cached_property
    def layers(self) -> list[list[int]]:
        """The layers of each stage, in the order of the model."""
        counts = self._balanced if self.layout.head == "balanced" else self.layout.layers_of(self.model)
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        return [list(range(start, start + count)) for start, count in zip(starts, counts)]

    @cached_property
    def _balanced(self) -> list[int]:
        """Layers moved away from the last stage, to the latest of the others, until no stage has more FLOPs."""
        layers, others = self.model.layers, self.layout.pp - 1
        layer, head = self.work[True].flops, self._head.product.flops

        def most(last: int) -> float:
            return max(last * layer + head, math.ceil((layers - last) / others) * layer)

        last = min(reversed(range(layers)), key=most)  # of equal ones that which moves least
        each, more = divmod(layers - last, others)
        return [*(each + (stage >= others - more) for stage in range(others)), last]

    @cached_property
    def work(self) -> dict[bool, LayerWork]:
        """The work of a layer, by whether it has an MLP in place of experts."""
        kinds = (True, False) if self.model.experts else (True,)
        return {dense: LayerWork(self.model, self.layout, self.machine, dense) for dense in kinds}

    @cached_property
    def _head(self) -> Head:
        return Head(self.model, self.layout, self.machine)

    def held_parameters(self, layer: int) -> tuple[float, float]:
        """The parameters of a layer on one rank before data parallel splits them: experts apart."""
        model, layout, tp, whole = self.model, self.layout, self.layout.tp, self.model.whole_parameters(layer)
        experts = 0.0
        if not model.is_dense(layer):
            experts = model.experts / layout.ep * model.mlp_parameters(model.expert_ffn / layout.etp)
        return (model.layer_parameters(layer, 0) - whole) / tp + whole, experts

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(map(self._stage, range(len(self.layers))))

    def _stage(self, stage: int) -> Stage:
        dense = [self.model.is_dense(layer) for layer in self.layers[stage]]
        is_split, is_last = self.layout.head == "split", stage == len(self.layers) - 1
        head = NOTHING
        if is_last or is_split:
            head = self._head.block(self.held_loss_bytes(self.layout.placement[stage]) * self.holds_loss)
        once = self._head.embedding if stage == 0 else 0.0
        if self.layout.pp == 1:
            once += self._fsdp_ends
        else:  # at a message a host waits, and then starts some ten kernels late; a split head and embedding are passes
            once += (3 if is_split else 1) * 10 * self.machine.rates.host_seconds
        return Stage(
            tuple(self._blocks[each] for each in dense),
            fixed(once + self._sent(stage), once + self._sent(stage - 1)),
            head,
            message_bytes=0.0,
            collective_seconds=sum(self.work[each].collective_seconds for each in dense),
        )

    def _sent(self, boundary: int) -> float:
        """Seconds of a message between a stage and the next, for which its ranks wait; 0 where there is none, as of two
        stages on one rank. Stages are the outermost dimension, so that neighbours are in two nodes where a stage fills
        one. Without sequence parallel each rank of ``tp`` has, and sends, the whole."""
        layout = self.layout
        places = layout.placement[max(0, boundary) : boundary + 2]
        if len(set(places)) < 2:
            return 0.0
        nodes = [place * layout.gpus // layout.pp // self.machine.network.node_devices for place in places]
        is_split = layout.sequence_parallel or layout.software.scatters
        size = 2.0 * layout.tokens * self.model.hidden / (layout.tp if is_split else 1)
        return self.machine.network.seconds("permute", size, 2, 2 if nodes[0] == nodes[1] else 1)

    @property
    def holds_loss(self) -> bool:
        """Whether logits live from the forward of the head to the end of its backward. If that is split in two, the
        first part frees them; if the head is split over stages, each runs both of its parts at once."""
        return self.layout.schedule not in _SPLIT and self.layout.head != "split"

    def loss_bytes(self, stage: int) -> float:
        """The logits of a micro-batch on a stage."""
        layout, last = self.layout, len(self.layers) - 1
        share = 1 / len(self.layers) if layout.head == "split" else float(stage == last)
        return layout.tokens * self.model.vocab / layout.tp * layout.software.loss_bytes * share

    def held_loss_bytes(self, rank: int) -> float:
        """The logits of a micro-batch on a rank, as far as they are more than what takes their place in its backward,
        which a rank has at any time."""
        logits = sum(self.loss_bytes(stage) for stage, place in enumerate(self.layout.placement) if place == rank)
        return max(0.0, logits - self.working_bytes(rank) - self.late_bytes(rank) * _EARLY)

    def working_bytes(self, rank: int) -> float:
        """What a backward needs beside what is saved: gradients of activations, or what a selective recompute makes
        again; of FSDP2 also a layer's gradients, and its weights in two bytes."""
        layers = self.rank_layers[rank]
        if not layers:
            return 0.0
        saved = max((self.work[self.model.is_dense(layer)].saved for layer in layers), key=lambda saved: saved.whole)
        working = max(0.3 * saved.whole, saved.whole - saved.kept)
        if self.layout.state == "fsdp2":
            unit = max(sum(self.held_parameters(layer)) for layer in layers)
            working += unit * (self.layout.software.reduce_bytes + 2)
        return working

    def late_bytes(self, rank: int) -> float:
        """Gradients that are not there yet at the loss, in a step of one backward. FSDP2 has none before, and modules
        of torch on one rank; others have buffers of them."""
        layout, software = self.layout, self.layout.software
        is_alone = layout.dp * layout.cp == 1 and not software.regathers
        if layout.pp > 1 or layout.micro_batches > 1 or not (layout.state == "fsdp2" or is_alone):
            return 0.0
        return software.gradient_bytes * self.shared(*self.rank_parameters[rank])

    def missing_bytes(self, rank: int, peak: float) -> float:
        """Those of them that are not there where a rank holds most: in its first replay, which sees ``peak`` bytes, or
        in its last one, which sees those of one layer and all gradients."""
        late = self.late_bytes(rank)
        if not late:
            return 0.0
        saved = self.work[self.model.is_dense(0)].saved
        last = saved.kept if self.layout.recompute in ("none", "selective") else saved.whole
        return min((1 - _EARLY) * late, max(0.0, peak - last))

    @cached_property
    def _blocks(self) -> dict[bool, Block]:
        beside = self.layout.state == "fsdp2" and self.layout.pp == 1
        return {dense: self._beside_weights(dense) if beside else work.block for dense, work in self.work.items()}

    def _beside_weights(self, dense: bool) -> Block:
        """A layer whose weights FSDP2 gathers meanwhile, and whose gradients it reduces."""
        block = self.work[dense].block
        backward, told = block.input_grad_seconds + block.weight_grad_seconds, self._shared_seconds(dense, "backward")
        longer = self.machine.overlapped(backward, told)
        return replace(
            block,
            forward_seconds=self.machine.overlapped(block.forward_seconds, self._shared_seconds(dense, "forward")),
            input_grad_seconds=longer - block.weight_grad_seconds,
            recompute_seconds=self.machine.overlapped(backward + block.recompute_seconds, told) - longer,
        )

    def _shared_seconds(self, dense: bool, phase: str) -> float:
        """Seconds in a phase of what FSDP2 gathers and reduces of a layer."""
        layer = 0 if dense else self.model.dense_layers
        return self._told(self._shared_weights(*self.held_parameters(layer)), phase)

    def _shared_weights(self, dense: float, routed: float = 0.0) -> tuple[Collective, ...]:
        """How the weights of so many parameters, those of experts apart, are gathered and their gradients reduced where
        ranks share the state. FSDP2 gathers again in the backward if it has freed them; once a step in a pipeline."""
        layout = self.layout
        ranks, same = (layout.state_ranks, layout.expert_state_ranks), (layout.dp * layout.cp, layout.expert_ranks)
        groups = zip((dense, routed), ranks, same, ("dp", "expert_dp"))
        return tuple(each for group in groups if group[0] for each in self._shared_group(*group))

    def _shared_group(self, parameters: float, ranks: int, same: int, dimension: str) -> Iterator[Collective]:
        """Those of the ``ranks`` that share parameters, and of all that hold the ``same``, if these are more."""
        software, is_fsdp = self.layout.software, self.layout.state == "fsdp2"
        is_once = self.layout.pp > 1 or not is_fsdp
        phases = ("step", "step") if is_once else ("forward", "backward")
        size = round((software.reduce_bytes if is_fsdp else software.gradient_bytes) * parameters)
        for phase in phases[: 2 if software.resharded and not is_once else 1]:
            yield Collective("all_gather", round(2 * parameters), ranks, dimension, phase)
        yield Collective("reduce_scatter", size, ranks, dimension, phases[1])
        yield Collective("all_reduce", size // ranks, same // ranks, "replicas", phases[1])

    def _told(self, collectives: Iterable[Collective], phase: str) -> float:
        """The seconds of those of a phase."""
        chosen = (each for each in collectives if each.phase == phase)
        return sum(self.machine.collective(each, self.layout.stride(each.dimension)) for each in chosen)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Those of the last layer for one micro-batch; those of the phase ``step`` are of the whole rank, once."""
        layer = self.model.layers - 1
        shared = self._shared_weights(*self.held_parameters(layer)) if self.layout.state == "fsdp2" else ()
        parts = (*self.work[self.model.is_dense(layer)].collectives, *shared, *self._gradients, *self._tied)
        return tuple(each for each in parts if each.ranks > 1)

    @cached_property
    def _gradients(self) -> tuple[Collective, ...]:
        """What data-parallel ranks do once a step without FSDP2: gradients as they are held, weights in two bytes."""
        layout, (dense, routed) = self.layout, max(self.rank_parameters, key=sum)
        if layout.state != "none":
            return self._shared_weights(dense, routed) if layout.state == "zero1" else ()
        groups = ((dense, layout.dp * layout.cp, "dp"), (routed, layout.expert_ranks, "expert_dp"))
        wide = layout.software.gradient_bytes
        return tuple(Collective("all_reduce", round(n * wide), ranks, of, "step") for n, ranks, of in groups if n)

    @cached_property
    def _tied(self) -> tuple[Collective, ...]:
        """The sum of a table's gradients, of which the first and the last rank of the pipeline have one each."""
        layout, table = self.layout, self.model.embedding_parameters / self.layout.tp
        if not self.model.tied or layout.head == "split" or layout.placement[0] == layout.placement[-1]:
            return ()
        held = table / layout.state_ranks if layout.state == "fsdp2" else table
        return (Collective("all_reduce", round(held * layout.software.gradient_bytes), 2, "ends", "step"),)

    @cached_property
    def _fsdp_ends(self) -> float:
        """The gathers of embedding and head, which nothing hides."""
        if self.layout.state != "fsdp2":
            return 0.0
        shared = self._shared_weights(self.model.embedding_parameters / self.layout.tp)
        return (self._told(shared, "forward") + self._told(shared, "backward")) / 2

    @cached_property
    def choices(self) -> Choices:
        """What is recomputed, if the layout says which."""
        if self.layout.recompute != "full":
            return {}
        choices: dict[Visit, Choice] = {}
        for stage, layers in enumerate(self.layers):
            count = self.recomputed_layers(stage)
            choice = Choice(kept=tuple(range(count, len(layers))), late=tuple(range(count)))
            choices |= {(stage, i): choice for i in range(self.schedule.micro_batches)}
        return choices

    def recomputed_layers(self, stage: int) -> int:
        """How many layers of a stage ``full`` recomputes, from its first."""
        return round(len(self.layers[stage]) * self.layout.recomputed_share)

    @cached_property
    def step(self) -> Step:
        links = (Link(),) * (len(self.layers) - 1)  # ranks wait for messages: actions have their seconds
        return Step(self.schedule, self.stages, links, self.choices)

    @property
    def overlaps(self) -> bool:
        """Whether steps overlap: a rank begins the next one when it has ended its own part."""
        return self.layout.pp > 1 and self.layout.schedule in _SPLIT

    def pipeline_seconds(self, step: Step) -> float:
        """The seconds of a step of the pipeline, of the rank that is busy longest where steps overlap."""
        if self.overlaps:
            return max(ends[-1] - starts[0] for starts, ends in zip(step.run.starts, step.run.ends))
        return step.seconds

    def whole_seconds(self, seconds: float) -> float:
        """The seconds of the whole step, for those of the pipeline: of one micro-batch where there is none."""
        return (self.layout.micro_batches if self.layout.pp == 1 else 1) * seconds + self.once_seconds

    @cached_property
    def rank_layers(self) -> list[list[int]]:
        """The layers of each rank of the pipeline, of all its stages."""
        of_ranks: list[list[int]] = [[] for _ in range(self.layout.pp)]
        for layers, rank in zip(self.layers, self.layout.placement):
            of_ranks[rank] += layers
        return of_ranks

    @cached_property
    def rank_parameters(self) -> list[tuple[float, float]]:
        """For each rank its parameters before data parallel splits them, and those of experts."""
        by_rank = [(0.0, 0.0)] * self.layout.pp
        for stage, rank in enumerate(self.layout.placement):
            dense, routed = by_rank[rank]
            dense += self._end_parameters(stage)
            for layer in self.layers[stage]:
                more = self.held_parameters(layer)
                dense, routed = dense + more[0], routed + more[1]
            by_rank[rank] = dense, routed
        return by_rank

    def _end_parameters(self, stage: int) -> float:
        model, count = self.model, len(self.layers)
        table = model.embedding_parameters / self.layout.tp
        if self.layout.head == "split":
            return (2 - model.tied) * table / count
        is_last = stage == count - 1
        is_one = model.tied and self.layout.placement[0] == self.layout.placement[-1]
        head = table * (is_last and not is_one) + model.norm_parameters * is_last
        return head + (table + model.positions * model.hidden) * (stage == 0)

    @cached_property
    def once_seconds(self) -> float:
        """What a step does once: gradients that nothing hides, of data-parallel ranks and of tied ends; the optimizer.
        """
        layout, machine = self.layout, self.machine
        dense, routed = max(self.rank_parameters, key=sum)
        seconds = 2e-3 + machine.stream(30 * self.shared(dense, routed)) + self._told(self._tied, "step")
        if layout.state == "fsdp2":
            if layout.pp > 1:  # gathered and reduced once a step
                each = {dense: self._shared_seconds(dense, "step") for dense in self.work}
                shared = max(sum(each[self.model.is_dense(layer)] for layer in layers) for layers in self.rank_layers)
                seconds += shared * (1 + machine.rates.unhidden) / 2
            return seconds
        reduced = self._told(self._gradients, "step")
        if layout.state == "zero1" and layout.software.overlaps_reduce:
            reduced = max(machine.rates.unhidden * reduced, reduced - 1.2 * self.stages[0].forward_seconds)
        return seconds + reduced

    def shared(self, dense: float, routed: float) -> float:
        """What a rank has of an amount that is shared as the state is; experts by the ranks that hold the same."""
        return dense / self.layout.state_ranks + routed / self.layout.expert_state_ranks

    @property
    def step_seconds(self) -> float:
        return self.whole_seconds(self.pipeline_seconds(self.step))
