"""``Pipe.step``: the gradients of the plain module, micro-batch by micro-batch, with few of them alive."""
from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import torchckpt
from tests.pipe.skips import Pop, Stash
from tests.pipe.stages import gradients
from tests.settings import without_collector
from tests.slow import few, slow
from torchckpt.errors import ArgumentError
from torchckpt.pipe import NoChunk
from torchckpt.pipe.batchnorm import Statistics
from torchckpt.pipe.run.step import one_ahead
from torchckpt.planning import Kind


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    first = [nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), Stash()]
    return nn.Sequential(*first, nn.Linear(8, 8), nn.LayerNorm(8), Pop(), nn.Dropout(dropout), nn.Linear(8, 3))


def assert_same(ours: Any, expected: Any) -> None:
    assert torch.equal(ours[0], expected[0])
    assert len(ours[1]) == len(expected[1])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(ours[1], expected[1]))


def by_micro_batch(
    module: Any, x: Tensor, target: Tensor, chunks: int, loss_fn: Any, reduce: str = "mean", dim: int = 0
) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients of the plain module, each micro-batch forward and backward, first to last."""
    rows, losses = x.size(dim), []
    for part, target_part in zip(x.tensor_split(min(chunks, rows), dim), target.tensor_split(min(chunks, rows), dim)):
        loss = loss_fn(module(part), target_part) * (part.size(dim) / rows if reduce == "mean" else 1.0)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), gradients(module)


def stepped(pipe: torchckpt.Pipe, *args: Any, loss_fn: Any = mse_loss, **kwargs: Any) -> Any:
    pipe.zero_grad()
    torch.manual_seed(7)
    loss = pipe.step(*args, loss_fn=loss_fn, **kwargs)
    return loss, gradients(pipe)


@few(8)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("chunks", [1, 3, *slow([2, 8])])
@pytest.mark.parametrize("balance", [[9], [2, 7], [1, 4, 4], [2, 2, 2, 2, 1]])
def test_it_is_the_plain_module_micro_batch_by_micro_batch(
    balance: list[int], chunks: int, reduce: str, checkpoint: Any
) -> None:
    x, target = torch.randn(7, 6), torch.randn(7, 3)
    expected = by_micro_batch(layers(), x, target, chunks, mse_loss, reduce)
    pipe = torchckpt.Pipe(layers(), balance, chunks=chunks, checkpoint=checkpoint)
    assert_same(stepped(pipe, x, target, reduce=reduce), expected)
    assert_same(stepped(pipe, x, target, reduce=reduce), expected)  # a step leaves nothing to the next


@few(6)
@pytest.mark.parametrize("chunks", [1, 2, 5, 7])
@pytest.mark.parametrize("balance", [[9], [4, 5], [3, 3, 3], [3, 1, 1, 3, 1]])
def test_recomputing_changes_no_bit_with_dropout(balance: list[int], chunks: int) -> None:
    x, target = torch.randn(7, 6), torch.randn(7, 3)
    never = torchckpt.Pipe(layers(0.4), balance, chunks=chunks, checkpoint="never")
    always = torchckpt.Pipe(layers(0.4), balance, chunks=chunks, checkpoint="always")
    assert_same(stepped(always, x, target), stepped(never, x, target))


def test_gradients_are_added_to_those_that_are_there() -> None:
    x, target = torch.randn(4, 6), torch.randn(4, 3)
    pipe = torchckpt.Pipe(layers(), [4, 5], chunks=2)
    plain = layers()
    for _ in range(2):
        pipe.step(x, target, loss_fn=mse_loss)
        expected = by_micro_batch(plain, x, target, 2, mse_loss)[1]
    assert_same((x, gradients(pipe)), (x, expected))


def test_the_mean_is_weighted_by_rows() -> None:
    pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(2, 1), nn.Identity()), [1, 1], chunks=2)
    x, target = torch.randn(5, 2), torch.randn(5, 1)
    torch.testing.assert_close(pipe.step(x, target, loss_fn=mse_loss), mse_loss(pipe(x), target).detach())


class Tree(nn.Module):
    """Takes and returns a pytree with a tensor in it twice, an integer tensor and none."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(4, 4), first

    def forward(self, tree: dict[str, Any], *, scale: float = 1.0, table: Tensor | None = None) -> dict[str, Any]:
        x = self.linear(tree["x"]).tanh() * scale
        if not self.first:
            x = x + tree["pair"][0] + tree["pair"][1].sin()
        if table is not None:
            x = x + table.sum(0)
        return {"x": x, "pair": (x, x), "ids": tree["ids"], "name": "tree", "none": None}


