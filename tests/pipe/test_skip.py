"""Skips: the same numbers as in the plain Sequential, straight from stage to stage; errors name both layers."""
from __future__ import annotations

import copy
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchckpt
from tests.helpers import in_threads
from tests.pipe.skips import Pop, Stash
from tests.pipe.stages import run, stages_of
from tests.settings import without_collector
from tests.slow import few
from torchckpt.errors import ArgumentError, RecomputationError
from torchckpt.pipe.run import pipeline, step
from torchckpt.pipe.run.links import Place
from torchckpt.pipe.skip import Namespace, pop, stash

MODES = ["always", "except_last", "never"]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def crossing() -> nn.Sequential:
    """Two skips, one inside the other, and one that goes to the next layer."""
    torch.manual_seed(5)
    layers = [dense(), Stash("outer"), dense(), Stash("inner"), dense(), Pop("inner"), Stash("near"), Pop("near")]
    return nn.Sequential(*layers, dense(), Pop("outer"), nn.Linear(4, 2))


def by_micro_batch(module: nn.Module, x: Tensor, chunks: int) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of the plain module, whose micro-batches go backward last first."""
    outputs = [module(part) for part in x.tensor_split(chunks)]
    for output in reversed(outputs):
        (output.square().sum()).backward()
    return torch.cat(outputs).detach(), gradients(module)


def gradients(module: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return gradients


def assert_same(ours: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.equal(ours[0], expected[0])
    assert len(ours[1]) == len(expected[1])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], expected[1]))


@few(3)
@pytest.mark.parametrize("threads", [False, True], ids=["caller", "threads"])
@pytest.mark.parametrize("checkpointed", [0, 2, 3])
@pytest.mark.parametrize("balance", [[11], [2, 3, 6], [4, 1, 5, 1], [1] * 11])
def test_across_stages_it_is_the_plain_sequential_to_the_bit(
    balance: list[int], checkpointed: int, threads: bool
) -> None:
    module, x = crossing(), torch.randn(7, 4)
    expected = by_micro_batch(module, x, 3)
    for lookahead in (1, 2):
        output = run(stages_of(list(module), balance), x, 3, checkpointed, lookahead, threads)
        output.square().sum().backward()
        assert_same((output, gradients(module)), expected)


@pytest.mark.parametrize("checkpoint", MODES)
def test_namespaces_keep_blocks_of_one_kind_apart(checkpoint: Any) -> None:
    def level(*inner: nn.Module) -> nn.Sequential:
        space = Namespace()
        return nn.Sequential(nn.Linear(4, 4), Stash(namespace=space), *inner, nn.Linear(4, 4), Pop(namespace=space))

    module, x = level(level(nn.Tanh())), torch.randn(5, 4)
    expected = by_micro_batch(module, x, 2)
    pipe = torchckpt.Pipe(module, [2, 2, 2, 1, 2], chunks=2, checkpoint=checkpoint, split_nested=True)
    for again in (pipe, copy.deepcopy(pipe)):
        output = again(x)
        output.square().sum().backward()
        assert_same((output, gradients(again)), expected)


def test_a_namespace_is_one_in_a_copy_too() -> None:
    space = Namespace()
    first, second = copy.deepcopy([Stash(namespace=space), Pop(namespace=space)])
    assert first.namespace is second.namespace is not space


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_module_with_namespaces_works(again: Any) -> None:
    space = Namespace()
    module = nn.Sequential(Stash(namespace=space), nn.Linear(4, 4), Pop(namespace=space))
    x = torch.randn(4, 4)
    expected = torch.cat([module(rows) for rows in x.split(2)])
    assert torch.equal(again(torchckpt.Pipe(module, [1, 1, 1], chunks=2))(x), expected)


class Deep(nn.Module):
    """Stashes two skips where a region of its own is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.stash = nn.Linear(4, 4), Stash("deep")

    def forward(self, x: Tensor) -> Tensor:
        stash("shallow", x * 3)
        return self.stash(self.layer(x).tanh())


