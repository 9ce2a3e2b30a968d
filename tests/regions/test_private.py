"""Each private name of torch's that regions use does what its public counterpart does."""
from __future__ import annotations

import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import TensorWeakRef

from tests.helpers import in_thread, leaf
from torchckpt.errors import CheckpointError
from torchckpt.regions import private


class Hooks:
    """A pair that writes down its calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def pack(self, tensor):
        self.events.append("pack")
        return tensor

    def unpack(self, tensor):
        self.events.append("unpack")
        return tensor


def backward_of_exp():
    leaf(3).exp().sum().backward()


def push_hooks_and_pop_hooks():
    public, ours = Hooks(), Hooks()
    with saved_tensors_hooks(public.pack, public.unpack):
        backward_of_exp()
    private.push_hooks(ours.pack, ours.unpack)
    backward_of_exp()
    private.pop_hooks()
    backward_of_exp()
    assert ours.events == public.events == ["pack", "unpack"]


def hooks_in_force():
    outer, inner = Hooks(), Hooks()
    assert private.hooks_in_force(False) is None
    with saved_tensors_hooks(outer.pack, outer.unpack):
        with saved_tensors_hooks(inner.pack, inner.unpack):
            assert private.hooks_in_force(False) == (inner.pack, inner.unpack)
        assert private.hooks_in_force(False) == (outer.pack, outer.unpack)
    assert private.hooks_in_force(False) is None


def hooks_entered_and_only_hooks():
    outer, inner = Hooks(), Hooks()
    pairs = [(one.pack, one.unpack) for one in (outer, inner)]
    with saved_tensors_hooks(*pairs[0]), saved_tensors_hooks(*pairs[1]):
        assert private.hooks_entered() == pairs
        with private.only_hooks(pairs[:1]):
            assert private.hooks_entered() == pairs[:1]
            backward_of_exp()
        assert private.hooks_entered() == pairs
    assert private.hooks_entered() == []
    assert (outer.events, inner.events) == (["pack", "unpack"], [])


def alive():
    x = leaf(3)
    public, ours = TensorWeakRef(x), weakref.ref(x)
    assert private.alive(ours) is public() is x
    kept = torch.zeros(3).set_(x.detach())
    y = x.exp()  # its node holds x
    ours = weakref.ref(x)
    del x, public
    assert private.alive(ours) is not None
    del y
    assert private.alive(ours) is None
    assert kept.numel() == 3


def set_grad_enabled():
    for enabled in (False, True):
        private.set_grad_enabled(enabled)
        assert torch.is_grad_enabled() is enabled


def compiler_of():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiler = private.compiler_of(compiled)
    assert torch.equal(compiler(lambda x: x * 2)(torch.ones(3)), torch.full((3,), 2.0))
    assert len(graphs) == 1
    assert private.compiler_of(lambda x: x) is None
    assert private.compiler_of(leaf) is None


def set_version():
    x = torch.zeros(3)
    y = x.exp_().detach()
    assert private.set_version(x, 5) is x
    assert (x._version, y._version) == (5, 5)


def apply_of():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = leaf(3)
    ours, theirs = private.apply_of(Double)(x), Double.apply(x)
    assert torch.equal(ours, theirs)
    assert type(ours.grad_fn) is type(theirs.grad_fn)
    ours.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def storage_key():
    x, other = torch.zeros(3), torch.zeros(3)
    alike = [x, x[1:], x.detach(), x.view(1, 3)]
    assert len({private.storage_key(tensor) for tensor in alike}) == 1
    assert {StorageWeakRef(tensor.untyped_storage()) for tensor in alike} == {StorageWeakRef(x.untyped_storage())}
    assert private.storage_key(other) != private.storage_key(x)
    assert private.storage_key(torch.eye(2).to_sparse()) is None


def alive_storage():
    tensor = torch.ones(3)
    storage = StorageWeakRef(tensor.untyped_storage())
    assert private.alive_storage(storage) is tensor.untyped_storage()
    del tensor
    assert private.alive_storage(storage) is None


def use_count():
    x = torch.zeros(3)
    assert private.use_count(x) == private.use_count(StorageWeakRef(x.untyped_storage())) == 1
    aliases = [x[1:], x.detach(), x.view(1, 3)]
    storage = x.untyped_storage()  # does not count
    assert private.use_count(x) == 1 + len(aliases)
    reference = StorageWeakRef(storage)
    del aliases
    assert private.use_count(x) == 1
    del x, storage
    assert reference.expired()


def negated():
    imaginary = torch.tensor([1 + 2j]).conj().imag
    x = torch.tensor([2.0])
    view = private.negated(x)
    assert view.is_neg() == imaginary.is_neg() is True
    assert torch.equal(view, imaginary)
    assert view.data_ptr() == x.data_ptr()


def modes_are_active():
    assert not private.modes_are_active()
    with torch.device("meta"):
        assert private.modes_are_active()
        assert torch.get_default_device() == torch.device("meta")
    assert not private.modes_are_active()
    torch.set_default_device("meta")
    assert private.modes_are_active()
    torch.set_default_device(None)
    assert not private.modes_are_active()


def functorch_is_active():
    seen = []
    assert not private.functorch_is_active()
    torch.vmap(lambda x: seen.append(private.functorch_is_active()) or x)(torch.zeros(2))
    torch.func.grad(lambda x: seen.append(private.functorch_is_active()) or x)(torch.zeros(()))
    torch.func.jvp(lambda x: seen.append(private.functorch_is_active()) or x, (torch.zeros(2),), (torch.zeros(2),))
    assert seen == [True, True, True]
    assert not private.functorch_is_active()


def outside_transforms():
    seen = []

    def inner(x):
        with private.outside_transforms():
            seen.append(private.functorch_is_active())
        seen.append(private.functorch_is_active())
        return x

    torch.vmap(torch.vmap(inner))(torch.zeros(2, 2))
    assert seen == [False, True]


def level_of_forward_ad():
    assert private.forward_ad is forward_ad
    levels = [private.forward_ad._current_level]
    with forward_ad.dual_level():
        levels.append(private.forward_ad._current_level)
    levels.append(private.forward_ad._current_level)
    assert [level >= 0 for level in levels] == [False, True, False]


def norm_layer():
    public = {layer for layer in vars(nn).values() if isinstance(layer, type) and issubclass(layer, private.norm_layer)}
    names = {f"{lazy}{kind}Norm{d}d" for lazy in ("", "Lazy") for kind in ("Batch", "Instance") for d in (1, 2, 3)}
    assert {layer.__name__ for layer in public} == {*names, "SyncBatchNorm"}
    for layer in (nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)):
        assert list(layer._buffers) == ["running_mean", "running_var", "num_batches_tracked"]


def batch_norm_layer():
    layers = {layer for layer in vars(nn).values() if isinstance(layer, type)}
    names = {layer.__name__ for layer in layers if issubclass(layer, private.batch_norm_layer)}
    assert names == {*(f"{lazy}BatchNorm{d}d" for lazy in ("", "Lazy") for d in (1, 2, 3)), "SyncBatchNorm"}


def graphs_of(function):
    """How many graphs Dynamo makes where eager code between compiled frames calls ``function``."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    eager = torch.compiler.disable(lambda x: function(x), recursive=False)
    torch.compile(lambda x: eager(x), backend=backend)(torch.zeros(2))
    torch._dynamo.reset()
    return len(graphs)


