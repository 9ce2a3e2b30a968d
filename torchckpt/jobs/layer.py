"""Layer: the seconds of one layer for one micro-batch on one rank, from its operations; the bytes that it keeps."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchckpt.jobs.layout import Layout
from torchckpt.jobs.model import Model
from torchckpt.planning.rates import Machine, Product
from torchckpt.planning.work.block import Block, Collective, fixed

__all__ = ["Head", "LayerWork", "Saved", "saved_of"]


@dataclass(frozen=True)
class LayerWork:
    """The operations of a layer: products, attention, what is bound by memory, collectives."""

    model: Model
    layout: Layout
    machine: Machine
    dense: bool = True
    """Whether the layer has an MLP in place of experts."""

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Those of the forward: queries with keys and values, the output, the MLP's first (both if gated), its last;
        of experts these for each that the rank holds, and for shared ones; of latent attention the other two."""
        model, tp, tokens = self.model, self.layout.tp, self.layout.tokens
        ways, hidden = (2 if model.gated else 1), model.hidden
        first, *latent = [Product(tokens, sum(model.made) / tp, hidden)]
        if model.kv_rank:
            first, *latent = (Product(tokens, wide / tp, inner) for wide, inner in zip(model.made, model.made_of))
            latent.append(Product(tokens, model.latent, hidden))  # each rank makes all of it
        attention = first, Product(tokens, hidden, model.output_width / tp)
        if self.dense:
            width = model.ffn / tp
            return (*attention, Product(tokens, ways * width, hidden), Product(tokens, hidden, width), *latent)
        etp = self.layout.etp
        local, width = max(1.0, model.experts / self.layout.ep), model.expert_ffn / etp
        routed = max(1.0, tokens * etp / tp * model.active / local)
        experts = Product(routed, ways * width, hidden, local), Product(routed, hidden, width, local)
        shared = model.shared * model.expert_ffn / tp
        more = (Product(tokens, ways * shared, hidden), Product(tokens, hidden, shared)) if shared else ()
        return (*attention, *experts, *more, Product(tokens, model.experts, hidden), *latent)

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Forward, backward. All kernels but ``unfused`` skip the masked half of the scores."""
        model, layout, machine = self.model, self.layout, self.machine
        sequence, context = layout.sequence, layout.context
        if layout.software.attention != "unfused":
            width = (model.query_width + model.output_width) / layout.tp
            flops = 1.0 * layout.micro_batch * sequence * context * width
            forward, backward = machine.attention(flops, layout.software.attention, sequence)
        else:
            heads = max(1.0, layout.micro_batch * model.heads / layout.tp)
            size, value, scores = model.head_size, model.head_size * model.value_share, heads * context * sequence
            made = Product(context, sequence, size, heads), Product(context, value, sequence, heads)
            two = sum(map(machine.product, made))
            forward, backward = two + machine.stream(7 * scores), 2 * two + machine.stream(11 * scores)
        ring = self._seconds(self._ring)  # context parallel ranks pass keys and values around beside it
        return max(forward, ring), max(backward, 2 * ring)

    @cached_property
    def elementwise(self) -> float:
        """Norms, residuals and dropout, in the part that sequence parallel splits; the activation and the rotation of
        queries and keys in the part that tensor parallel splits."""
        model, layout = self.model, self.layout
        norms, inner = self._moved_bytes
        whole = layout.tokens / layout.tp if layout.sequence_parallel else layout.tokens
        moved = whole * norms * model.hidden + layout.tokens * inner / layout.tp
        if not self.dense:
            moved += 8 * layout.tokens * model.active * model.hidden / layout.tp
        return self.machine.stream(moved) + self.kernels * self.machine.rates.kernel_seconds

    @property
    def _moved_bytes(self) -> tuple[float, float]:
        """Bytes of a token that norms and residuals move, for each of ``hidden``; those of the activation and rotation.

        Fused: a norm reads and writes 2 bytes, as the residual does, with what both read. In eager mode an RMS norm is
        six kernels, most of them in float32; a rotation is three.
        """
        model, width, eager = self.model, self.model.width(self.dense), self.layout.software.kernels == "eager"
        if not model.gated:
            return (22 if self.layout.software.dropout else 24 if eager else 16), 4 * width
        rotated = model.query_width + model.kv_held(self.layout.tp)
        if eager:
            return 84, 10 * width + 20 * rotated
        return (22 if self.layout.software.dropout else 16), 6 * width + 8 * rotated

    @property
    def kernels(self) -> int:
        return 24 if self.layout.software.kernels == "eager" else 12

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All of the layer, but those of FSDP2."""
        ring = [self._ring, self._ring._replace(phase="backward", count=2)]
        ring += [self._ring._replace(phase="replay")] * (self.layout.recompute in ("full", "planned"))
        first, *others = self._backward
        if self.layout.sequence_parallel and self.layout.software.regathers:  # beside a product: nobody waits
            first = first._replace(count=2 * first.count)
        parts = (*self._forward, first, *others, *self._again, *ring)
        return tuple(each for each in parts if each.ranks > 1 and each.count)

    @cached_property
    def _forward(self) -> tuple[Collective, ...]:
        """Those of the forward that a rank waits for. With sequence parallel each all-reduce is an all-gather and a
        reduce-scatter. Keys and values of fewer heads than ranks are gathered with the queries. Tokens that are sent to
        experts are as they lie on the rank (Megatron), and the ranks of an expert gather what comes."""
        layout, model, size = self.layout, self.model, 2 * self.layout.tokens * self.model.hidden
        parts = []
        if model.kv_held(layout.tp) > model.kv_width:
            wide = 2 * layout.tokens * (model.query_width + 2 * model.kv_width)
            parts.append(Collective("all_gather", wide, layout.tp, "tp", "forward"))
        kinds, count = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",), 2
        if not self.dense and layout.ep > 1:
            sent = size * model.active // layout.tp
            parts.append(Collective("all_to_all", sent, layout.ep, "ep", "forward", 2))
            if layout.sequence_parallel:
                parts += [Collective(kind, sent * layout.etp, layout.etp, "tp", "forward") for kind in kinds]
                count -= layout.software.regathers and not model.shared
        return (*parts, *(Collective(kind, size, layout.tp, "tp", "forward", count) for kind in kinds))

    @cached_property
    def _backward(self) -> tuple[Collective, ...]:
        """Those of the forward the other way round, and the gradients of norms, of which each rank has a share of the
        tokens."""
        layout, model = self.layout, self.model
        sums = layout.state == "fsdp2" and layout.sequence_parallel and not layout.software.regathers
        count = (2 if model.gated else 4) * sums
        norms = Collective("all_reduce", 2 * model.hidden, layout.tp, "tp", "backward", count)
        other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
        turned = (each._replace(kind=other.get(each.kind, each.kind), phase="backward") for each in self._forward[::-1])
        return (*turned, norms)

    @cached_property
    def _again(self) -> tuple[Collective, ...]:
        """Those of a replay: as the forward, but the last where it stops early. A selective one has those of experts,
        if these run again."""
        again = [each._replace(phase="replay") for each in self._forward]
        if self.layout.recompute == "selective":
            is_sent = not self.dense and "moe" in self.layout.software.selective
            return tuple(each for each in again if each.dimension == "ep" and is_sent)
        if self.layout.recompute not in ("full", "planned"):
            return ()
        *others, last = again
        return (*others, last._replace(count=last.count - self.layout.software.stops_early))

    @property
    def _ring(self) -> Collective:
        """The keys and values of a sequence."""
        layout = self.layout
        wide = self.model.kv_held(layout.tp) * (1 + self.model.value_share)
        passed = round(layout.micro_batch * layout.sequence * 2 * wide / layout.tp)
        return Collective("all_gather", passed, layout.cp, "cp", "forward")

    def _seconds(self, *collectives: Collective) -> float:
        shares = {"tp": 0.35} if self.layout.software.async_tp else {}
        return sum(
            shares.get(each.dimension, 1.0) * self.machine.collective(each, self.layout.stride(each.dimension))
            for each in collectives
        )

    @cached_property
    def started(self) -> float:
        """The kernels of a forward that a host starts, of eager mode; a collective counts as four."""
        software = self.layout.software
        kernels = 4 + self.kernels + (6 if software.attention == "unfused" else 2) + (8 if self.layout.tp > 1 else 0)
        return (0.3 if software.kernels == "compiled" else 1) * kernels

    @cached_property
    def saved(self) -> Saved:
        return saved_of(self.model, self.layout, self.dense)

    @cached_property
    def collective_seconds(self) -> float:
        """Those of the forward and the backward that a rank waits for, inside of the block's."""
        return self._seconds(*self._forward, *self._backward)

    @cached_property
    def block(self) -> Block:
        """The layer as a block of its stage. What a selective recomputation makes again is part of the backward."""
        machine = self.machine
        forward = sum(map(machine.product, self.products))
        input_grad = sum(machine.product(product.input_grad) for product in self.products)
        weight_grad = sum(machine.product(product.weight_grad) for product in self.products)
        attended, attended_back = self.attention
        told, told_back = self._seconds(*self._forward), self._seconds(*self._backward)
        whole = machine.beside_host(forward + attended + self.elementwise + told, self.started)
        backward = input_grad + attended_back + 2 * self.elementwise + told_back + weight_grad
        input_grad, again = machine.beside_host(backward, 1.5 * self.started) - weight_grad, self._replay(whole)
        if self.layout.recompute in ("none", "selective"):
            input_grad, again = input_grad + again, whole
        return Block(whole, input_grad, weight_grad, again, self.saved.kept, self.saved.boundary)

    def _replay(self, forward: float) -> float:
        layout = self.layout
        if layout.recompute in ("full", "planned"):
            last = self.machine.product(self.products[3]) if layout.software.stops_early else 0.0
            return forward - last - self._seconds(*self._forward) + self._seconds(*self._again)
        if layout.recompute == "none":
            return 0.0
        if "products" in layout.software.selective:
            return 0.45 * sum(map(self.machine.product, self.products)) + 0.9 * self.elementwise
        return self._replayed_modules(layout.software.selective)

    def _replayed_modules(self, modules: tuple[str, ...]) -> float:
        """Seconds of what a selective recomputation runs again."""
        layout, model, products = self.layout, self.model, self.products
        seconds = self.attention[0] if "core_attn" in modules else 0.0
        again, width = [], 0
        if "mlp" in modules and self.dense:
            again, width = [*products[2:4]], model.ffn
        elif "moe" in modules and not self.dense:
            again, width = [*products[2 : 5 + 2 * (model.shared > 0)]], model.width(False)
        elif "shared_experts" in modules and model.shared and not self.dense:
            again, width = [*products[4:6]], model.shared * model.expert_ffn
        if "mla_up_proj" in modules and model.kv_rank:
            again += products[0], products[-2]
        seconds += sum(map(self.machine.product, again)) + self._seconds(*self._again)
        return seconds + self.machine.stream(6 * layout.tokens * width / layout.tp)

    @property
    def flops(self) -> float:
        """Of a forward."""
        layout = self.layout
        scores = (2.0 if layout.software.attention == "unfused" else 1.0) * layout.micro_batch * layout.sequence
        width = (self.model.query_width + self.model.output_width) / layout.tp
        return sum(product.flops for product in self.products) + scores * layout.context * width