def test_any_module_inside_a_layer_stashes_and_pops() -> None:
    module, x = nn.Sequential(Deep(), nn.Tanh(), nn.Sequential(Pop("deep"), Pop("shallow"))), torch.randn(4, 4)
    expected = by_micro_batch(module, x, 2)
    output = torchckpt.Pipe(module, [1, 1, 1], chunks=2, checkpoint="always")(x)
    output.square().sum().backward()
    assert_same((output, gradients(module)), expected)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_pipe_with_skips_inside_a_region_is_the_pipe(checkpoint: Any) -> None:
    pipe = torchckpt.Pipe(crossing(), [2, 3, 6], chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(pipe(x).sum(), x)
    assert torch.equal(torch.autograd.grad(torchckpt.checkpoint(pipe, x).sum(), x)[0], expected[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    module, x = crossing(), torch.randn(6, 4)
    pipe = torchckpt.Pipe(module, [2, 3, 6], chunks=3)
    expected = torch.cat([module(part) for part in x.tensor_split(3)])
    with mode():
        assert torch.equal(pipe(x), expected)


def test_integer_skips_and_those_that_need_no_gradient() -> None:
    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            stash("ids", x)
            stash("scale", x.float().mean())
            return torch.nn.functional.one_hot(x, 4).float()

    class Use(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * pop("ids")[:, None] + pop("scale")

    module, x = nn.Sequential(Count(), nn.Linear(4, 4), Use(), nn.Linear(4, 2)), torch.arange(6) % 4
    expected = by_micro_batch(module, x, 2)
    output = torchckpt.Pipe(module, [1, 1, 1, 1], chunks=2, checkpoint="always")(x)
    output.square().sum().backward()
    assert_same((output, gradients(module)), expected)


# the way that it takes ------------------------------------------------------------------------------------------------


def test_no_stage_between_sees_the_skip() -> None:
    seen: list[tuple[int, ...]] = []
    real = torchckpt.pipe.run.visit.StageCall.__call__

    def call(call: Any, *args: Any) -> Any:
        returned = real(call, *args)
        seen.append((len(args), len(returned[1])))
        return returned

    pipe = torchckpt.Pipe(nn.Sequential(Stash(), dense(), dense(), Pop()), [1, 1, 1, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchckpt.pipe.run.visit.StageCall, "__call__", call)
        pipe(torch.randn(2, 4))
    assert seen == [(1, 1), (1, 0), (1, 0), (1, 0)]  # arguments, and skips that leave


class Numbered(Place):
    number = -1


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """From which place to which tensors go: the stages come first, then the caller."""
    moves: list[tuple[int, int]] = []
    numbers = iter(range(9))

    def of(device: torch.device) -> Place:
        place = Numbered(device, None)
        place.number = next(numbers)
        return place

    def moved(transfer: Any, target: Any) -> Any:
        moves.append((transfer.place.number, target.number))
        return transfer.tensors

    class CutTensor(step.CutTensor):
        def __init__(self, tensor: Tensor, forth: Any, back: Any) -> None:
            receiver, sender = back
            moves.append((sender.place.number, receiver.place.number))
            super().__init__(tensor, forth, back)

    monkeypatch.setattr(Place, "of", staticmethod(of))
    monkeypatch.setattr(pipeline, "moved", moved)
    monkeypatch.setattr(step, "CutTensor", CutTensor)
    return moves


def test_it_is_moved_once_from_the_stage_that_stashes_to_the_one_that_pops(moves: list[tuple[int, int]]) -> None:
    pipe = torchckpt.Pipe(nn.Sequential(Stash(), dense(), dense(), Pop()), [1, 1, 1, 1])
    pipe(torch.randn(2, 4))
    assert moves == [(4, 0), (0, 1), (1, 2), (2, 3), (0, 3)]


def test_in_a_step_too(moves: list[tuple[int, int]]) -> None:
    pipe = torchckpt.Pipe(nn.Sequential(Stash(), dense(), dense(), Pop()), [1, 1, 1, 1])
    pipe.step(torch.randn(2, 4), torch.randn(2, 4), loss_fn=nn.functional.mse_loss)
    assert moves == [(0, 1), (1, 2), (2, 3), (0, 3)]


def test_the_replay_of_the_stage_that_pops_pops_again_and_starts_early() -> None:
    events: list[str] = []

    class Noted(Pop):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).exp()
            if torchckpt.is_recomputing():
                events.append("R")
            else:
                y.register_hook(lambda grad: events.append("B"))
            return y.sin()

    module = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Tanh(), Noted())
    pipe = torchckpt.Pipe(module, [2, 1, 1], chunks=3, checkpoint="always")
    pipe(torch.randn(3, 4)).sum().backward()
    assert "".join(events) == "RBRBRB"


def test_a_skip_is_kept_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Linear(4, 4), Pop())
    pipe = torchckpt.Pipe(module, [2, 1, 1], checkpoint="always")
    x = torch.randn(8, 4)
    with torchckpt.testing.saved_bytes() as saved:
        pipe(x)
    assert saved.total == 3 * x.nbytes  # x, what stage 0 returns and stashes, what stage 1 returns


# in the plain Sequential ----------------------------------------------------------------------------------------------


def test_in_the_plain_sequential_a_name_may_be_used_again_and_threads_do_not_mix() -> None:
    module = crossing()
    inputs = [torch.randn(4, 4) for _ in range(4)]
    expected = [module(x) for x in inputs]
    outputs = in_threads(*(lambda x=x: [module(x) for _ in range(10)] for x in inputs))
    assert all(torch.equal(tensor, expected[place]) for place, many in enumerate(outputs) for tensor in many)


def test_the_plain_sequential_in_a_region_is_the_plain_sequential() -> None:
    torchckpt.testing.assert_transparent(crossing(), torch.randn(4, 4, requires_grad=True))


def test_in_the_plain_sequential_what_was_not_stashed_cannot_be_popped() -> None:
    text = (
        r"pop\(\): a skip is popped that no earlier layer has stashed, or that was popped before\n"
        r"  received: pop\('skip'\)\n"
        r"  works:    stash\('skip', tensor\) in an earlier layer"
    )
    for layers in ([Pop()], [Stash(), Pop(), Pop()]):
        with pytest.raises(ArgumentError, match=text):
            nn.Sequential(*layers)(torch.ones(1, 4))


def test_a_skip_is_a_tensor() -> None:
    wrong: Any = [1.0]
    with pytest.raises(ArgumentError, match=r"stash\(\): a skip is not a tensor\n  received: 'a': list\n  works: "):
        stash("a", wrong)


# errors that name both layers -----------------------------------------------------------------------------------------


def call_forward(pipe: torchckpt.Pipe) -> None:
    pipe(torch.ones(2, 4))


def call_step(pipe: torchckpt.Pipe) -> None:
    pipe.step(torch.ones(2, 4), torch.ones(2, 4), loss_fn=nn.functional.mse_loss)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


UNUSED = (
    "a skip is stashed, and popped by no later layer\n"
    "  received: 'skip', stashed by layer 1 (Stash), popped by no layer\n"
    "  works:    pop('skip') in a later layer, or no stash"
)
TWICE = (
    "a skip is stashed twice in a forward\n"
    "  received: 'skip', by layer 1 (Stash) and by layer 2 (Stash)\n"
    "  works:    stash('skip', tensor, namespace)"
)
POPPED_TWICE = (
    "a skip is popped twice in a forward\n"
    "  received: 'skip', by layer 2 (Pop) and by layer 3 (Pop)\n"
    "  works:    stash('skip', ...) under a second name"
)
BACKWARDS = (
    "a skip is popped before it is stashed\n"
    "  received: 'skip', popped by layer 1 (Pop), stashed by layer 3 (Stash)\n"
    "  works:    the layer that stashes before the layer that pops"
)
NEVER = (
    "a skip is popped before it is stashed\n"
    "  received: 'skip', popped by layer 1 (Pop), stashed by no layer before it\n"
)
CHANGED = (
    "a skip was changed in place between the layer that stashes it and the one that pops it\n"
    "  received: 'skip', stashed by layer 1 (Stash), popped by layer 3 (Pop), changed by a stage between\n"
    "  works:    stash('skip', x.clone()), or the operation out of place"
)


@pytest.mark.parametrize("balance", [[4], [1, 1, 1, 1], [2, 2]])
@pytest.mark.parametrize("call", [call_forward, call_step])
@pytest.mark.parametrize(
    ("middle", "text"),
    [
        ([Stash, nn.Tanh, nn.Tanh], UNUSED),
        ([Stash, Stash, Pop], TWICE),
        ([Stash, Pop, Pop], POPPED_TWICE),
        ([Pop, nn.Tanh, Stash], BACKWARDS),
        ([Pop, nn.Tanh, nn.Tanh], NEVER),
    ],
    ids=["unused", "stashed twice", "popped twice", "backwards", "never stashed"],
)
def test_a_wrong_skip_is_an_error_that_names_both_layers(
    middle: list[Any], text: str, call: Callable[[torchckpt.Pipe], None], balance: list[int]
) -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), *(make() for make in middle)), balance, chunks=2)
    for _ in range(2):  # an error leaves nothing that would hide it, or make another
        with pytest.raises(ArgumentError) as raised:
            call(pipe)
        assert text in str(raised.value)