def keep_from_dynamo():
    def ours(x):
        def inner(x):
            return callee(x)

        return inner(x) * x.sin()

    def public(x):
        return callee(x) * x.sin()

    def callee(x):
        return x.exp()

    def other(x):
        return callee(x) * x.sin()

    private.keep_from_dynamo(ours)
    assert graphs_of(other) == 1
    assert graphs_of(torch.compiler.disable(public)) == 0
    assert graphs_of(ours) == 0
    assert graphs_of(ours) == 0  # torch._dynamo.reset() does not undo it


def dispatch_modes_are_active():
    assert not private.dispatch_modes_are_active()
    with FlopCounterMode(display=False):
        assert private.dispatch_modes_are_active()
    assert not private.dispatch_modes_are_active()


def function_modes():
    class Mode(TorchFunctionMode):
        pass

    assert private.function_modes() == []
    with torch.device("meta"), Mode():
        device, other = private.function_modes()
    assert isinstance(device, private.DeviceContext)
    assert isinstance(other, Mode)


def look_through():
    # Before torch 2.14 nobody asks.
    hooks_of_the_user = getattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks", lambda: None)

    def pack(tensor):
        return tensor

    private.look_through(pack)
    with saved_tensors_hooks(pack, pack):
        assert hooks_of_the_user() is None
    private.look_through(pack, users=(look_through, look_through))
    with saved_tensors_hooks(pack, pack):
        assert hooks_of_the_user() in (None, (look_through, look_through))


