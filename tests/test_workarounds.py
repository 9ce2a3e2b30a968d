"""What gets around something in torch, and is to leave the package when torch has mended it.

A row of ``WORKAROUNDS`` fails on a release that has mended it. It then moves to ``UNTIL``, with that release. A row of
``UNTIL`` fails when no supported release needs the workaround: it is to be removed.
"""
from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import reduce
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, nop
from torch import nn
from torch._subclasses import FakeTensorMode

from tests.helpers import leaf
from tests.scripts import run
from torchckpt.features import TESTED, release_of

UNTIL = {
    "torchckpt.graph.private.trace:_pass_notes_on": (2, 12),
    "torchckpt.graph.private.trace:GRADIENTS_STAY": (2, 13),
    "torchckpt.regions.private:is_exporting": (2, 12),
    "torchckpt.tensors:_ATTENTION": (2, 15),
}
"""By workaround, the first release of torch that does without it."""


def operators_of(function, *inputs):
    """The operators that AOTAutograd traces."""
    found = []

    def compiler(module, inputs):
        found.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    aot_function(function, fw_compiler=compiler, bw_compiler=nop)(*inputs)
    return found


def a_module_without_memory_cannot_be_converted():
    """swap_tensors refuses the weak references of FakeTensorMode: pytorch/pytorch#178584."""
    with FakeTensorMode(), pytest.raises(RuntimeError, match="Couldn't swap"):
        nn.Linear(2, 2).bfloat16()


def a_random_operation_without_readers_is_dropped():
    """pytorch/pytorch#147171."""

    def draw(x):
        torch.rand(2)
        return x * 2

    states = []
    for call in (draw, torch.compile(draw, backend="aot_eager")):
        torch.manual_seed(0)
        call(torch.ones(2))
        states.append(torch.get_rng_state())
    torch._dynamo.reset()
    assert not torch.equal(*states)


def a_trace_decomposes_what_eager_runs_as_one_kernel():
    found = operators_of(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), torch.ones(1, 1, 4, 4))
    assert len(found) > 1


def a_trace_casts_a_weight_at_each_use():
    """Eager has a cache of casts."""
    with torch.autocast("cpu", torch.bfloat16):
        found = operators_of(lambda weight: weight @ weight, leaf(2, 2))
    assert found.count(torch.ops.aten._to_copy.default) == 2


def a_traced_backward_cannot_retain_its_graph():
    """It was compiled with donated buffers: pytorch/pytorch#139669."""
    traced, x = aot_function(lambda x: x.sin().exp().sum(), fw_compiler=nop, bw_compiler=nop), leaf(2)
    traced(x).backward()
    with pytest.raises(RuntimeError, match="non-empty donated buffers"):
        traced(x).backward(retain_graph=True)


def a_traced_backward_makes_zeros_of_missing_gradients():
    """pytorch/pytorch#186355."""
    read, unread = leaf(2), leaf(2)
    outputs = aot_function(lambda x, y: (x.sin(), y.sin()), fw_compiler=nop, bw_compiler=nop)(read, unread)
    outputs[0].sum().backward()
    assert unread.grad is not None


def a_compiled_call_does_not_see_that_inputs_overlap():
    """pytorch/pytorch#139789."""

    def change(x, y):
        x.mul_(2)
        return x + y

    compiled, overlapping = torch.compile(change, backend="aot_eager"), [torch.ones(8), torch.ones(8)]
    compiled(torch.ones(4), torch.ones(4))
    results = [call(base[:4], base[2:6]) for call, base in zip((change, compiled), overlapping)]
    torch._dynamo.reset()
    assert not torch.equal(*results)


def a_traced_dropout_rounds_its_scale_otherwise():
    x, masked = torch.rand(1000), []
    for dropout in (lambda: F.dropout(x, 0.15), lambda: torch.native_dropout(x, 0.15, True)[0]):
        torch.manual_seed(0)
        masked.append(dropout())
    assert not torch.equal(*masked)


def fake_batch_norm_lies_as_its_input_does():
    """torch/_decomp/decompositions.py."""

    def norm(x):
        return torch.native_batch_norm(x.transpose(1, 2), None, None, None, None, True, 0.1, 1e-5)[0].stride()

    with FakeTensorMode():
        fake = norm(torch.randn(2, 3, 4))
    assert fake != norm(torch.randn(2, 3, 4))