class Head(nn.Module):
    def forward(self, tree: dict[str, Any]) -> Tensor:
        output: Tensor = tree["x"] * (1 + tree["ids"][:, None])
        assert (tree["name"], tree["none"]) == ("tree", None)
        return output


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_pytrees_keyword_arguments_and_what_is_not_split(checkpoint: Any) -> None:
    module = nn.Sequential(Tree(first=True), Tree(), Tree(), Head())
    x, ids, table, target = torch.randn(5, 4), torch.arange(5), torch.randn(7, 4), torch.randn(5, 4)
    parts = [{"x": part, "ids": target_part} for part, target_part in zip(x.tensor_split(2), ids.tensor_split(2))]
    losses = []
    for part, target_part, weight in zip(parts, target.tensor_split(2), (3 / 5, 2 / 5)):
        output: Any = module[0](part, scale=2.0, table=table)
        for layer in module[1:]:  # type: ignore[union-attr]
            output = layer(output)
        loss = mse_loss(output, target_part) * weight
        loss.backward()
        losses.append(loss.detach())
    expected = torch.stack(losses).sum(), [grad.clone() for grad in gradients(module) if grad is not None]
    pipe = torchckpt.Pipe(module, [1, 1, 2], chunks=2, checkpoint=checkpoint)
    assert_same(stepped(pipe, {"x": x, "ids": ids}, target, scale=2.0, table=NoChunk(table)), expected)


def test_inputs_by_name_only_and_a_target_that_is_a_tree() -> None:
    class Named(nn.Linear):
        def forward(self, *, left: Tensor, right: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(left) + right

    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (output - target["mean"]).square().sum() + target["extra"].sum()

    pipe = torchckpt.Pipe(nn.Sequential(Named(3, 3), nn.Tanh()), [1, 1], chunks=2)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    loss = pipe.step({"mean": y, "extra": y}, left=x, right=y, loss_fn=loss_fn, reduce="sum")
    output = torch.tanh(pipe[0](left=x, right=y))
    torch.testing.assert_close(loss, loss_fn(output, {"mean": y, "extra": y}).detach())


def test_rows_in_another_dimension() -> None:
    x, target = torch.randn(3, 5, 6), torch.randn(3, 5, 3)
    expected = by_micro_batch(layers(), x, target, 2, mse_loss, dim=1)
    assert_same(stepped(torchckpt.Pipe(layers(), [4, 5], chunks=2, batch_dim=1), x, target), expected)


def test_integer_inputs_and_frozen_stages() -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        blocks = [nn.Linear(4, 4) for _ in range(3)]
        return nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), *blocks, nn.Linear(4, 9))

    x, target = torch.randint(9, (6,)), torch.randint(9, (6,))
    for frozen in ([], [0], [0, 2], [3], [5], [0, 2, 3, 4]):
        plain, staged = module(), module()
        for number in frozen:
            plain[number].requires_grad_(False)
            staged[number].requires_grad_(False)
        expected = by_micro_batch(plain, x, target, 3, cross_entropy)
        assert_same(stepped(torchckpt.Pipe(staged, [1] * 6, chunks=3), x, target, loss_fn=cross_entropy), expected)


def test_inputs_and_targets_get_no_gradient_and_their_graphs_are_left_alone() -> None:
    encoder, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    pipe = torchckpt.Pipe(layers(), [4, 5], chunks=2)
    pipe.step(encoder(x), encoder(x)[:, :3], loss_fn=mse_loss)
    assert x.grad is encoder.weight.grad is None
    assert all(grad is not None for grad in gradients(pipe))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_grad_mode_of_the_caller_does_not_matter_and_is_his_again(mode: Callable[[], Any]) -> None:
    x, target = torch.randn(4, 6), torch.randn(4, 3)
    pipe = torchckpt.Pipe(layers(), [4, 5], chunks=2)
    expected = stepped(pipe, x, target)
    expected = expected[0], [grad.clone() for grad in expected[1]]
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert_same(stepped(pipe, x, target), expected)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    pipe.step(x, target, loss_fn=mse_loss)  # whose gradients are no inference tensors