def kernels_allowed():
    def public():
        names = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
        attention = [getattr(torch.backends.cuda, f"{name}_enabled")() for name in names]
        return [*attention, torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled]

    before = private.kernels_allowed()
    assert before == public()
    for place in range(len(before)):
        others = [is_on != (place == other) for other, is_on in enumerate(before)]
        private.allow_kernels(others)
        try:
            assert private.kernels_allowed() == public() == others != before
        finally:
            private.allow_kernels(before)
    assert public() == before


def profiler_is_on():
    assert not private.profiler_is_on()
    with torch.autograd.profiler.profile():
        assert private.profiler_is_on()
        assert not in_thread(private.profiler_is_on)
    assert not private.profiler_is_on()


def frame_of_torch():
    found = []

    def function(x):
        found.append(private.frame_of_torch(private.hooks_in_force(True)[0]))
        return x.sin().cos()

    def pack(tensor):
        return tensor

    assert private.frame_of_torch(pack) is None
    torch.utils.checkpoint.checkpoint(function, leaf(3), use_reentrant=False).sum().backward()
    (frame, is_replayed), again = found
    assert not is_replayed
    assert again == (frame, True)


def without_selective_modes():
    def policy(_, operator, *args, **kwargs):
        seen.append(operator)
        return False

    seen = []
    selective, _ = torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)
    x, multiply = torch.ones(2, 2), torch.ops.aten.mm.default
    with FlopCounterMode(display=False) as around, selective, FlopCounterMode(display=False) as inside:
        torch.mm(x, x)
        with private.without_selective_modes():
            torch.mm(x, x)
        torch.mm(x, x)
    assert seen == [multiply, multiply]
    assert around.get_total_flops() == inside.get_total_flops() == 3 * 16


def torch_functions():
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            states.append(private.torch_functions_are_seen())
            return super().__torch_function__(func, types, args, kwargs or {})

    states, x = [], torch.zeros(1).as_subclass(Seen)
    assert private.torch_functions_are_seen()
    with private.with_torch_functions(False):
        x.sin()
        assert not states
        assert not private.torch_functions_are_seen()
        with private.with_torch_functions(True):
            x.sin()
    assert states == [True]


def autocast_is_on():
    assert not private.autocast_is_on()
    for kind in ("cpu", "cuda"):
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cpu" or torch.cuda.is_available()):
            assert private.autocast_is_on() == torch.is_autocast_enabled(kind)
            with torch.autocast(kind, enabled=False):
                assert not private.autocast_is_on()


def is_exporting():
    class Adds(nn.Module):
        def forward(self, x):
            return x + int(private.is_exporting())

    x = torch.zeros(1)
    assert private.is_exporting() is torch.compiler.is_exporting() is False
    assert torch.compile(Adds(), backend="eager", fullgraph=True)(x) == 0
    assert torch.export.export(Adds(), (x,), strict=False).module()(x) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        assert torch.jit.trace(Adds(), x)(x) == 1


def is_fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not private.is_fake()
    with FakeTensorMode():
        assert private.is_fake()
    assert not private.is_fake()


def selective_forward():
    forward, _ = torch.utils.checkpoint.create_selective_checkpoint_contexts([])
    assert type(forward) is private.caching_mode
    assert hasattr(forward, "respect_saved_tensors_hooks") is private.heeds_hooks


