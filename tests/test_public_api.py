"""The public surface, letter for letter: a change to it is a change to this file."""
from __future__ import annotations

import inspect

import pytest

import torchckpt
from tests.scripts import run
from torchckpt import distributed, errors, graph, pipe, testing, typing


def test_names():
    assert torchckpt.__all__ == [
        "ArgumentError",
        "BudgetInfeasible",
        "CaptureError",
        "CheckpointError",
        "Checkpointing",
        "Pipe",
        "RecomputationError",
        "RegionError",
        "ScheduleError",
        "TransformError",
        "__version__",
        "checkpoint",
        "checkpoint_layers",
        "checkpoint_module",
        "errors",
        "graph",
        "is_checkpointing",
        "is_recomputing",
        "keep",
        "offload",
        "offload_layers",
        "offload_module",
        "testing",
    ]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (distributed, ["RecomputeAhead", "RecomputeWithin", "recompute_ahead", "schedule_of"]),
        (
            errors,
            [
                "ArgumentError",
                "BudgetInfeasible",
                "CaptureError",
                "CheckpointError",
                "Fault",
                "RecomputationError",
                "RegionError",
                "ScheduleError",
                "TransformError",
            ],
        ),
        (
            graph,
            [
                "Frontier",
                "Plan",
                "RematerializeHandle",
                "backend",
                "frontier",
                "gradient",
                "gradients",
                "mark",
                "region",
                "rematerialize",
                "rematerialize_",
                "separators",
                "sequential",
                "simplify",
                "simulate",
            ],
        ),
        (
            pipe,
            ["Balance", "DeferredBatchNorm", "NoChunk", "Pipe", "WithDevice", "balance_by_bytes", "balance_by_time"],
        ),
        (pipe.skip, ["Name", "Namespace", "Skips", "StageSkips", "pop", "stash"]),
        (
            testing,
            [
                "Flops",
                "Recomputes",
                "SavedByLine",
                "SavedBytes",
                "SavedLine",
                "assert_transparent",
                "count_recomputes",
                "flops",
                "peak_bytes",
                "saved_by_line",
                "saved_bytes",
            ],
        ),
        (typing, ["CheckpointMode", "ContextFunction", "DeterminismCheck", "Function"]),
    ],
)
def test_names_of_the_public_modules(module, names):
    assert module.__all__ == names


@pytest.mark.parametrize("module", [torchckpt, distributed, errors, graph, pipe, testing, typing])
def test_every_name_is_there(module):
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_modules_are_there_when_they_are_first_asked_for():
    names = ["costs", "distributed", "errors", "graph", "pipe", "planning", "regions", "testing", "typing"]
    program = (
        "import sys, torchckpt\n"
        f"print([name for name in {names} if 'torchckpt.' + name in sys.modules])\n"
        f"print([name for name in {names} if getattr(torchckpt, name).__name__ == 'torchckpt.' + name])"
    )
    made = run("-c", program)
    assert made.stdout.splitlines() == ["[]", str(names)]
    assert set(names) <= set(dir(torchckpt))


OPTIONS = (
    "preserve_rng_state: 'bool' = True, generators: 'Sequence[torch.Generator]' = (), "
    "determinism_check: 'DeterminismCheck' = 'default', context_fn: 'ContextFunction | None' = None, "
)

