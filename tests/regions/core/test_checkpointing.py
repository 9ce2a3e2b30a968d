"""The pair by hand, checkpoint() and recompute(outputs): who comes when, and what a wrong order of calls says."""
from __future__ import annotations

import functools

import pytest
import torch

from tests.helpers import Block, Mark, assert_equal, assert_transparent, by_hand, doing, leaf, plain
from torchckpt import Checkpointing, checkpoint, is_recomputing
from torchckpt.testing import count_recomputes


def noted(events, name="region"):
    """``x -> exp(x)``, which writes down its forward, its replay and its backward."""

    def function(x):
        events.append(f"replay of {name}" if is_recomputing() else f"forward of {name}")
        return Mark.apply(x.exp(), f"backward of {name}", events)

    return function


def test_replay_comes_where_recompute_stands(device):
    #   x -> region -> link -> recompute() -> head
    events = []
    region = Checkpointing(noted(events), leaf(3, device=device))
    hidden = Mark.apply(region.checkpoint(), "backward of link", events)
    loss = Mark.apply(region.recompute(hidden), "backward of head", events).sum()
    loss.backward()
    assert events == [
        "forward of region",
        "backward of head",
        "replay of region",
        "backward of link",
        "backward of region",
    ]


def test_replay_comes_with_the_first_unpack_where_nothing_places_it(device):
    events = []
    hidden = Mark.apply(checkpoint(noted(events), leaf(3, device=device)), "backward of link", events)
    Mark.apply(hidden, "backward of head", events).sum().backward()
    assert events == [
        "forward of region",
        "backward of head",
        "backward of link",
        "backward of region",
        "replay of region",  # exp's own node, below the mark, unpacks
    ]


def test_prefetch_comes_before_the_backward(device):
    events = []
    region = Checkpointing(noted(events), leaf(3, device=device))
    loss = Mark.apply(region.recompute(region.checkpoint()), "backward of head", events).sum()
    region.prefetch()
    loss.backward()
    assert events == [
        "forward of region",
        "replay of region",
        "backward of head",
        "backward of region",
    ]


def test_replays_of_two_regions_one_ahead_of_the_other(device):
    # The replay of each region is placed behind the next one: it comes before the backward of that.
    #   x -> a -> b -> recompute(b) -> recompute(a) -> head
    events = []
    a = Checkpointing(noted(events, "a"), leaf(3, device=device))
    b = Checkpointing(noted(events, "b"), a.checkpoint())
    hidden = a.recompute(b.recompute(b.checkpoint()))
    Mark.apply(hidden, "backward of head", events).sum().backward()
    assert events == [
        *("forward of a", "forward of b"),
        "backward of head",
        *("replay of a", "replay of b"),
        *("backward of b", "backward of a"),
    ]


@pytest.mark.parametrize("used", [0, 1])
def test_every_output_carries_the_place_of_the_replay(device, used):
    events = []

    def function(x):
        events.append(doing())
        return Mark.apply(x.exp(), "backward of output 0", events), Mark.apply(x.sin(), "backward of output 1", events)

    region = Checkpointing(function, leaf(3, device=device))
    outputs = region.checkpoint()
    linked = [Mark.apply(output, f"backward of link {place}", events) for place, output in enumerate(outputs)]
    region.recompute(linked)[used].sum().backward()
    assert events == ["forward", "replay", f"backward of link {used}", f"backward of output {used}"]


def test_outputs_of_recompute_keep_their_container_and_what_is_no_tensor(device):
    region = Checkpointing(lambda x: {"y": [x.exp(), None, 3], "z": x.detach()}, leaf(3, device=device))
    outputs = region.checkpoint()
    placed = region.recompute(outputs)
    assert_equal(placed, outputs)
    assert placed["y"][1:] == [None, 3]
    assert placed["z"] is outputs["z"]


def test_recompute_of_outputs_without_a_gradient_gives_them_back(device):
    region = Checkpointing(lambda x: (x.detach(), 3), leaf(3, device=device))
    outputs = region.checkpoint()
    assert region.recompute(outputs)[0] is outputs[0]


def test_recompute_of_the_result_of_another_operation(device):
    def downstream(function, x):
        region = Checkpointing(function, x)
        return region.recompute(region.checkpoint().cos() * 2)

    block, x = Block().to(device), leaf(3, 4, device=device)

    def gradients_of(call):
        torch.manual_seed(1)
        return torch.autograd.grad(call(block, x).sum(), [x, *block.parameters()])

    assert_equal(gradients_of(downstream), gradients_of(lambda block, x: block(x).cos() * 2))


def test_outputs_of_recompute_may_be_changed_in_place(device):
    def program(function, x):
        return by_hand(function, x).mul_(2)

    x = leaf(3, device=device)
    expected = torch.autograd.grad((x.sin() * 2).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(program(torch.sin, x).sum(), x)[0], expected)


def test_recompute_without_a_backward_does_nothing(device):
    with count_recomputes() as recomputes:
        by_hand(torch.exp, leaf(3, device=device))
    assert recomputes.total == 0


def test_is_recomputed(device):
    region = Checkpointing(torch.exp, leaf(3, device=device))
    seen = [region.is_recomputed]
    loss = region.checkpoint().sum()
    seen.append(region.is_recomputed)
    loss.backward()
    seen.append(region.is_recomputed)
    assert seen == [False, False, True]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("determinism_check", ["default", "values", "none"])
def test_options_change_no_gradient(device, early_stop, determinism_check):
    block, options = Block().to(device), {"early_stop": early_stop, "determinism_check": determinism_check}
    x = leaf(3, 4, device=device)
    assert_transparent(functools.partial(checkpoint, **options), block, x, modules=[block])

    def pair(function, *args):
        region = Checkpointing(function, *args, **options)
        return region.recompute(region.checkpoint())

    assert_transparent(pair, block, x, modules=[block])
    assert_transparent(plain, block, x, modules=[block])


def test_what_recompute_returns_has_the_attributes_of_the_outputs():
    class Tagged(torch.Tensor):
        """Tells where it comes from."""

    def function(x):
        output = x.sin().as_subclass(Tagged)
        output.tag = "sin"
        return output

    output = by_hand(function, leaf(3))
    assert (type(output), output.tag) == (Tagged, "sin")