def test_autocast_of_the_caller_holds_in_every_stage_and_its_replay() -> None:
    x, target = torch.randn(4, 6), torch.randn(4, 3)
    grads = []
    for checkpoint in ("always", "never"):
        pipe = torchckpt.Pipe(layers(0.2), [4, 5], chunks=2, checkpoint=checkpoint)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16):
            grads.append(stepped(pipe, x, target, loss_fn=lambda output, target: mse_loss(output.float(), target)))
    assert_same(*grads)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_the_first_layer_of_the_last_stage_may_work_in_place(checkpoint: Any) -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))

    x, target = torch.randn(6, 6), torch.randn(6, 3)
    expected = by_micro_batch(module(), x, target, 3, mse_loss)
    assert_same(stepped(torchckpt.Pipe(module(), [1, 2], chunks=3, checkpoint=checkpoint), x, target), expected)


def test_a_tensor_that_an_output_holds_twice_is_one_for_the_next_stage() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, [y]

    class ChangedInputs(nn.Module):
        def forward(self, tree: Any) -> Tensor:
            tree[0].mul_(3)
            return tree[0] + tree[1][0]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, x, target = nn.Sequential(Twice(4, 4), ChangedInputs()), torch.randn(4, 4), torch.randn(4, 4)
    expected = by_micro_batch(module, x, target, 2, mse_loss)
    expected = expected[0], [grad.clone() for grad in expected[1]]  # type: ignore[union-attr, misc]
    pipe = torchckpt.Pipe(module, [1, 1], chunks=2, checkpoint="never")
    assert_same(stepped(pipe, x, target), expected)


def test_a_tensor_that_leaves_a_stage_thrice_adds_up_as_in_one_graph() -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        first = [nn.Linear(6, 6), Stash("a"), Stash("b")]
        return nn.Sequential(*first, nn.Linear(6, 6), Pop("b"), nn.Tanh(), Pop("a"), nn.Linear(6, 3))

    x, target = torch.randn(9, 6), torch.randn(9, 3)
    expected = by_micro_batch(module(), x, target, 3, mse_loss)
    assert_same(stepped(torchckpt.Pipe(module(), [3, 1, 1, 3], chunks=3), x, target), expected)


