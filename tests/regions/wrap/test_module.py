"""checkpoint_module: every call of a module is a region, and nothing else about the module changes."""
from __future__ import annotations

import copy
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn

from tests.regions.modules import Block, Model, assert_recomputes_to_equal, checkpointed, step
from torchckpt import checkpoint_module
from torchckpt.errors import ArgumentError
from torchckpt.testing import count_recomputes, saved_bytes


@pytest.fixture
def model():
    return Model()


# nothing else changes -------------------------------------------------------------------------------------------------


def test_steps_are_equal_and_every_call_is_recomputed_once(model):
    expected, none = step(copy.deepcopy(model))
    for layer in model.layers:
        checkpoint_module(layer)
    assert none == 0
    assert_recomputes_to_equal(model, expected, total=2)
    model.train()
    assert step(model)[1] == 2


def test_names_keys_classes_and_repr_are_as_before(model):
    before = [
        list(model.state_dict()), [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()], repr(model),
    ]  # fmt: skip
    block = checkpointed(model.layers[0])
    after = [
        list(model.state_dict()), [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()], repr(model),
    ]  # fmt: skip
    assert after == before
    assert isinstance(block, Block)
    assert model.layers[0] is block
    names = type(block).__name__, type(block).__qualname__, type(block).__module__
    assert names == ("Block", "Block", "tests.regions.modules")
    assert type(block).__doc__ == "A block."


def test_signature_name_and_docstring_of_the_forward_are_as_before():
    block = Block()
    signature = inspect.signature(block.forward)
    checkpoint_module(block)
    assert inspect.signature(block.forward) == signature
    assert (block.forward.__name__, block.forward.__doc__) == ("forward", "Its forward.")


def test_two_modules_of_one_class_have_one_class_again():
    assert type(checkpointed(Block())) is type(checkpointed(Block()))
    assert type(checkpointed(Block())) is not type(checkpointed(nn.Linear(4, 4)))


def test_only_the_boundary_is_saved():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    checkpoint_module(model)
    with saved_bytes() as saved:
        output = model(x)
    assert saved.total == x.nbytes
    del output


def test_sequential_is_a_module_like_any_other():
    model = nn.Sequential(Block(), nn.Tanh(), Block())
    expected, _ = step(copy.deepcopy(model))
    checkpoint_module(model)
    assert len(model) == 3
    assert isinstance(model[0], Block)
    assert_recomputes_to_equal(model, expected)
    assert_recomputes_to_equal(checkpointed(model[0]), step(copy.deepcopy(model)[0])[0])


def test_keyword_arguments_and_options_reach_the_region():
    block, seen = Block(), []

    def contexts():
        seen.append("contexts")
        return torch.enable_grad(), torch.enable_grad()

    expected, _ = step(copy.deepcopy(block), scale=3.0)
    checkpoint_module(block, context_fn=contexts, determinism_check="values", early_stop=False)
    received, recomputes = step(block, scale=3.0)
    assert all(map(torch.equal, received, expected))
    assert (recomputes, seen) == (1, ["contexts"])


def test_without_random_state_the_dropout_is_another():
    module = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
    checkpoint_module(module, preserve_rng_state=False, determinism_check="values")
    with pytest.raises(RuntimeError, match=r"region 'Sequential\.forward'"):
        module(torch.randn(64, requires_grad=True)).sum().backward()


def test_named_generator_is_replayed():
    generator = torch.Generator()

    class Noisy(nn.Module):
        def forward(self, x):
            return (x * torch.rand(x.shape, generator=generator)).sin()

    module = checkpointed(Noisy(), generators=[generator], determinism_check="values")
    module(torch.randn(64, requires_grad=True)).sum().backward()


def test_under_no_grad_the_forward_is_plain(model):
    checkpoint_module(model)
    with torch.no_grad(), count_recomputes() as recomputes:
        assert not model(torch.randn(3, 4)).requires_grad
    assert recomputes.total == 0


def test_method_that_calls_forward_itself_enters_the_region():
    class Called(Block):
        def twice(self, x):
            return self.forward(self.forward(x))

    block = checkpointed(Called())
    with count_recomputes() as recomputes:
        block.twice(torch.randn(3, 4)).sum().backward()
    assert recomputes.by_region == {f"'{Called.__qualname__}.forward'": 2}


# hooks ----------------------------------------------------------------------------------------------------------------


def test_hooks_of_the_module_fire_once_and_those_of_a_child_in_the_replay_too():
    block, fired = Block(), []
    for name, module in (("block", block), ("linear", block.linear)):
        module.register_forward_pre_hook(lambda *_, name=name: fired.append(f"{name} before"))
        module.register_forward_hook(lambda *_, name=name: fired.append(f"{name} after"))
        module.register_full_backward_hook(lambda *_, name=name: fired.append(f"{name} backward"))
    checkpoint_module(block)
    loss = block(torch.randn(3, 4, requires_grad=True)).sum()
    assert fired == ["block before", "linear before", "linear after", "block after"]
    fired.clear()
    loss.backward()
    assert fired == ["linear before", "linear after", "linear backward", "block backward"]