@pytest.mark.parametrize("call", [call_forward, call_step])
def test_a_skip_that_a_stage_between_changes_in_place_is_an_error(call: Callable[[torchckpt.Pipe], None]) -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), Stash(), Double(), Pop()), [2, 1, 1], checkpoint="never")
    with pytest.raises(ArgumentError) as raised:
        call(pipe)
    by_step = "changed by layer 2 (Double): it shares memory with another tensor or with a skip"
    assert (CHANGED if call is call_forward else by_step) in str(raised.value)


def test_a_skip_that_the_stage_that_pops_it_changes_in_place_is_an_error_in_its_replay() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * pop("skip").mul_(2)).sin()

    pipe = torchckpt.Pipe(nn.Sequential(Stash(), nn.Linear(4, 4), Changes()), [1, 1, 1], checkpoint="always")
    loss = pipe(torch.ones(2, 4)).sum()
    text = (
        r"a popped skip was changed in place: the replay would start from the changed tensor\n"
        r"  received: 'skip' at version 1; expected version 0\n  works:    the operation out of place, such as x = pop"
    )
    with pytest.raises(RecomputationError, match=text):
        loss.backward()


def test_all_unused_skips_are_named_at_once() -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), Stash("a"), Stash("b")), [2, 1])
    with pytest.raises(ArgumentError) as raised:
        pipe(torch.ones(1, 4))
    assert re.findall(r"received: (.*), popped", str(raised.value)) == [
        "'a', stashed by layer 1 (Stash)",
        "'b', stashed by layer 2 (Stash)",
    ]