def test_running_statistics_are_those_of_the_mini_batch() -> None:
    def module() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))

    x = torch.randn(8, 3)
    plain = module()
    plain[0](x)
    pipe = torchckpt.Pipe(module(), [1, 2], chunks=4, checkpoint="always", deferred_batch_norm=True)
    pipe.step(x, x, loss_fn=mse_loss)
    torch.testing.assert_close(pipe[0].running_mean, plain[0].running_mean)
    torch.testing.assert_close(pipe[0].running_var, plain[0].running_var)
    assert pipe[0].num_batches_tracked == pipe[2].num_batches_tracked == 1
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, x, loss_fn=lambda output, target: 1 / 0)
    assert pipe[0].num_batches_tracked == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_if_the_update_of_statistics_fails_so_does_the_step(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def variance(_: Statistics) -> Any:
        raise error

    x, module = torch.randn(8, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    pipe = torchckpt.Pipe(module, [1, 2], chunks=4, deferred_batch_norm=True)
    monkeypatch.setattr(Statistics, "variance", variance)
    with pytest.raises(error):
        pipe.step(x, x, loss_fn=mse_loss)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert pipe[0].num_batches_tracked == pipe[2].num_batches_tracked == 0
    with pytest.raises(ArgumentError, match="no step has run yet"):
        pipe.timeline()


# order and memory -----------------------------------------------------------------------------------------------------


def picture(p: int, m: int, recomputes: bool = True) -> list[str]:
    """What each stage does, in order."""
    order = one_ahead(p, m, recomputes).launched
    return [" ".join(f"{kind.value}{i}" for stage, kind, i in order if stage == j) for j in range(p)]


def test_the_order_is_1f1b_recomputed_one_ahead_but_on_the_last_stage() -> None:
    assert picture(3, 4) == [
        # warm-up, then one forward, one backward   the rest
        "F0 F1 F2 R0 B0 F3 R1 B1 R2 B2 R3 B3",
        "F0 F1 R0 B0 F2 R1 B1 F3 R2 B2 R3 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 3, 5, 12])
def test_recomputes_change_the_order_of_nothing_else(p: int, m: int) -> None:
    with_recomputes, without = (one_ahead(p, m, recomputes).launched for recomputes in (True, False))
    assert [action for action in with_recomputes if action.kind is not Kind.RECOMPUTE] == without


def test_with_fewer_micro_batches_than_stages_it_is_gpipe() -> None:
    assert picture(3, 2) == ["F0 F1 R0 B0 R1 B1"] * 3
    assert picture(1, 2) == ["F0 B0 F1 B1"]
    assert picture(2, 2, recomputes=False) == ["F0 F1 B0 B1", "F0 B0 F1 B1"]


class Counted(nn.Module):
    """A stage that counts the storages of its own that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).exp()  # exp saves its result
        recomputed = torchckpt.is_recomputing()
        self._watch("recomputed" if recomputed else "activations", hidden)
        output = hidden.sin()
        if not recomputed:
            self._watch("outputs", output)
        return output

    def _watch(self, kind: str, tensor: Tensor) -> None:
        self.now[kind] += 1
        self.peak[kind] = max(self.peak[kind], self.now[kind])
        weakref.finalize(tensor.untyped_storage(), self._dead, kind)

    def _dead(self, kind: str) -> None:
        self.now[kind] -= 1


def counted(p: int, m: int, checkpoint: Any) -> list[Counted]:
    stages = [Counted() for _ in range(p)]
    pipe = torchckpt.Pipe(nn.Sequential(*stages), [1] * p, chunks=m, checkpoint=checkpoint)
    pipe.step(torch.randn(m, 4), torch.randn(m, 4), loss_fn=mse_loss)
    assert all(not any(stage.now.values()) for stage in stages)  # nothing is alive after it
    return stages


@few(7)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages_to_the_end(p: int, m: int) -> None:
    keeps = [min(p - j, m) if m >= p else m for j in range(p)]
    never, always = counted(p, m, "never"), counted(p, m, "always")
    assert [stage.peak["activations"] for stage in never] == keeps
    assert [stage.peak["outputs"] for stage in always] == keeps
    # Of what is recomputed, one is alive; the last stage of 1F1B keeps its own.
    assert [stage.peak["recomputed"] for stage in always] == [1] * (p - 1) + [int(m < p)]
    assert [stage.peak["activations"] for stage in always] == [1] * p


def test_each_micro_batch_is_recomputed_once_and_the_last_stage_s_never() -> None:
    pipe = torchckpt.Pipe(layers(), [3, 3, 3], chunks=5, checkpoint="always")
    with torchckpt.testing.count_recomputes() as counted:
        pipe.step(torch.randn(5, 6), torch.randn(5, 3), loss_fn=mse_loss)
    assert counted.total == 2 * 5


class Fails(nn.Module):
    """Fails in a forward, a replay or a backward, and watches what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.where, self.alive, self.forwards = nn.Linear(4, 4), "", 0, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).exp()
        self.alive += 1
        weakref.finalize(hidden.untyped_storage(), self._dead)
        if torchckpt.is_recomputing():
            if self.where == "replay":
                raise ZeroDivisionError(self.where)
        else:
            self.forwards += 1
            if self.where == "forward" and self.forwards == 3:
                raise ZeroDivisionError(self.where)
            if self.where == "backward":
                hidden.register_hook(self._raise)
        return hidden.sin()

    def _raise(self, grad: Tensor) -> None:
        raise ZeroDivisionError(self.where)

    def _dead(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize(
    ("where", "checkpoint"),
    [("replay", "always"), *itertools.product(["forward", "backward", "loss"], ["always", "never"])],
)
def test_an_exception_leaves_nothing_behind_and_the_next_step_works(where: str, checkpoint: Any) -> None:
    first = Fails()
    module = nn.Sequential(first, Stash(), nn.Linear(4, 4), Pop())
    pipe = torchckpt.Pipe(module, [2, 1, 1], chunks=4, checkpoint=checkpoint)
    x = torch.randn(4, 4)
    expected = stepped(pipe, x, x)
    expected = expected[0], [grad.clone() for grad in expected[1]]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if first.where == "loss":
            raise ZeroDivisionError("loss")
        return mse_loss(output, target)

    first.where, first.forwards = where, 0
    with without_collector():
        with pytest.raises(ZeroDivisionError, match=where) as raised:
            pipe.step(x, x, loss_fn=loss_fn)
        del raised
        assert first.alive == 0
    first.where = ""
    assert_same(stepped(pipe, x, x), expected)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_steps_leave_no_object_behind(checkpoint: Any) -> None:
    pipe = torchckpt.Pipe(layers(), [4, 3, 2], chunks=4, checkpoint=checkpoint)
    x, target = torch.randn(4, 6), torch.randn(4, 3)
    with without_collector():
        counts = []
        for _ in range(6):
            pipe.step(x, target, loss_fn=mse_loss)
            counts.append(sum(type(value) is Tensor for value in gc.get_objects()))
        assert counts[2:] == counts[2:3] * 4


# what it shows --------------------------------------------------------------------------------------------------------


def test_the_timeline_is_the_schedule_as_it_was_measured() -> None:
    pipe = torchckpt.Pipe(layers(), [4, 3, 2], chunks=4)
    pipe.step(torch.randn(4, 6), torch.randn(4, 3), loss_fn=mse_loss)
    timeline = pipe.timeline()
    assert timeline.schedule == one_ahead(3, 4, True).schedule
    for rank, order in enumerate(timeline.schedule.ranks):
        events = [event for event in timeline.events if event.rank == rank]
        assert [event.action for event in events] == list(order)
        assert all(event.start_seconds <= event.end_seconds for event in events)
        assert all(a.end_seconds <= b.start_seconds for a, b in itertools.pairwise(events))


def test_without_a_step_there_is_no_timeline() -> None:
    with pytest.raises(ArgumentError) as raised:
        torchckpt.Pipe(layers()).timeline()
    assert str(raised.value) == (
        "Pipe.timeline(): no step has run yet\n  received: timeline() before step()\n"
        "  works:    pipe.step(x, target, loss_fn=loss_fn); pipe.timeline()"
    )


def test_the_profiler_sees_every_action() -> None:
    pipe = torchckpt.Pipe(layers(), [4, 5], chunks=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(torch.randn(4, 6), torch.randn(4, 3), loss_fn=mse_loss)
    seen = {event.name for event in profile.events() if event.name.startswith("torchckpt::")}
    words = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.RECOMPUTE: "recompute"}
    actions = [action for order in one_ahead(2, 2, True).schedule.ranks for action in order]
    assert seen == {f"torchckpt::{words[kind]}[stage={stage},mb={i}]" for stage, kind, i in actions}


# wrong calls ----------------------------------------------------------------------------------------------------------


X, Y = torch.ones(4, 6), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (
            (X,),
            {},
            "the arguments of the first layer or the target are missing\n"
            "  received: 1 positional, 0 by name\n  works:    pipe.step(x, target, loss_fn=loss_fn)",
        ),
        (
            (X, Y),
            {"loss_fn": None},
            "loss_fn is not callable\n  received: loss_fn=None\n  works:    loss_fn=torch.nn.functional.cross_entropy",
        ),
        (
            (X, Y),
            {"reduce": "max"},
            "reduce is not one of ('mean', 'sum')\n  received: reduce='max'\n  works:    reduce=\"mean\"",
        ),
        ((X, Y[:3]), {}, "differ in the number of rows, in dimension 0\n  received: input 0 of shape (4, 6), input 1"),
        ((X[:0], Y[:0]), {}, "the mini-batch has no rows"),
        (
            (X, Y),
            {"loss_fn": lambda output, target: output},
            "loss_fn(output, target) of a micro-batch returns no scalar that requires grad\n"
            "  received: shape (2, 3)\n  works:    loss_fn=torch.nn.functional.cross_entropy",
        ),
        ((X, Y), {"loss_fn": lambda output, target: 1.0}, "requires grad\n  received: 1.0\n"),
        ((X, Y), {"loss_fn": lambda output, target: output.sum().detach()}, "returns no scalar that requires"),
    ],
)
def test_a_wrong_call_says_the_rule_what_was_received_and_what_works(
    args: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    pipe = torchckpt.Pipe(layers(), [4, 5], chunks=2)
    with pytest.raises(ArgumentError) as raised:
        pipe.step(*args, **{"loss_fn": mse_loss, **options})
    assert text in str(raised.value)


def test_all_faults_are_reported_at_once() -> None:
    wrong: Any = {"loss_fn": 3, "reduce": "max"}
    with pytest.raises(ArgumentError) as raised:
        torchckpt.Pipe(layers()).step(X, **wrong)
    assert str(raised.value).startswith("Pipe.step(): 3 faults\n")
    received = ["1 positional, 0 by name", "loss_fn=3", "reduce='max'"]
    assert re.findall(r"received: (.*)", str(raised.value)) == received


def test_a_stage_that_returns_no_tensor_or_one_elsewhere_is_an_error() -> None:
    class Returns(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Any:
            return self.value

    elsewhere = torch.ones(2, device="meta")
    for value, text in ((None, "a stage returns no tensor"), (elsewhere, "is not on its device")):
        pipe = torchckpt.Pipe(nn.Sequential(nn.Linear(6, 6), Returns(value), nn.Identity()), [2, 1], chunks=2)
        with pytest.raises(ArgumentError, match=text):
            pipe.step(X, Y, loss_fn=mse_loss)
