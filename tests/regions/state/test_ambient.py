"""Settings of the thread: a replay finds those of its forward, and puts back what it found."""
from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers import Block, assert_equal, assert_program_transparent, by_hand, in_thread, leaf, plain
from tests.settings import default_dtype
from torchckpt import Checkpointing, checkpoint, is_checkpointing, is_recomputing
from torchckpt.testing import count_recomputes


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def without_onednn():
    """``torch.backends.mkldnn.flags`` also sets what belongs to other devices, and warns."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def settings(device):
    """What user code can see of them."""
    return {
        "autocast": torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
        "autocast on the CPU": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "dtype of a new tensor": torch.empty(0, device="cpu").dtype,
        "default device": torch.get_default_device(),
        "device of a new tensor": torch.empty(0).device,
        "inference mode": torch.is_inference_mode_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "attention": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        "libraries": [torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled],
    }


SETTINGS = {
    "none": lambda device: nullcontext(),
    "autocast": lambda device: torch.autocast(device.type, torch.bfloat16),
    "autocast without a cache": lambda device: torch.autocast(device.type, torch.bfloat16, cache_enabled=False),
    "autocast off": lambda device: torch.autocast(device.type, enabled=False),
    "autocast off, without a cache": lambda device: torch.autocast(device.type, enabled=False, cache_enabled=False),
    "autocast to float16": lambda device: torch.autocast(device.type, torch.float16),
    "default dtype": lambda device: default_dtype(torch.float64),
    "default device": lambda device: default_device("meta"),
    "device context": lambda device: torch.device("meta"),
    "attention": lambda device: sdpa_kernel(SDPBackend.MATH),
    "oneDNN": lambda device: without_onednn(),
    "cuDNN": lambda device: torch.backends.cudnn.flags(enabled=False),
}
EVERY = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


class Scene:
    """A region that writes down the settings that its function runs under."""

    def __init__(self, device) -> None:
        self.device, self.seen = device, []
        self.region = Checkpointing(self._function, leaf(3, 4, device=device))

    def _function(self, x):
        self.seen.append(settings(self.device))
        return x.exp().sin()

    def forward(self):
        self.loss = self.region.checkpoint().sum()

    def assert_seen_twice_alike(self):
        assert len(self.seen) == 2
        assert self.seen[1] == self.seen[0]


@EVERY
def test_setting_around_the_forward_only(device, setting):
    scene, before = Scene(device), settings(device)
    with setting(device):
        within = settings(device)
        scene.forward()
    scene.loss.backward()
    scene.assert_seen_twice_alike()
    assert scene.seen[0] == within
    assert settings(device) == before


@EVERY
def test_setting_around_the_backward_only(device, setting):
    scene, before = Scene(device), settings(device)
    scene.forward()
    with setting(device):
        within = settings(device)
        scene.region.prefetch()
        assert settings(device) == within
    scene.assert_seen_twice_alike()
    assert scene.seen[0] == before


@EVERY
def test_setting_around_both(device, setting):
    scene = Scene(device)
    with setting(device):
        scene.forward()
        scene.region.prefetch()
    scene.assert_seen_twice_alike()


@EVERY
def test_setting_in_the_thread_of_the_forward_only(device, setting):
    scene, before = Scene(device), settings(device)

    def forward():
        with setting(device):
            scene.forward()

    in_thread(forward)
    scene.loss.backward()
    scene.assert_seen_twice_alike()
    assert settings(device) == before


@EVERY
def test_setting_of_a_forward_whose_backward_is_in_another_thread(device, setting):
    scene = Scene(device)
    with setting(device):
        scene.forward()
    in_thread(scene.loss.backward)
    scene.assert_seen_twice_alike()


@EVERY
def test_setting_is_put_back_when_the_replay_raises(device, setting):
    def function(x):
        if is_recomputing():
            raise KeyError("in the replay")
        return x.exp()

    before = settings(device)
    with setting(device):
        loss = checkpoint(function, leaf(3, device=device)).sum()
    with pytest.raises(KeyError):
        loss.backward()
    assert settings(device) == before


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_is_computed_by_the_kernel_of_the_forward(backend):
    x, before = leaf(2, 4, 8, 16), torch.nn.attention._cur_sdpa_kernel_backends()

    def gradient_of(call):
        with sdpa_kernel(backend):
            y = call(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x).sin(), x)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(gradient_of(checkpoint), gradient_of(plain))
    assert torch.nn.attention._cur_sdpa_kernel_backends() == before


def test_all_settings_at_once(device):
    scene = Scene(device)
    with ExitStack() as stack:
        for name in ("autocast without a cache", "default dtype", "device context"):
            stack.enter_context(SETTINGS[name](device))
        scene.forward()
    with torch.autocast(device.type, torch.float16), torch.device(device):
        scene.loss.backward()
    scene.assert_seen_twice_alike()


# autocast -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_enabled", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_the_call(call, device, dtype, cache_enabled):
    block = Block().to(device)

    def program(call, x):
        with torch.autocast(device.type, dtype, cache_enabled=cache_enabled):
            return call(block, x)

    received = assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])
    assert received.outputs.dtype == dtype


@pytest.mark.parametrize("cache_enabled", [True, False], ids=["cache", "no cache"])
def test_autocast_inside_the_function(call, device, cache_enabled):
    block = Block().to(device)

    def program(call, x):
        def function(x):
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache_enabled):
                return block(x)

        return call(lambda x: function(x).float().exp(), x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


def test_autocast_switched_off_inside_the_function(call, device):
    block, other = Block().to(device), Block().to(device)

    def program(call, x):
        def function(x):
            with torch.autocast(device.type, enabled=False):
                hidden = block(x)
            return other(hidden)

        with torch.autocast(device.type, torch.bfloat16):
            return call(function, x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block, other])


@pytest.mark.parametrize("cache_enabled", [True, False], ids=["cache", "no cache"])
def test_weights_in_the_cache_of_autocast_before_the_region(call, device, cache_enabled):
    block = Block().to(device)

    def program(call, x):
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache_enabled):
            return call(block, block(x)) + call(block, x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


def test_backward_inside_autocast(call, device):
    block, x = Block().to(device), leaf(3, 4, device=device)

    def gradients_of(call):
        torch.manual_seed(1)
        with torch.autocast(device.type, torch.bfloat16):
            first = torch.autograd.grad(call(block, x).sum(), [x, *block.parameters()])
            second = torch.autograd.grad(call(block, x).sum(), [x, *block.parameters()])
        return first, second

    assert_equal(gradients_of(call), gradients_of(plain))


def test_a_replay_leaves_the_casts_of_weights_to_the_autocast_around_its_backward(call, device):
    """On an accelerator it runs in another thread, in which no autocast was entered before."""
    block, x = torch.nn.Linear(4, 4).to(device), leaf(3, 4, device=device)

    def cast():
        return block(x).grad_fn.next_functions[0][0]

    with torch.autocast(device.type, torch.bfloat16):
        before = cast()
        with torch.autocast(device.type, enabled=False, cache_enabled=False):
            y = call(lambda x: x.sin().sin(), x)
        y.sum().backward()
        assert cast() is before
    with torch.autocast(device.type, torch.bfloat16):
        y = call(block, x)
    y.sum().backward()
    with torch.autocast(device.type, torch.bfloat16):
        assert cast() is not before


def test_autocast_in_a_worker_thread(call, device):
    block = Block().to(device)

    def program(call, x):
        def forward():
            with torch.autocast(device.type, torch.bfloat16):
                return call(block, x)

        return in_thread(forward)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


def test_autocast_of_nested_regions(device):
    inner, outer = Block().to(device), Block().to(device)

    def program(call, x):
        def function(x):
            with torch.autocast(device.type, torch.bfloat16):
                hidden = call(inner, x)
            return outer(hidden.float()).exp()

        return call(function, x)

    assert_program_transparent(checkpoint, program, leaf(3, 4, device=device), modules=[inner, outer])


# default device and dtype ---------------------------------------------------------------------------------------------


def test_tensors_made_inside_take_the_default_dtype_of_the_forward(call, device):
    def program(call, x):
        with default_dtype(torch.float64):
            return call(lambda x: (x * torch.ones(4, device=device)).exp(), x)

    received = assert_program_transparent(call, program, leaf(3, 4, device=device))
    assert received.outputs.dtype == torch.float64


def test_tensors_made_inside_take_the_device_context_of_the_forward(call, device):
    def program(call, x):
        with torch.device(device):
            return call(lambda x: (x * torch.rand(4)).exp(), x)

    assert_program_transparent(call, program, leaf(3, 4, device=device))


def test_backward_under_a_device_context_makes_no_tensors_there(call, device):
    x = leaf(3, 4, device=device)
    loss = call(lambda x: (x * torch.ones(4).to(device)).exp().sin(), x).sum()
    with torch.device("meta"):
        loss.backward()
    assert x.grad.device == x.device


# gradients off --------------------------------------------------------------------------------------------------------


OFF = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])


@OFF
@pytest.mark.parametrize("call", [checkpoint, by_hand], ids=["checkpoint", "by_hand"])
def test_call_where_gradients_are_off_is_the_plain_call(call, device, mode):
    block, x, flags = Block().to(device), leaf(3, 4, device=device), []

    def function(x):
        flags.append((is_checkpointing(), is_recomputing()))
        return block(x)

    def output_of(call):
        torch.manual_seed(1)
        with mode():
            return call(function, x)

    with count_recomputes() as recomputes:
        output = output_of(call)
    assert_equal(output, output_of(plain))
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)
    assert recomputes.total == 0
    assert flags == [(False, False), (False, False)]


def test_gradients_switched_off_inside_the_function(call, device):
    block = Block().to(device)

    def function(x):
        with torch.no_grad():
            mask = block(x) > 0
        return block(x) * mask

    def program(call, x):
        return call(function, x)

    assert_program_transparent(call, program, leaf(3, 4, device=device), modules=[block])


def test_gradients_switched_on_inside_a_call_where_they_are_off(device):
    x = leaf(3, device=device)

    def function(x):
        with torch.enable_grad():
            return x.exp()

    with torch.no_grad():
        output = checkpoint(function, x)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], x.exp())


def test_inference_tensor_as_an_input(call, device):
    block, x = Block().to(device), leaf(3, 4, device=device)
    with torch.inference_mode():
        mask = torch.ones(4, device=device)

    def gradients_of(call):
        torch.manual_seed(1)
        output = call(lambda x, mask: (block(x) * mask.sum().item()).exp(), x, mask)
        return torch.autograd.grad(output.sum(), [x, *block.parameters()])

    assert_equal(gradients_of(call), gradients_of(plain))


class Doubled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.Tensor.sin else result


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_subclass_sees_the_functions_of_a_replay_as_those_of_its_forward(is_seen):
    """The backward of a subclass runs unseen by it."""
    gradients = []
    for call in (plain, checkpoint):
        x = torch.ones(4).as_subclass(Doubled).requires_grad_()
        with nullcontext() if is_seen else torch._C.DisableTorchFunctionSubclass():
            loss = call(lambda x: x.sin().exp(), x).sum()
        loss.backward() if is_seen else torch.autograd.backward(loss.as_subclass(torch.Tensor))
        gradients.append(x.grad.as_subclass(torch.Tensor))
    assert torch.equal(*gradients)
