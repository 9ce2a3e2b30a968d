"""Job: a model on GPUs in a layout, as the stages of a pipeline, with its step and the memory of each rank."""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torchckpt.errors import check
from torchckpt.jobs.layer import Head, LayerWork, Seconds
from torchckpt.jobs.layout import Layout
from torchckpt.jobs.model import Model
from torchckpt.jobs.order import schedule_of
from torchckpt.jobs.rates import Machine
from torchckpt.jobs.saved import Saved, saved_of
from torchckpt.planning.order.schedule import Schedule
from torchckpt.planning.step.simulated import Step
from torchckpt.planning.work.block import Block, Link, Stage, fixed
from torchckpt.planning.work.choice import Choice, Choices

__all__ = ["Job"]

_SPLIT = ("zero_bubble", "zb-2p", "zbv", "dualpipe_v")
"""Schedules with split backwards. Their steps overlap: a rank begins the next one when it has ended its own part."""

@dataclass(frozen=True)
class Job:
    """A model, how it is split, and on what."""

    model: Model
    layout: Layout
    machine: Machine

    def check(self) -> None:
        check(list(self.layout.faults(self.model)))

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
        layer, head = self._dense.flops, self._head.product.flops

        def most(last: int) -> float:
            return max(last * layer + head, math.ceil((layers - last) / others) * layer)

        last = min(reversed(range(layers)), key=most)  # of equal ones that which moves least
        each, more = divmod(layers - last, others)
        return [*(each + (stage >= others - more) for stage in range(others)), last]

    def _layer(self, layer: int) -> Seconds:
        return (self._dense if self.model.is_dense(layer) else self._routed).seconds

    @cached_property
    def _dense(self) -> LayerWork:
        return LayerWork(self.model, self.layout, self.machine)

    @cached_property
    def _routed(self) -> LayerWork:
        return LayerWork(self.model, self.layout, self.machine, dense=False)

    @cached_property
    def _head(self) -> Head:
        return Head(self.model, self.layout, self.machine)

    def saved(self, layer: int) -> Saved:
        return self._saved[self.model.is_dense(layer)]

    @cached_property
    def _saved(self) -> dict[bool, Saved]:
        return {dense: saved_of(self.model, self.layout, dense=dense) for dense in (True, False)}

    def held_parameters(self, layer: int) -> tuple[float, float]:
        """The parameters of a layer on one rank before data parallel splits them: experts apart."""
        model, tp = self.model, self.layout.tp
        if model.is_dense(layer):
            return model.layer_parameters(layer) / tp, 0.0
        experts = model.experts / self.layout.ep * model.mlp_parameters(model.expert_ffn) / tp
        return model.layer_parameters(layer, 0) / tp, experts

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(map(self._stage, range(len(self.layers))))

    def _stage(self, stage: int) -> Stage:
        last = len(self.layers) - 1
        head = self._head.seconds if stage == last or self.layout.head == "split" else Seconds(0.0, 0.0, 0.0)
        once = self._head.embedding if stage == 0 else 0.0
        once += self._fsdp_ends if self.layout.pp == 1 else 0.0
        forward, backward = self._sent(stage), self._sent(stage - 1)
        if self.layout.pp > 1:
            passes = 3 if self.layout.head == "split" else 1
            forward, backward = forward + passes * self._anew, backward + passes * self._anew
        return Stage(
            tuple(map(self._block, self.layers[stage])),
            fixed(once + forward, once + backward),
            fixed(head.forward, head.input_grad, head.weight_grad, self.loss_bytes(stage) if self.holds_loss else 0.0),
            message_bytes=self._message_bytes if stage else 0.0,
            collective_seconds=sum(self._layer(layer).collectives for layer in self.layers[stage]),
        )

    @property
    def _anew(self) -> float:
        """Seconds that a host loses at a message: it waits for it, and then some ten kernels start late. A head and
        an embedding that are split over stages are passes of their own."""
        return 10 * self.machine.rates.host_seconds

    @property
    def _message_bytes(self) -> float:
        layout = self.layout
        return 2.0 * layout.tokens * self.model.hidden / layout.tp

    def _crosses(self, boundary: int) -> bool:
        """Whether the ranks of a stage and of the next are in two nodes: stages are the outermost dimension."""
        stride, placement = self.layout.gpus // self.layout.pp, self.layout.placement
        nodes = [placement[stage] * stride // self.machine.network.node_devices for stage in (boundary, boundary + 1)]
        return nodes[0] != nodes[1]

    def _sent(self, boundary: int) -> float:
        """Seconds of a message between a stage and the next; 0 where there is none."""
        if not 0 <= boundary < len(self.layers) - 1:
            return 0.0
        return self.machine.message(self._message_bytes, across=self._crosses(boundary))

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

    def _block(self, layer: int) -> Block:
        return self._blocks[self.model.is_dense(layer)]

    @cached_property
    def _blocks(self) -> dict[bool, Block]:
        return {dense: self._block_of(dense) for dense in (True, False) if dense or self.model.experts}

    def _block_of(self, dense: bool) -> Block:
        work = (self._dense if dense else self._routed).seconds
        saved, recompute = self._saved[dense], self.layout.recompute
        layer = 0 if dense else self.model.dense_layers
        forward, backward = work.forward, work.input_grad
        replay = work.replay
        if recompute == "selective":
            backward += replay
        if self.layout.state == "fsdp2" and self.layout.pp == 1:
            gathers, reduces = self._fsdp(sum(self.held_parameters(layer)))
            forward = self._beside(forward, gathers)
            again = gathers if self.layout.software.resharded else 0.0
            part = replay * self.layout.recomputed_share if recompute == "full" else 0.0
            rest = work.weight_grad + part
            backward = self._beside(backward + rest, reduces + again) - rest
        return Block(
            forward, backward, work.weight_grad, replay if recompute in ("full", "planned") else forward,
            saved.kept, saved.boundary,
        )

    def _beside(self, compute: float, communication: float) -> float:
        """Seconds of both side by side."""
        return max(compute, communication) + self.machine.rates.unhidden * min(compute, communication)

    def _fsdp(self, parameters: float) -> tuple[float, float]:
        """Seconds to gather the weights of so many parameters, and to reduce and scatter their gradients."""
        layout, machine = self.layout, self.machine
        ranks, tp = layout.state_ranks, layout.tp
        gathers = machine.collective("all_gather", 2 * parameters, ranks, tp)
        reduces = machine.collective("reduce_scatter", layout.software.reduce_bytes * parameters, ranks, tp)
        replicas = layout.dp * layout.cp // ranks
        if replicas > 1:
            size = layout.software.reduce_bytes * parameters / ranks
            reduces += machine.collective("all_reduce", size, replicas, tp * ranks)
        return gathers, reduces

    @cached_property
    def _fsdp_ends(self) -> float:
        """The gathers of embedding and head, which nothing hides."""
        if self.layout.state != "fsdp2":
            return 0.0
        gathers, reduces = self._fsdp(self.model.embedding_parameters / self.layout.tp)
        return (2 * gathers + reduces) / 2

    @cached_property
    def choices(self) -> Choices:
        """What is recomputed, if the layout says which."""
        if self.layout.recompute != "full":
            return {}
        counts = [round(len(layers) * self.layout.recomputed_share) for layers in self.layers]
        chosen = [
            Choice(kept=tuple(range(count, len(layers))), late=tuple(range(count)))
            for count, layers in zip(counts, self.layers)
        ]
        pairs = range(len(chosen)), range(self.schedule.micro_batches)
        return {(stage, i): chosen[stage] for stage in pairs[0] for i in pairs[1]}

    @cached_property
    def step(self) -> Step:
        links = (Link(),) * (len(self.layers) - 1)  # ranks wait for messages: actions have their seconds
        return Step(self.schedule, self.stages, links, self.choices)

    def seconds_of(self, step: Step) -> float:
        """The seconds of the whole step, for a step of the pipeline: of one micro-batch where there is none."""
        if self.layout.pp == 1:
            return self.layout.micro_batches * step.seconds + self.once_seconds
        if self.layout.schedule in _SPLIT:
            return max(ends[-1] - starts[0] for starts, ends in zip(step.run.starts, step.run.ends)) + self.once_seconds
        return step.seconds + self.once_seconds

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
            return 2 * table / count
        head = table * (stage == count - 1 and not (model.tied and count == 1))
        return head + (table + model.positions * model.hidden) * (stage == 0)

    @cached_property
    def once_seconds(self) -> float:
        """What a step does once: gradients across data-parallel ranks that nothing hides, the optimizer."""
        layout, machine = self.layout, self.machine
        dense, routed = max(self.rank_parameters, key=sum)
        seconds = 2e-3 + machine.stream(30 * (dense / layout.state_ranks + routed / max(
            1, layout.state_ranks / layout.ep)))
        ranks = layout.dp * layout.cp
        if layout.state == "fsdp2":
            if layout.pp > 1:
                layers = max(len(layers) for layers in self.layers) * layout.chunks
                gathers, reduces = self._fsdp(sum(self.held_parameters(0)))
                seconds += (gathers + reduces) * layers * (1 + machine.rates.unhidden) / 2
            return seconds
        shares = layout.state == "zero1"
        kind, wire = ("all_gather", 6) if shares else ("all_reduce", 2)  # ZeRO-1 scatters float32, gathers bfloat16
        reduced = machine.collective(kind, (dense + routed / layout.ep) * wire, ranks, layout.tp)
        if shares and layout.software.overlaps_reduce:
            room = 0.8 * sum(self.stages[0].parts[i].forward_seconds for i in range(len(self.stages[0].parts))) * 1.5
            return seconds + max(machine.rates.unhidden * reduced, reduced - room)
        return seconds + reduced

    @property
    def step_seconds(self) -> float:
        return self.seconds_of(self.step)