def mutation_is_allowed():
    assert not private.mutation_is_allowed()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert private.mutation_is_allowed()
    assert not private.mutation_is_allowed()


def compiler_stance():
    import torch._dynamo

    before = private.compiler_stance()
    with torch.compiler.set_stance("force_eager"):
        eager = private.compiler_stance()
    assert eager != before == private.compiler_stance()
    with private.use_stance(eager):
        assert private.compiler_stance() == eager
    assert private.compiler_stance() == before


def dispatch_mode():
    seen = []

    class Notes(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Notes():
        torch.zeros(2).sin()
    assert seen[-1] is torch.ops.aten.sin.default


def is_of_newest_node():
    x = leaf(3)
    y = x.exp()
    assert private.is_of_newest_node(y)
    z = y.sin()
    assert not private.is_of_newest_node(y)
    assert private.is_of_newest_node(z)
    assert not private.is_of_newest_node(x)


def newest_node():
    first, second = (leaf(3).exp().grad_fn for _ in range(2))
    assert private.newest_node() == private.number_of(second) > private.number_of(first)


def running_node():
    names = []
    y = leaf(3).exp()
    y.register_hook(lambda grad: names.append(private.running_node().name()))
    y.sum().backward()
    assert names == [y.grad_fn.name()]
    assert private.running_node() is None


def kept_by_policies():
    def region(x):
        return torch.mm(x, x).sin()

    def policy(context, operator, *args, **kwargs):
        return operator is torch.ops.aten.mm.default

    kept, handles = [], weakref.WeakSet()

    def pack(tensor):
        kept.append(tensor.shape)
        handle = Hooks()
        handles.add(handle)
        return handle

    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)

    with private.kept_by_policies(pack):
        y = torch.utils.checkpoint.checkpoint(region, leaf(3, 3), use_reentrant=False, context_fn=contexts)
    assert (kept, len(handles)) == ([(3, 3)], 1)
    y.sum().backward()
    del y
    assert len(handles) == 0
    torch.utils.checkpoint.checkpoint(region, leaf(3, 3), use_reentrant=False, context_fn=contexts)
    assert len(kept) == 1