def torch_compiler_imports_dynamo_to_disable_it():
    program = "import sys, torch; torch.compiler.disable(lambda: 0); print('torch._dynamo' in sys.modules)"
    assert run("-c", program).stdout == "True\n"


def a_mode_imports_dynamo_at_its_first_operator():
    program = (
        "import sys, torch; from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Mode(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))\n"
        "with Mode(): torch.ones(1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run("-c", program).stdout == "True\n"


@contextmanager
def two_ranks():
    """A fake process group, and a mesh of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook


def dtensor_runs_an_operator_with_global_shapes():
    """To learn the shape of its result, the first time: torch/distributed/tensor/_sharding_prop.py."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from torchckpt.costs.private.mesh import TorchDispatchMode

    shapes = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            shapes.extend(x.shape[0] for x in args if isinstance(x, torch.Tensor) and "asinh" in str(operator))
            return operator(*args, **(kwargs or {}))

    with two_ranks() as mesh, Seen():
        distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]).asinh()
    assert sorted(shapes) == [3, 6]


def init_process_group_leaves_a_hook():
    """It wraps sys.excepthook each time: torch/distributed/distributed_c10d.py."""
    before = sys.excepthook
    with two_ranks():
        assert sys.excepthook is not before


def a_mesh_needs_values_of_tensors():
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.distributed.device_mesh import init_device_mesh

    with two_ranks(), FakeTensorMode(), pytest.raises(DataDependentOutputException):
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def a_mesh_of_the_cpu_has_no_all_to_all():
    """It gathers and cuts instead: torch/distributed/tensor/_collective_utils.py."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    with two_ranks() as mesh, CommDebugMode() as counted:
        distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
    assert [str(operator) for operator in counted.get_comm_counts()] != ["_dtensor.shard_dim_alltoall"]


def a_node_of_cpus_has_one_device():
    from torch.distributed.tensor import _collective_utils

    assert _collective_utils._mesh_resources.num_devices_per_host("cpu") == 1


WORKAROUNDS = {
    "torchckpt.costs.private.mesh:_Integers": a_mesh_needs_values_of_tensors,
    "torchckpt.costs.private.mesh:_all_to_all": a_mesh_of_the_cpu_has_no_all_to_all,
    "torchckpt.costs.private.mesh:_unseen": dtensor_runs_an_operator_with_global_shapes,
    "torchckpt.costs.private.mesh:ranks_without_processes": init_process_group_leaves_a_hook,
    "torchckpt.costs.private.mesh:without_values": a_node_of_cpus_has_one_device,
    "torchckpt.costs.private:unallocated": a_module_without_memory_cannot_be_converted,
    "torchckpt.graph.private.dynamo:_random_operations_kept": a_random_operation_without_readers_is_dropped,
    "torchckpt.graph.private.layouts:eager_layouts": fake_batch_norm_lies_as_its_input_does,
    "torchckpt.graph.private.surroundings:casting_once": a_trace_casts_a_weight_at_each_use,
    "torchckpt.graph.private.surroundings:eager_kernels": a_trace_decomposes_what_eager_runs_as_one_kernel,
    "torchckpt.graph.private.trace:retainable": a_traced_backward_cannot_retain_its_graph,
    "torchckpt.graph.run.backend:_SameOverlaps": a_compiled_call_does_not_see_that_inputs_overlap,
    "torchckpt.graph.step.repeat:as_eager_runs": a_traced_dropout_rounds_its_scale_otherwise,
    "torchckpt.graph.step.halves:Halves": a_traced_backward_makes_zeros_of_missing_gradients,
    "torchckpt.regions.private:DispatchMode": a_mode_imports_dynamo_at_its_first_operator,
    "torchckpt.regions.private:keep_from_dynamo": torch_compiler_imports_dynamo_to_disable_it,
}
"""By workaround, what torch does without it."""


@pytest.mark.parametrize("workaround", WORKAROUNDS)
def test_torch_needs_it(workaround):
    WORKAROUNDS[workaround]()


@pytest.mark.parametrize("workaround", UNTIL)
def test_a_supported_release_needs_it(workaround):
    assert release_of(TESTED[0]) < UNTIL[workaround]


@pytest.mark.parametrize("workaround", [*UNTIL, *WORKAROUNDS])
def test_it_stands_where_the_tables_say(workaround):
    module, _, name = workaround.partition(":")
    reduce(getattr, name.split("."), import_module(module))