SIGNATURES = {
    "checkpoint": (
        "(function: 'Function | None' = None, *args: 'Any', use_reentrant: 'bool | None' = None, "
        f"{OPTIONS}debug: 'bool' = False, early_stop: 'bool' = True, "
        "respect_saved_tensors_hooks: 'bool | None' = None, **kwargs: 'Any') -> 'Any'"
    ),
    "checkpoint_module": f"(module: 'nn.Module', *, {OPTIONS}early_stop: 'bool' = True) -> 'RegionHandle'",
    "offload": "(function: 'Function', /, *args: 'Any', min_bytes: 'int' = 1048576, **kwargs: 'Any') -> 'Any'",
    "offload_module": "(module: 'nn.Module', *, min_bytes: 'int' = 1048576) -> 'RegionHandle'",
    "offload_layers": (
        "(model: 'nn.Module', layers: 'Selector | Sequence[Selector] | Set[Selector]', *, every: 'int' = 1, "
        "min_bytes: 'int' = 1048576) -> 'LayersHandle'"
    ),
    "checkpoint_layers": (
        "(model: 'nn.Module', layers: 'Selector | Sequence[Selector] | Set[Selector] | None' = None, *, "
        "every: 'int' = 1, budget: 'Budget | None' = None, device_memory: 'Budget | None' = None, "
        f"host: 'Budget | None' = None, {OPTIONS}debug: 'bool' = False, early_stop: 'bool' = True) -> 'PlannedLayers'"
    ),
    "Checkpointing": (
        f"(function: 'Function', *args: 'Any', {OPTIONS}debug: 'bool' = False, early_stop: 'bool' = True, "
        "**kwargs: 'Any') -> 'None'"
    ),
    "Checkpointing.checkpoint": "(self) -> 'Any'",
    "Checkpointing.recompute": "(self, outputs: 'Any') -> 'Any'",
    "Checkpointing.prefetch": "(self) -> 'None'",
    "Pipe": (
        "(module: 'nn.Sequential', balance: 'Sequence[int] | None' = None, "
        "devices: 'Sequence[torch.device | str | int] | None' = None, chunks: 'int' = 1, "
        "checkpoint: 'CheckpointMode' = 'except_last', lookahead: 'int' = 1, *, batch_dim: 'int' = 0, "
        "reduce: 'str | None' = None, budget: 'Bytes | None' = None, split_nested: 'bool' = False, "
        "deferred_batch_norm: 'bool' = False, "
        "preserve_rng_state: 'bool' = True, generators: 'Sequence[torch.Generator]' = (), "
        "determinism_check: 'DeterminismCheck' = 'default', context_fn: 'ContextFunction | None' = None, "
        "early_stop: 'bool' = True) -> 'None'"
    ),
    "Pipe.forward": "(self, *args: 'Any', **kwargs: 'Any') -> 'Any'",
    "Pipe.step": (
        "(self, *args: 'Any', loss_fn: 'Callable[[Any, Any], torch.Tensor]', target: 'Any' = Ellipsis, "
        "reduce: 'str | None' = None, **kwargs: 'Any') -> 'torch.Tensor'"
    ),
    "Pipe.timeline": "(self) -> 'Timeline'",
    "Pipe.report": "(self) -> 'PlannedStep'",
    "Pipe.draw": "(self, path: 'str | PathLike[str] | None' = None) -> 'str'",
    "distributed.recompute_ahead": (
        "(schedule: 'Live', segments: 'int | None' = None, exempt: 'str | Collection[Visit]' = 'auto', "
        "costs: 'Stages | str | None' = None, link: 'Links | None' = None, *, "
        "budget: 'Bytes | None' = None, host: 'Bytes | None' = None, plan: 'Plan | None' = None) -> 'RecomputeAhead'"
    ),
    "distributed.schedule_of": "(live: 'Live') -> 'Schedule'",
    "distributed.RecomputeAhead.timeline": "(self) -> 'Timeline'",
    "distributed.RecomputeAhead.report": "(self) -> 'Comparison'",
    "distributed.RecomputeWithin.report": "(self) -> 'PlannedStep'",
    "is_checkpointing": "() -> 'bool'",
    "is_recomputing": "() -> 'bool'",
    "pipe.DeferredBatchNorm.convert": "(module: 'M') -> 'M'",
    "pipe.DeferredBatchNorm.revert": "(module: 'M') -> 'M'",
    "pipe.DeferredBatchNorm.mini_batch": "(module: 'nn.Module') -> 'Iterator[None]'",
    "pipe.NoChunk": "(value: 'Any') -> None",
    "pipe.WithDevice": "(module: 'M', device: 'torch.device | str | int') -> 'M'",
    "pipe.skip.stash": "(name: 'str', tensor: 'Tensor', namespace: 'Namespace | None' = None) -> 'None'",
    "pipe.skip.pop": "(name: 'str', namespace: 'Namespace | None' = None) -> 'Tensor'",
    "pipe.skip.Namespace": "()",
    "pipe.Balance": (
        "(counts: 'Sequence[int]', costs: 'Sequence[float]', names: 'Sequence[str]', "
        "unit: \"Literal['seconds', 'bytes']\") -> 'None'"
    ),
    "pipe.Balance.table": "(self) -> 'str'",
    "pipe.balance_by_time": (
        "(partitions: 'int', module: 'nn.Sequential', *sample: 'Any', recompute: 'bool' = True, rounds: 'int' = 5, "
        "split_nested: 'bool' = False, **kwargs: 'Any') -> 'Balance'"
    ),
    "pipe.balance_by_bytes": (
        "(partitions: 'int', module: 'nn.Sequential', *sample: 'Any', param_scale: 'float' = 4.0, "
        "split_nested: 'bool' = False, **kwargs: 'Any') -> 'Balance'"
    ),
    "testing.count_recomputes": "() -> 'Iterator[Recomputes]'",
    "testing.saved_bytes": "() -> 'Iterator[SavedBytes]'",
    "testing.flops": "() -> 'Iterator[Flops]'",
    "testing.peak_bytes": (
        "(step: 'Callable[[], object]', device: 'torch.device | str | None' = None) -> 'int'"
    ),
    "testing.saved_by_line": "(step: 'Callable[[], object]') -> 'SavedByLine'",
    "testing.assert_transparent": (
        "(function: 'Function', *args: 'Any', modules: 'Sequence[nn.Module]' = (), **kwargs: 'Any') -> 'None'"
    ),
}


def named(path):
    found = torchckpt
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path):
    assert str(inspect.signature(named(path))) == SIGNATURES[path]


def test_checkpointing_has_these_members_and_no_other():
    assert [name for name in vars(torchckpt.Checkpointing) if not name.startswith("_")] == [
        "checkpoint",
        "recompute",
        "prefetch",
        "is_recomputed",
    ]
    assert isinstance(inspect.getattr_static(torchckpt.Checkpointing, "is_recomputed"), property)


def test_a_pipe_adds_these_members_to_a_module_and_no_other():
    members = ["stages", "forward", "step", "timeline", "plan", "report", "draw", "to", "cuda", "cpu", "xpu"]
    assert [name for name in vars(torchckpt.Pipe) if not name.startswith("_")] == members


def test_a_schedule_that_recomputes_ahead_adds_these_members_for_its_users_and_the_rest_for_the_runtime():
    added = [name for name in vars(distributed.RecomputeAhead) if not name.startswith("_")]
    hooks = ["running", "reaches", "ends", "computing", "recompute"]  # what the runtime calls
    assert added == ["timeline", "report", *hooks]


def test_handle_of_a_module_has_these_members_and_no_other():
    from torchckpt.regions.wrap.module import RegionHandle

    assert [name for name in vars(RegionHandle) if not name.startswith("_")] == ["remove"]


def test_handle_of_layers_has_these_members_and_no_other():
    from torchckpt.regions.wrap.layers import LayersHandle

    assert [name for name in vars(LayersHandle) if not name.startswith("_")] == ["remove"]


def test_every_public_function_is_documented():
    assert [path for path in SIGNATURES if not inspect.getdoc(named(path))] == []


def test_version_is_three_numbers():
    assert [part.isdigit() for part in torchckpt.__version__.split(".")] == [True, True, True]