class Operators(private.DispatchMode):
    """Counts what it sees."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def put_under_modes():
    """Its mode sees what is done, whatever modes above it are left in the meantime."""
    x, above, below, public = torch.ones(2), Operators(), Operators(), Operators()
    with public:
        x.add(1)
        x.add(1)
    with above:
        private.put_under_modes(below)
        x.add(1)
    x.add(1)
    private.take_from_modes(below)
    x.add(1)
    private.take_from_modes(below)
    assert (above.count, below.count, public.count) == (1, 2, 2)


def left_in_a_compiled_call():
    """A mode that cannot be left there is left later. The public form leaves it in the block where it was entered."""
    below = Operators()
    private.put_under_modes(below)

    @torch.compile(backend="eager")
    def leave(x):
        torch._dynamo.graph_break()
        private.take_from_modes(below)
        return x

    def compile_wrapper():
        return private.keys_are_put_back()

    assert not compile_wrapper()
    leave(torch.ones(2))
    torch.ones(2)
    private.leave_modes()
    assert not private.dispatch_modes_are_active()


def left_in_inference_mode():
    """A mode that cannot be left there is left later. The public form leaves it in the block where it was entered."""
    below = Operators()
    private.put_under_modes(below)
    with torch.inference_mode():
        private.take_from_modes(below)
    torch.ones(2)
    private.leave_modes()
    torch.ones(2)
    assert below.count == 1


def after_backward():
    events = []
    x = leaf(3)
    y = x * 2
    y.register_hook(lambda _: private.after_backward(lambda: events.append("all is done")))
    x.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    y.sum().backward()
    assert events == ["gradient", "all is done"]


def packed_by():
    x = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: ("packed", tensor), lambda packed: packed[1]):
        y = x.exp() * 2 * x
        z = torch.stack([y.sin(), y.cos()])
    assert [word for word, _ in private.packed_by(y.grad_fn)] == ["packed"] * 2
    (sine, _), _ = z.grad_fn.next_functions
    ((_, saved),) = private.packed_by(sine)
    assert torch.equal(saved, y)
    z.sum().backward()
    assert list(private.packed_by(sine)) == [None]  # it is released


def parametrized():
    layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Tanh())
    with parametrize.cached(), parametrize.cached():
        weight = layer.weight
        assert (private.parametrized["_cache_enabled"], [*private.parametrized["_cache"].values()]) == (2, [weight])
    assert (private.parametrized["_cache_enabled"], private.parametrized["_cache"]) == (0, {})


def settings_of_torch():
    assert private.settings_of_torch["_checkpoint_debug_enabled"] is None
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        assert private.settings_of_torch["_checkpoint_debug_enabled"] is True
    assert private.settings_of_torch["_checkpoint_debug_enabled"] is None


COUNTERPARTS = {
    "DeviceContext": function_modes,
    "DispatchMode": dispatch_mode,
    "after_backward": after_backward,
    "alive": alive,
    "alive_storage": alive_storage,
    "allow_kernels": kernels_allowed,
    "apply_of": apply_of,
    "autocast_is_on": autocast_is_on,
    "batch_norm_layer": batch_norm_layer,
    "caching_mode": selective_forward,
    "compiler_of": compiler_of,
    "compiler_stance": compiler_stance,
    "dispatch_modes_are_active": dispatch_modes_are_active,
    "forward_ad": level_of_forward_ad,
    "frame_of_torch": frame_of_torch,
    "function_modes": function_modes,
    "functorch_is_active": functorch_is_active,
    "heeds_hooks": selective_forward,
    "hooks_entered": hooks_entered_and_only_hooks,
    "hooks_in_force": hooks_in_force,
    "is_exporting": is_exporting,
    "is_fake": is_fake,
    "is_of_newest_node": is_of_newest_node,
    "keep_from_dynamo": keep_from_dynamo,
    "kept_by_policies": kept_by_policies,
    "kernels_allowed": kernels_allowed,
    "keys_are_put_back": left_in_a_compiled_call,
    "leave_modes": left_in_inference_mode,
    "look_through": look_through,
    "modes_are_active": modes_are_active,
    "mutation_is_allowed": mutation_is_allowed,
    "negated": negated,
    "newest_node": newest_node,
    "norm_layer": norm_layer,
    "number_of": newest_node,
    "only_hooks": hooks_entered_and_only_hooks,
    "outside_transforms": outside_transforms,
    "packed_by": packed_by,
    "parametrized": parametrized,
    "pop_hooks": push_hooks_and_pop_hooks,
    "profiler_is_on": profiler_is_on,
    "push_hooks": push_hooks_and_pop_hooks,
    "put_under_modes": put_under_modes,
    "running_node": running_node,
    "set_grad_enabled": set_grad_enabled,
    "set_version": set_version,
    "settings_of_torch": settings_of_torch,
    "storage_key": storage_key,
    "take_from_modes": put_under_modes,
    "torch_functions_are_seen": torch_functions,
    "use_count": use_count,
    "use_stance": compiler_stance,
    "with_torch_functions": torch_functions,
    "without_selective_modes": without_selective_modes,
}


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("name", private.__all__)
def test_private_name_does_what_its_public_counterpart_does(name):
    COUNTERPARTS[name]()


def test_torch_without_a_private_name_is_an_error_that_says_so(monkeypatch):
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    monkeypatch.delitem(sys.modules, "torchckpt.regions.private")
    with pytest.raises(CheckpointError) as caught:
        import torchckpt.regions.private  # noqa: F401
    rule, received, works = str(caught.value).splitlines()
    assert rule == "torchckpt needs something of torchckpt/regions/private.py that this torch does not have"
    assert received.startswith("  received: cannot import name '_len_torch_function_stack' from 'torch._C'")
    assert works == "  works:    pip install 'torch>=2.11', or the release of torchckpt that was made for this torch"


def test_every_private_name_has_a_counterpart():
    assert list(COUNTERPARTS) == sorted(private.__all__)