class Indirect(nn.Module):
    """Whose names cannot be read from its source."""

    def forward(self, x: Tensor) -> Tensor:
        for name in ("skip",):
            stash(name, x)
        return x


def test_who_stashes_behind_is_told_as_far_as_the_source_tells_it() -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(4, 4), Pop(), Indirect()), [1, 1, 1])
    with pytest.raises(ArgumentError, match=r"popped by layer 1 \(Pop\), stashed by no layer before it"):
        pipe(torch.ones(1, 4))


def test_a_replay_that_pops_another_skip_is_an_error() -> None:
    class Wavers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * pop("b" if torchckpt.is_recomputing() else "a")).sin()

    module = nn.Sequential(Stash("a"), Stash("b"), nn.Linear(4, 4), Wavers(), Pop("b"))
    loss = torchckpt.Pipe(module, [2, 1, 1, 1], checkpoint="always")(torch.ones(2, 4)).sum()
    text = r"a replay pops a skip that its forward did not\n  received: pop\('b'\), by layer 3 \(Wavers\)\n  works:"
    with pytest.raises(RecomputationError, match=text):
        loss.backward()


# what stays -----------------------------------------------------------------------------------------------------------


class Watched(Stash):
    """Stashes a tensor of its own, and keeps a weak reference to it."""

    def __init__(self, refs: list[Any]) -> None:
        super().__init__()
        self.refs = refs

    def forward(self, x: Tensor) -> Tensor:
        skip = x.exp()
        self.refs.append(weakref.ref(skip.untyped_storage()))
        stash("skip", skip)
        return x


@pytest.mark.parametrize(("checkpoint", "backward"), list(product(MODES, [False, True])))
def test_nothing_of_a_skip_is_left(checkpoint: Any, backward: bool) -> None:
    refs: list[Any] = []
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Watched(refs), nn.Tanh(), Pop())
    pipe = torchckpt.Pipe(module, [2, 1, 1, 1], chunks=2, checkpoint=checkpoint)
    with without_collector():
        output = pipe(torch.randn(4, 4))
        if backward:
            output.sum().backward()
        del output
        assert [ref() for ref in refs if ref() is not None] == []
        assert len(refs) >= 2


@pytest.mark.parametrize("call", [call_forward, call_step])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("last", [nn.Identity(), Pop("another")], ids=["unused", "not there"])
def test_nothing_of_a_skip_is_left_after_an_error(
    last: nn.Module, checkpoint: Any, call: Callable[[torchckpt.Pipe], None]
) -> None:
    refs: list[Any] = []
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Watched(refs), nn.Tanh(), last)
    pipe = torchckpt.Pipe(module, [2, 1, 1, 1], chunks=2, checkpoint=checkpoint)
    with without_collector():
        with pytest.raises(ArgumentError) as raised:
            call(pipe)
        del raised
        assert [ref() for ref in refs if ref() is not None] == []
        assert refs


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_layer_that_stashes_and_is_a_region_by_itself_leaves_nothing_after_its_backward(early_stop: bool) -> None:
    """The replay's tensor stayed, with its graph, until the next forward."""
    freed: list[weakref.ref[Tensor]] = []

    class Stashes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            stash("h", h)
            freed.append(weakref.ref(h))
            return h.exp().sin()

    layers = nn.Sequential(Stashes(4, 4), Pop("h"))
    torchckpt.checkpoint_module(layers[0], early_stop=early_stop)
    with without_collector():
        layers(torch.randn(2, 4)).sum().backward()
        assert [reference() for reference in freed] == [None, None]


def test_threads_that_share_a_context_have_skips_of_their_own():
    """As those of ``asyncio.to_thread``, which has each thread run in a copy of the caller's context."""

    class Meet(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            barrier.wait()
            return x

    barrier = threading.Barrier(1)
    model, inputs = nn.Sequential(Stash("x"), Meet(), Pop("x")), [torch.zeros(2), torch.ones(2)]
    expected = [model(x) for x in inputs]  # the caller's context has skips from now on
    barrier = threading.Barrier(2)
    received = in_threads(*(partial(copy_context().run, model, x) for x in inputs))
    assert all(map(torch.equal, received, expected))
