"""Published runs: rows of a file as jobs of torchckpt."""
from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.published.fields import KEYS, OF_EXPERTS, OF_LATENTS, wrong_fields
from torchckpt.errors import ArgumentError, Fault, brief, raise_fault
from torchckpt.jobs.job import Job
from torchckpt.jobs.layout import Layout, Software
from torchckpt.jobs.memory import memory_of
from torchckpt.jobs.model import Model
from torchckpt.planning.device import DEVICES, Device
from torchckpt.planning.rates import RATES, Machine, Rates

GIB = 2.0**30
DRIVER_BYTES = 1.5 * GIB
"""The context of the device and the buffers of NCCL, which a driver's figure counts: 1 to 2 GiB."""


def _variant(name: str, **changes: Any) -> Device:
    return replace(DEVICES[name], **changes)


_DEVICES = {
    "A100 40GB": ("a100", _variant("a100", bytes_per_second=1.555e12, memory_bytes=40e9)),
    "A100": ("a100", DEVICES["a100"]),
    "A800": ("a100", _variant("a100", network=replace(DEVICES["a100"].network, bytes_per_second=160e9))),
    "H100 500W": (
        "h100",
        _variant(
            "h100", bytes_per_second=2.4e12, memory_bytes=96e9,
            peak_flops={name: flops * (500 / 700) ** 0.5 for name, flops in DEVICES["h100"].peak_flops.items()},
        ),
    ),
    "H100": ("h100", DEVICES["h100"]),
    "H800": ("h100", _variant("h100", network=replace(DEVICES["h100"].network, bytes_per_second=165e9))),
    "H200": ("h200", DEVICES["h200"]),
    "B200": ("b200", DEVICES["b200"]),
    "MI300X": ("mi300x", DEVICES["mi300x"]),
}  # fmt: skip
"""The devices of the rows: rates, and a data sheet. The clock of a card falls with the root of its power, about."""
_OTHER_CARDS = re.compile(r"\b(PCIe|PCIE|NVL)\b")
"""Cards of the same name with other peaks."""
_NO_RATES = ("fp32", "tf32", "fp64", "float32", "float64", "int8")
_SCHEDULES = {
    "none": "1f1b", "zb-1p": "zero_bubble", "interleaved_zero_bubble": "zero_bubble",
    "interleaved_1f1b (modified)": "interleaved_1f1b",
}  # fmt: skip
_HEADS = {"redis": "balanced", "vocab-1": "split", "vocab-2": "split", "interlaced": "split"}
_AHEAD = {"vocab-1": 2, "vocab-2": 1}
"""Forwards more ahead; of an interlaced head half as many as ranks."""
_MODULES = ("mlp", "layernorm", "moe_act", "core_attn", "moe", "shared_experts", "mla_up_proj")
_MOST_VISITS = 2**18
"""Of a simulated step."""
_EAGER = ("titan", "foundry", "fms", "torchtune", "automodel", "fsdp", "paddle")


