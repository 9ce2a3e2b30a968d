"""Fork and join: an edge of the autograd graph between nodes that share no data, and nothing else."""
from __future__ import annotations

import torch

from tests.helpers import Mark, assert_equal, in_thread, leaf
from torchckpt.regions.core.nodes import fork, join, phony


def order(device, with_edge):
    """Of the backward of two lanes. Behind the join, all is made in a thread whose node numbers begin at 0.

    Among the nodes that are ready, the engine takes the one with the highest number.
    """
    events, late = [], leaf(3, device=device)
    for _ in range(20):
        late = late * 1

    #   late ── before the fork ── fork ─────────────────────── sum
    #                                └ ─ edge ─ ┐
    #                         early ────────── join ── behind the join ── sum
    forked, edge = fork(Mark.apply(late, "before the fork", events))
    edges = [Mark.apply(edge, "edge", events)] if with_edge else []

    def other_lane():
        return Mark.apply(join(leaf(3, device=device), *edges), "behind the join", events)

    (forked.sum() + in_thread(other_lane).sum()).backward()
    return events


def test_what_lies_before_the_fork_waits_for_what_lies_behind_the_join(device):
    assert order(device, with_edge=False) == ["before the fork", "behind the join"]
    assert order(device, with_edge=True) == ["behind the join", "edge (undefined)", "before the fork"]


def lanes(device, with_edges):
    """The order of the backward of three lanes, made one after the other, the last with the lowest numbers.

    Each goes join -> lane -> fork, and the edge from each fork goes to the join of the next lane.
    """
    events, outputs, edges = [], [], []

    def lane(number):
        hidden = leaf(3, device=device)
        for _ in range(20 * (2 - number)):
            hidden = hidden * 1
        output, edge = fork(Mark.apply(join(hidden, *edges), f"lane {number}", events))
        outputs.append(output.sum())
        edges[:] = [edge] if with_edges else []

    for number in range(3):
        in_thread(lane, number)
    torch.autograd.backward(outputs)
    return events


def test_chain_of_lanes_runs_last_to_first(device):
    assert lanes(device, with_edges=False) == ["lane 0", "lane 1", "lane 2"]
    assert lanes(device, with_edges=True) == ["lane 2", "lane 1", "lane 0"]


def test_several_edges_of_one_join(device):
    events = []
    forked = [fork(Mark.apply(leaf(3, device=device), f"input {number}", events)) for number in range(3)]
    edges = [Mark.apply(edge, f"edge {number}", events) for number, (_, edge) in enumerate(forked)]
    last = join(leaf(3, device=device), *edges)
    (last.sum() + sum(tensor.sum() for tensor, _ in forked)).backward()
    assert events == [
        *("edge 2 (undefined)", "edge 1 (undefined)", "edge 0 (undefined)"),
        *("input 2", "input 1", "input 0"),
    ]


def test_values_and_gradients_pass_unchanged(device):
    x, y = leaf(3, device=device), leaf(3, device=device)
    forked, edge = fork(x.exp())
    joined = join(y.exp(), edge)
    assert_equal((forked.detach(), joined.detach()), (x.detach().exp(), y.detach().exp()))
    torch.autograd.backward([forked, joined], [torch.full_like(x, 2), torch.full_like(y, 3)])
    assert_equal((x.grad, y.grad), (2 * x.detach().exp(), 3 * y.detach().exp()))


def test_gradient_of_a_phony_is_undefined(device):
    seen = []
    forked, edge = fork(leaf(3, device=device))
    node = edge.grad_fn
    node.register_prehook(lambda grads: seen.append([grad is None for grad in grads]))
    (forked.sum() + join(leaf(3, device=device), edge).sum()).backward()
    assert seen == [[False, True]]  # the fork's: of its output, and of its phony


def test_undefined_gradient_goes_through_undefined(device):
    events = []
    x = Mark.apply(leaf(3, device=device), "x", events)
    _, edge = fork(x)
    join(leaf(3, device=device), edge).sum().backward()
    assert events == ["x (undefined)"]


def test_outputs_may_be_changed_in_place(device):
    x, y = leaf(3, device=device), leaf(3, device=device)
    forked, edge = fork(x * 1)
    joined = join(y * 1, edge)
    (forked.mul_(2).sum() + joined.add_(1).mul_(3).sum()).backward()
    assert_equal((x.grad.tolist(), y.grad.tolist()), ([2.0] * 3, [3.0] * 3))


def test_double_backward_through_fork_and_join(device):
    x, y = leaf(3, device=device), leaf(3, device=device)
    forked, edge = fork(x)
    joined = join(y, edge)
    first = torch.autograd.grad((forked.exp() * joined.sin()).sum(), [x, y], create_graph=True)
    second = torch.autograd.grad(sum(gradient.sum() for gradient in first), [x, y])
    plain = torch.autograd.grad((x.exp() * y.sin()).sum(), [x, y], create_graph=True)
    assert_equal(second, torch.autograd.grad(sum(gradient.sum() for gradient in plain), [x, y]))


def test_complex_tensors(device):
    x = leaf(3, device=device, dtype=torch.complex64)
    forked, edge = fork(x)
    join(forked.abs(), edge).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.abs().sum(), x)[0])


def test_phony_has_no_elements_and_is_new_each_time(device):
    first, second = phony(device), phony(device)
    assert first.numel() == 0
    assert first.device.type == device.type
    assert first is not second


def test_phony_under_a_device_context_stays_on_its_device(device):
    with torch.device("meta"):
        assert phony(device).device.type == device.type