@dataclass(frozen=True)
class Head:
    """The head and the loss, and the embedding, for one micro-batch on one rank."""

    model: Model
    layout: Layout
    machine: Machine

    @property
    def _ranks(self) -> int:
        """The ranks that share the vocabulary."""
        return self.layout.tp * (self.layout.pp if self.layout.head == "split" else 1)

    @cached_property
    def product(self) -> Product:
        return Product(self.layout.tokens, self.model.vocab / self._ranks, self.model.hidden)

    def block(self, loss_bytes: float) -> Block:
        """With the loss in float32, which holds so many bytes. Stages that share a head get its input, and add up the
        gradients of it."""
        machine, logits = self.machine, self.layout.tokens * self.model.vocab / self._ranks
        other = machine.stream((8 if self.layout.software.kernels == "compiled" else 20) * logits)
        if self.layout.head == "split":
            size = 2 * self.layout.tokens * self.model.hidden
            sent = Collective("broadcast", size, self.layout.pp, "pp", "forward")
            other += machine.collective(sent, self.layout.stride("pp"))
        forward, input_grad, weight_grad = (
            machine.product(each) for each in (self.product, self.product.input_grad, self.product.weight_grad)
        )
        return fixed(forward + other, input_grad + other, weight_grad, loss_bytes)

    @cached_property
    def embedding(self) -> float:
        """Seconds, forward and also backward."""
        return self.machine.stream(12 * self.layout.tokens * self.model.hidden)