@dataclass
class Run:
    """A row, and the job that it describes. No measured value goes into the job, but the share of recomputed layers
    where only HFU over MFU says it."""

    row: dict[str, Any]
    rates: dict[str, Rates] = field(default_factory=lambda: dict(RATES))
    levers: frozenset[str] = frozenset()
    wrong: str = ""
    """What the row says in another kind of value; these fields count as not printed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["row"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def source_name(self) -> str:
        """The letters that its series begins with."""
        letters = (place for place, letter in enumerate(self.series) if not letter.isalpha())
        return str(self.series[: next(letters, len(self.series))])

    @property
    def _framework(self) -> str:
        return (self.row["framework"] or "").lower()

    @property
    def device_name(self) -> str | None:
        name = self.gpu.split(" (")[0].replace("-class", "")
        if "HBM2e" in self.gpu or "95 GiB" in self.gpu:
            return "H100 500W"
        if _OTHER_CARDS.search(self.gpu):
            return None
        return next((known for known in (name, *name.split()[:1]) if known in _DEVICES), None)

    @property
    def kind(self) -> str:
        """Whose figures the row counts in."""
        if self.moe or "moe" in (self.model_kind or ""):
            return "MoE"
        return "fp8" if self.is_low_precision else "dense, bf16 and fp16"

    @property
    def is_low_precision(self) -> bool:
        """Whether anything else than bf16 and fp16 is multiplied."""
        return self._multiplied not in ("bf16", "fp16")

    @property
    def _multiplied(self) -> str:
        """The precision of most products."""
        return (self.precision or "bf16").lower().partition(" ")[0].partition("/")[0]

    def reason(self, *, timed: bool) -> str:
        """Why the time, or the memory, of the row cannot be predicted; empty if it can."""
        if self.wrong:
            return self.wrong
        wanted = ["layers", "hidden", "heads", "micro_batch", "seq_len", *["microbatches_per_step"] * timed]
        missing = [name for name in wanted if not self.row[name]]
        if missing:
            return f"{missing[0].replace('_', ' ')} is not printed"
        if (self.gpus or 1) > 1 and not any(self.row[name] for name in ("tp", "cp", "pp", "dp", "fsdp")):
            return "the layout is not printed"
        if timed and self.device_name is None:
            return f"no data sheet of {self.gpu}"
        if timed and self._multiplied in _NO_RATES:
            return f"no rate of products in {self.precision}"
        if not self.recompute and self.kind != "MoE" and not (timed and self.kind == "fp8"):
            return "recompute is not printed"
        return self._trouble if self.outcome in (None, "ok") else f"the run ended: {self.outcome}"

    @cached_property
    def _trouble(self) -> str:
        """Why the row has no prediction; empty if it has one."""
        try:
            predicted = self.seconds, self.memory_gib
        except ArgumentError as error:
            return next(line for line in str(error.args[0]).splitlines() if not line.endswith(" faults"))
        except (ArithmeticError, LookupError, ValueError) as error:
            return f"its layout has no step: {error}"
        return "" if all(map(math.isfinite, predicted)) else "what is predicted is not finite"

    @property
    def time_or_mfu(self) -> float | None:
        """Seconds, or where only MFU is printed its inverse: for ratios."""
        return self.step_seconds or (1 / self.mfu_pct if self.mfu_pct else None)

    @property
    def measured_gib(self) -> float | None:
        return self.peak_active_gib or self.peak_memory_gib

    @property
    def memory_kind(self) -> str:
        """What the figure of memory counts."""
        if self.peak_active_gib:
            return "allocated"
        printed = self.peak_memory_kind or "not stated"
        kinds = {"alloc": "allocated", "active": "allocated", "reserved": "reserved", "device": "driver"}
        return next((kind for word, kind in kinds.items() if word in printed), printed)

    @property
    def left_out(self) -> str:
        """Why the figures of memory leave the row out; empty if they do not."""
        return next((why for start, why in _LEFT_OUT.items() if self.series.startswith(start)), "")

    def remark(self, *, timed: bool) -> str:
        """A likely reason for the error of the row's time, or of its memory."""
        reasons = _OF_TIME if timed else _OF_MEMORY
        return next((why for start, why in reasons.items() if self.id.startswith(start)), "not known")

    @cached_property
    def machine(self) -> Machine:
        name, device = _DEVICES[self.device_name or "H100"]
        network = device.network
        assert network is not None
        changes = {"node_devices": self.gpus_per_node or 8}
        if self.inter_node_gbps_per_gpu:
            changes["outer_bytes_per_second"] = self.inter_node_gbps_per_gpu / 8 * 1e9
        return Machine(replace(device, network=replace(network, **changes)), self.rates[name], self.is_fp8)

    @property
    def is_fp8(self) -> bool:
        return any(word in (self.precision or "") for word in ("fp8", "fp4"))

    @cached_property
    def sizes(self) -> Model:
        """A vocabulary that is not printed is GPT-2's, padded; of Zero Bubble that of its scripts' tokenizer."""
        moe, row = self.moe or {}, self.row
        mla = moe.get("mla") or {}
        head = (mla.get("qk_nope") or 0) + (mla.get("qk_rope") or 0) or row["head_dim"] or 0
        return Model(
            row["model"], row["layers"], row["hidden"], row["heads"], row["ffn"] or 4 * row["hidden"],
            row["vocab"] or (32000 if "zero-bubble" in self._framework else 51200), row["kv_heads"] or 0, head,
            bool(row["gated_mlp"]), bool(row["tied_embeddings"]),
            row["seq_len"] if self._says("learned positions") else 0,
            True if self._says("linear biases") else None,
            **{name: moe.get(key) or 0 for key, name in OF_EXPERTS.items()},
            **{name: mla.get(key) or 0 for key, name in OF_LATENTS.items()},
        )  # fmt: skip

    def _says(self, words: str) -> bool:
        return words in f"{self.model_kind} {self.notes}"

    @property
    def _attention(self) -> str:
        """The kernel: that of llm-foundry is Triton's of 2023, Paddle 2.5 has the first FlashAttention."""
        text, framework = self.attention or "flash", self._framework
        if "unfused" in text:
            return "unfused"
        if "foundry" in framework or "paddle" in framework:
            return "flash1"
        return "fused" if "TE" in text or "cuDNN" in text else "flash2"

    @property
    def _recompute(self) -> tuple[str, float]:
        detail, kind = self.recompute_detail or "", self.recompute or "none"
        if every := re.search(r"every (\d+)(?:nd|rd|th)", detail):
            return "full", 1 / max(1, int(every[1]))
        if "share of the layers" in detail and self.hfu_pct and self.mfu_pct:
            return "full", min(1.0, 3 * (self.hfu_pct / self.mfu_pct - 1))
        return kind, 1.0

    @property
    def _is_torch(self) -> bool:
        """Whether the framework runs models of torch as they are written."""
        return any(word in self._framework for word in _EAGER)

    @property
    def _is_titan(self) -> bool:
        return "titan" in self._framework or "torchao" in self._framework

    @property
    def _selective(self) -> tuple[str, ...]:
        """The modules that selective recomputation runs again."""
        detail = self.recompute_detail or ""
        if self._is_titan and "core" not in detail:
            return ("products",)
        words = detail.replace(",", " ").replace("+", " ").split()
        return tuple(word for word in words if word in _MODULES) or ("core_attn",)

    @property
    def _loss_bytes(self) -> float:
        """Of a logit: Megatron's loss works in place; eager mode has it in two bytes and three times in float32; a
        loss that is compiled with the head (since 2025, not in torchtune) keeps no float32; a chunked one an eighth."""
        size = 10.0
        if "SDP" in (self.optimizer_sharding or "") or self._is_torch:
            is_apart = not self.compile or any(word in self._framework for word in ("2024", "torchtune"))
            size = 14.0 if is_apart else 4.0
        return 4 + size / 8 if "chunk" in self.levers else size

    @cached_property
    def software(self) -> Software:
        notes, unfused = self.notes or "", self._attention == "unfused"
        base = Software(
            kernels="compiled" if self.compile else "eager" if self._is_torch else "fused",
            attention=self._attention,
            dropout="dropout 0.1" in notes or "dropout in" in notes or unfused,
            selective=self._selective,
            stops_early=self._is_torch,
            reduce_bytes=4.0 if "fp32 reduce" in (self.state_dtypes or "") else 2.0,
            loss_bytes=self._loss_bytes,
            resharded=self.zero_stage != 2,
            overlaps_reduce=not any(word in self._framework for word in ("deepspeed", "(2021)", "(2022)")),
            scatters=any(word in self._framework for word in ("deepspeed", "(2021)", "(2022)", "paddle")),
            async_tp=self.overlap_notes == "async TP",
            offloads="offload" in self.levers,
            regathers=not self._is_torch,
        )
        return self._with_states(base, self.state_dtypes or "", self.optimizer_sharding or "")

    def _with_states(self, base: Software, dtypes: str, sharding: str) -> Software:
        if "all bf16" in dtypes:
            gradient = 0.0 if "fuse" in self.levers else 2.0
            return replace(base, gradient_bytes=gradient, optimizer_bytes=2.0 if "8bit" in self.levers else 4.0)
        if "SDP" in sharding:
            return replace(base, parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
        if "ZeRO" in sharding or "stage" in sharding:
            return replace(base, gradient_bytes=2.0, gradients_shared=self._stage == 2)
        if self._multiplied == "fp16":  # Megatron sums gradients in fp16, and has them once more for its optimizer
            return replace(base, gradient_bytes=2.0, optimizer_bytes=14.0)
        return base

    @property
    def _stage(self) -> int:
        """The stage of ZeRO: what data-parallel ranks share."""
        named = re.search(r"(?:ZeRO|stage)\D{0,9}(\d)", self.optimizer_sharding or "")
        return int(named[1]) if named else self.zero_stage or 0

    @cached_property
    def layout(self) -> Layout:
        row, sharding = self.row, self.optimizer_sharding or ""
        recompute, share = self._recompute
        state = "zero1" if any(word in sharding for word in ("distributed", "ZeRO", "stage")) else "none"
        name, _, way = (row["schedule"] or "none").partition(" + ")
        pp, dp, cp = row["pp"] or 1, row["dp"] or 1, row["cp"] or 1
        fsdp = 1
        if "SDP" in sharding or (state == "zero1" and self._stage == 3):
            fsdp = row["fsdp"] or dp * cp
        chunks = row["vpp"] or (2 if "interleaved" in name else 1)
        return Layout(
            gpus=row["gpus"], tp=row["tp"] or 1, cp=cp, ep=row["ep"] or 1, pp=pp, dp=dp,
            micro_batch=row["micro_batch"],
            global_batch=(row["microbatches_per_step"] or 1) * dp * row["micro_batch"],
            sequence=row["seq_len"], schedule=_SCHEDULES.get(name, name),
            head=_HEADS.get(way, "last"), ahead=_AHEAD.get(way, (pp + 1) // 2 if way == "interlaced" else 0),
            chunks=chunks if "interleaved" in name and pp > 1 else 1,
            recompute=recompute, recomputed_share=share, state="fsdp2" if fsdp > 1 else state,
            shards=fsdp if fsdp > 1 else 0,
            sequence_parallel=bool(row["sp"]) or self._is_titan, software=self.software,
        )  # fmt: skip

    @cached_property
    def job(self) -> Job:
        layout = self.layout
        if layout.shards > layout.dp * layout.cp:
            received = f"fsdp={layout.shards}, dp={layout.dp}, cp={layout.cp}"
            raise_fault(Fault(f"more ranks share the state than dp x cp: {received}", received, f"dp={layout.shards}"))
        split = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp")}
        if math.prod(split.values()) != layout.gpus:
            received = ", ".join(f"{name}={ranks}" for name, ranks in split.items())
            rule = f"the {layout.gpus} GPUs are not tp x cp x pp x dp: {received}"
            raise_fault(Fault(rule, received, f"gpus={math.prod(split.values())}"))
        if layout.stages * layout.micro_batches > _MOST_VISITS:
            received = f"{layout.stages} stages x {layout.micro_batches} micro-batches"
            raise_fault(Fault(f"the step is too long to simulate: {received}", received, "fewer micro-batches"))
        return Job(self.sizes, layout, self.machine)

    @cached_property
    def seconds(self) -> float:
        return self.job.step_seconds

    @cached_property
    def memory_gib(self) -> float:
        most = max(rank.total for rank in memory_of(self.job))
        return (most + DRIVER_BYTES * (self.memory_kind == "driver")) / GIB

    def with_rates(self, rates: dict[str, Rates]) -> Run:
        return Run(self.row, rates, self.levers, self.wrong)


def read_runs(path: Path) -> list[Run]:
    """The rows of a JSON list, or of a file with one object a line; what a row lacks is unknown. The levers of
    torchtune's table add up in its order."""
    levers: set[str] = set()
    runs = []
    for row in _rows(path):
        wrong = dict(wrong_fields(row))
        known = {**dict.fromkeys(KEYS), **row, **dict.fromkeys(wrong)}
        why = "; ".join(f"{key} is not {kind}: {brief(row[key])}" for key, kind in wrong.items())
        if is_tuned := (known["series"] or "").startswith("torchtune"):
            words = f"{known['quoted']} {known['notes']}".lower().replace("8-bit", "8bit")
            levers |= {lever for lever in _LEVERS if lever in words}
        runs.append(Run(known, levers=frozenset(levers if is_tuned else ()), wrong=why))
    return runs


def _rows(path: Path) -> list[dict[str, Any]]:
    works = f"works: --rows {Path(__file__).with_name('rows.json')}"
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else list(map(json.loads, text.splitlines()))
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"cannot read the rows: {error}; received: --rows {path}; {works}") from None
    for number, row in enumerate(rows):
        known = row if isinstance(row, dict) else {}
        lacks = [key for key in ("id", "series", "model", "gpu", "gpus") if not known.get(key)]
        if lacks:
            raise SystemExit(f"a row has no {lacks[0]}; received: row {number} of {path}; {works}")
    return rows


_LEVERS = ("chunk", "fuse", "offload", "8bit")
_LEFT_OUT = {
    "atorch-FSDP": "17 GiB that do not shrink with the shards; what holds them is not printed",
    "bridge-sft70b": "fine-tuning on packed sequences in fp8; the dtypes of gradients are not printed",
}
_OF_TIME = {
    "titan24-405b-izb": "the authors report a bug of the schedule in that run",
    "torchao-B200": "the card is power limited; to how much is not printed",
    "vtrain-m015": "one micro-batch of 64 on TP 8: the tables' authors have outliers at the extremes of micro-batch",
    "vtrain-m0": "TP 4 to 16 at the extremes of micro-batch: outliers of the source",
    "vtrain-s": "TP on one small layer: the host starts kernels more slowly than it computes",
    "foundry-a100_40gb": "40 GB are nearly full: the allocator frees and asks again",
    "foundry-a100_80gb-30b-8192": "80 GB are nearly full: the allocator frees and asks again",
    "foundry-h100_80gb-30b-8192": "80 GB are nearly full: the allocator frees and asks again",
    "bridge-q30": "experts: the dispatcher's kernels and its waits for counts of tokens are not in the model",
    "bridge26": "experts: dispatch and an uneven load are not in the model",
    "bridge25.09-H100-DeepSeek": "experts: a token may go once to a node, and beside what is computed",
    "titan25-asynctp-70.6-fp8": "fp8: the share of products that runs in it is not printed",
    "flagperf-mixtral": "experts; the length of its sequences was assumed, not printed",
    "nemo24.12-Nemotron": "fp8, and recomputation is not printed",
}
_OF_MEMORY = {
    "titan24-405b-izb": "the authors report a bug of the schedule in that run",
    "titan165-fsdp2ac": "reserved: the allocator's cache is in the figure",
    "flagperf": "whole GiB of the driver, with buffers that no page of it names",
    "titan24-405b": "reserved, near the card's capacity: the allocator's cache is in the figure",
    "zb-": "the kind of GB and the vocabulary are not printed",
    "vocabpp": "reserved, in MiB / 1024",
}
