"""Features: which names of torch each part of the package needs, and what happens on a torch without them.

``python -m torchckpt env`` tells what the installed torch has. A feature is available if torch has all the
names that it needs; the release number does not matter.
"""
from __future__ import annotations

import functools
import warnings
from importlib import import_module
from typing import NamedTuple

__all__ = ["FEATURES", "GRAPH", "INDUCTOR", "TESTED", "Feature", "release_of", "table", "warn_of_newer_torch"]

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The releases of torch on which the test suite was run."""


class Feature(NamedTuple):
    """Something that users do, and the names of torch that it needs."""

    name: str
    since: str
    """The oldest of the tested releases that has it."""
    needs: tuple[str, ...]
    """Names as ``module:name``, such as ``torch._C._autograd:_profiler_enabled``."""
    without: str
    """What happens on a torch that lacks one of the names."""

    def missing(self) -> tuple[str, ...]:
        """The names that the feature needs and this torch lacks."""
        return tuple(need for need in self.needs if not _is_there(need))


_REGIONS = (
    "torch._C:_are_functorch_transforms_active",
    "torch._C:_current_autograd_node",
    "torch._C:_len_torch_dispatch_stack",
    "torch._C:_len_torch_function_stack",
    "torch._C:_storage_Use_Count",
    "torch._C._autograd:_push_saved_tensors_default_hooks",
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    "torch._C._autograd:_unsafe_set_version_counter",
    "torch.nn.modules.batchnorm:_NormBase",
    "torch.overrides:_get_current_function_mode_stack",
    "torch.utils.checkpoint:_checkpoint_debug_enabled",
)
_DISTRIBUTED = (
    "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._prepare_schedule_with_comms",
    "torch.distributed.pipelining.schedules:_ComputationType.OVERLAP_F_B",
    "torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState",
)
_CAPTURE = (
    "torch._dynamo.convert_frame:compile_lock",
    "torch._functorch._aot_autograd.graph_capture_wrappers:set_partitioner_tag_is_backward",
    "torch._functorch._aot_autograd.utils:copy_fwd_metadata_to_bw_nodes",
    "torch.fx._lazy_graph_module:_use_lazy_graph_module",
)
_FUSION = (
    "torch._inductor.custom_graph_pass:CustomPartitionerFn",
    "torch._inductor.memory:estimate_peak_memory_allocfree",
    "torch._inductor.config:_post_fusion_custom_pass",
)

GRAPH = Feature("`torchckpt.graph`", "2.11", _CAPTURE, "`CaptureError` at its first call")
INDUCTOR = Feature("`torchckpt.graph` with Inductor", "2.11", _FUSION, "`CaptureError` at its first call")

FEATURES = (
    Feature("regions, `checkpoint_module`, `Pipe`", "2.11", _REGIONS, "`CheckpointError` at import"),
    Feature(
        "names of stages and micro-batches in a profile",
        "2.11",
        ("torch._C._autograd:_profiler_enabled",),
        "they are given without a profiler, too",
    ),
    Feature(
        "replays that Dynamo passes by",
        "2.11",
        ("torch._C._dynamo.eval_frame:set_code_exec_strategy", "torch._C._dynamo.eval_frame:_FrameExecStrategy"),
        "the hooks of a region around compiled code are compiled, too",
    ),
    Feature("`torchckpt.distributed`", "2.11", _DISTRIBUTED, "`CheckpointError` at its import"),
    Feature(
        "neighbouring stages on one rank over gloo (ZBV, DualPipeV)",
        "2.12",
        ("torch.distributed.pipelining.stage:PipelineStage._is_same_rank",),
        "torch's first step fails: gloo cannot send to itself",
    ),
    Feature(
        "the ends of sends and reductions as actions of a schedule",
        "2.15",
        (
            "torch.distributed.pipelining.schedules:_ComputationType.WAIT_SEND_F",
            "torch.distributed.pipelining.schedules:_ComputationType.WAIT_REDUCE_GRAD",
        ),
        "torch waits for its sends at the end of a step",
    ),
    GRAPH,
    INDUCTOR,
    Feature(
        "selective contexts that look for saved-tensor hooks around them",
        "2.14",
        ("torch.utils.checkpoint:_current_user_saved_tensors_hooks",),
        "what they keep does not go through such hooks",
    ),
)


def _is_there(need: str) -> bool:
    module, _, path = need.partition(":")
    try:
        functools.reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number: ``(2, 15)`` for ``2.15.0+cpu``."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def table() -> str:
    """The features as a Markdown table: the oldest release that has each, and what happens without it."""
    head = "| what | torch | on a torch without it |\n|---|---|---|\n"
    return head + "".join(f"| {name} | {since} | {without} |\n" for name, since, _, without in FEATURES)


@functools.cache
def warn_of_newer_torch(version: str) -> None:
    """Warn once if torch is newer than the newest release on which this package was tested."""
    if release_of(version) > release_of(TESTED[-1]):
        warnings.warn(
            f"torchckpt was tested with torch {TESTED[0]} to {TESTED[-1]}\n  received: torch {version}\n"
            "  works:    python -m torchckpt env lists what this torch lacks; "
            f"pip install 'torch=={TESTED[-1]}.*' if something fails",
            stacklevel=2,
        )