def test_hook_that_changes_the_output_does_so_once():
    block = nn.Linear(4, 4)
    block.register_forward_hook(lambda module, args, output: output * 2)
    expected, _ = step(copy.deepcopy(block))
    assert_recomputes_to_equal(checkpointed(block), expected, total=1)


def test_hook_registered_later_fires():
    block, fired = checkpointed(Block()), []
    handle = block.register_forward_hook(lambda *_: fired.append(True))
    block(torch.randn(3, 4))
    handle.remove()
    block(torch.randn(3, 4))
    assert fired == [True]


def test_gradient_hook_of_a_parameter_fires_once():
    block, fired = checkpointed(Block()), []
    block.linear.weight.register_hook(lambda grad: fired.append("tensor"))
    block.linear.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
    block(torch.randn(3, 4)).sum().backward()
    assert fired == ["tensor", "accumulated"]


# the handle -----------------------------------------------------------------------------------------------------------


def test_remove_makes_the_module_plain_again(model):
    block = model.layers[0]
    handle = checkpoint_module(block)
    assert step(model)[1] == 1
    handle.remove()
    assert type(block) is Block
    assert "_torchckpt_options" not in vars(block)
    assert step(model)[1] == 0
    handle.remove()
    assert type(block) is Block


def test_handle_is_a_context_manager(model):
    with checkpoint_module(model) as handle:
        assert step(model)[1] == 1
    assert step(model)[1] == 0
    assert type(handle).__name__ == "RegionHandle"
    with pytest.raises(ValueError, match="the pump is off"), checkpoint_module(model):
        raise ValueError("the pump is off")
    assert type(model) is Model


def test_removed_module_can_be_checkpointed_again(model):
    checkpoint_module(model).remove()
    checkpoint_module(model)
    assert step(model)[1] == 1


def test_handle_that_was_removed_does_not_undo_a_later_call(model):
    first = checkpoint_module(model)
    first.remove()
    checkpoint_module(model)
    first.remove()
    assert step(model)[1] == 1


def test_remove_between_forward_and_backward_leaves_the_region(model):
    handle = checkpoint_module(model)
    loss = model(torch.randn(3, 4)).sum()
    handle.remove()
    with count_recomputes() as recomputes:
        loss.backward()
    assert recomputes.total == 1


def test_handle_holds_no_copy_of_a_dead_module():
    model = checkpointed(Model())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# errors ---------------------------------------------------------------------------------------------------------------


def error_of(module) -> str:
    with pytest.raises(ArgumentError) as caught:
        checkpoint_module(module)
    return str(caught.value)


def test_not_a_module_is_an_error():
    assert error_of(torch.sin) == (
        "checkpoint_module: the module is not an nn.Module\n"
        "  received: builtin_function_or_method\n"
        "  works:    for layer in model.layers: checkpoint_module(layer); or checkpoint(function, x)"
    )


def test_twice_is_an_error(model):
    checkpoint_module(model)
    assert error_of(model) == (
        "checkpoint_module: the module is checkpointed already\n"
        "  received: Model, checkpointed already\n"
        "  works:    handle.remove() first; where it is a copy, before it is copied"
    )


def test_copy_of_a_checkpointed_module_is_checkpointed_already(model):
    handle = checkpoint_module(model)
    copied = copy.deepcopy(model)
    handle.remove()
    assert "the module is checkpointed already" in error_of(copied)  # which that handle does not know
    assert "where it is a copy, before it is copied" in error_of(copied)
    checkpoint_module(copy.deepcopy(model))


FORWARD_ON_THE_INSTANCE = (
    "checkpoint_module: the forward is not a method of the module's class\n"
    "  received: {}, whose forward is set on the instance or is a script\n"
    "  works:    checkpoint(module, x) at the call"
)


def test_forward_that_is_set_on_the_instance_is_an_error(model):
    model.forward = lambda x: x
    assert error_of(model) == FORWARD_ON_THE_INSTANCE.format("Model")
    assert type(model) is Model


def test_script_is_an_error():
    assert error_of(torch.jit.script(nn.Linear(4, 4))) == FORWARD_ON_THE_INSTANCE.format("RecursiveScriptModule")


def test_wrong_option_is_an_error_and_leaves_the_module_plain(model):
    with pytest.raises(ArgumentError, match=r"^checkpoint_module: early_stop is not a bool\n  received: 1 \(int\)"):
        checkpoint_module(model, early_stop=1)
    assert type(model) is Model