class Saved(NamedTuple):
    """Bytes of a layer and micro-batch."""

    whole: float
    """If nothing is recomputed."""
    kept: float
    """Under the recomputation of the layout, if that is none or selective."""
    boundary: float
    """The input of the layer."""


def saved_of(model: Model, layout: Layout, dense: bool = True) -> Saved:
    """What a layer saves, its input included (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1)."""
    software, tp, hidden = layout.software, layout.tp, model.hidden
    eager, flash = software.kernels == "eager", software.attention != "unfused"
    split = 1 / tp if layout.sequence_parallel else 1.0
    gathered = 0.0 if software.regathers else 4 * (1 - split)  # what the products after both norms read
    query, keys, width, output = model.query_width, model.kv_held(tp), model.width(dense), model.output_width
    norms = (16 if eager else 8) + (2 if software.dropout else 0)  # masks of both dropouts, of a byte
    first = (4 if model.gated else 2) * width
    second = (4 if model.gated and eager else 2) * width
    routed = 0 if dense else 2 * model.active * hidden * layout.etp  # each rank of an expert has all of its tokens
    scores = model.heads * (4 if flash else layout.sequence * (5 if software.dropout else 2))
    inside = 2 * (query + keys * (1 + model.value_share)) + 2 * output + first + second + routed + scores
    latent = 4 * (model.query_rank + model.kv_rank) * split  # before their norms, and behind
    whole = layout.tokens * (hidden * (norms * split + gathered) + latent + inside / tp)
    boundary = layout.tokens * 2 * hidden * split
    if layout.recompute != "selective":
        return Saved(whole, whole, boundary)
    modules = software.selective
    if "products" in modules:
        made = 2 * (query + output + keys + width + hidden)
        return Saved(whole, boundary + layout.tokens * made / tp, boundary)
    gone = 0.0 if flash or "core_attn" not in modules else scores
    if dense:
        gone += first + second if "mlp" in modules else 0
    elif "moe" in modules:
        gone += first + second + routed
    else:
        shared = model.shared / (model.active + model.shared)
        gone += second * (1 - shared) if "moe_act" in modules else 0
        gone += (first + second) * shared if "shared_experts" in modules else 0
    if model.kv_rank and "mla_up_proj" in modules:
        gone += 2 * (query + keys * (1 + model.value_share))
    norms_gone = layout.tokens * 4 * hidden * split if "layernorm" in modules else 0.0
    return Saved(whole, whole - layout.tokens * gone / tp - norms_gone, boundary)
