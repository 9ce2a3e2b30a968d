"""Where recomputes stand."""
from __future__ import annotations

from dataclasses import replace

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.model.place.placement import Policy, ahead, arrival, none, partial, with_recompute, without_recompute
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.schedule import Segments
from torchckpt.model.schedule.schedules import dualpipe_v, gpipe, one_f_one_b, zbv, zero_bubble
from torchckpt.model.simulation.simulator import simulate


def orders(schedule):
    return [" ".join(map(str, order)) for order in schedule.ranks]


def test_none():
    assert with_recompute(one_f_one_b(2, 2), none()) == one_f_one_b(2, 2)


def test_right_before_the_backward():
    expected = ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1R0 1B0 1F1 1R1 1B1"]
    assert orders(with_recompute(one_f_one_b(2, 2), ahead())) == expected
    late = with_recompute(one_f_one_b(2, 2), arrival())
    assert orders(late) == expected
    assert late.late == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_k_ahead_as_far_as_forwards_are_done():
    assert orders(with_recompute(one_f_one_b(2, 4), ahead(k=2))) == [
        "0F0 0F1 0R0 0R1 0B0 0F2 0R2 0B1 0F3 0R3 0B2 0B3",
        "1F0 1R0 1B0 1F1 1R1 1B1 1F2 1R2 1B2 1F3 1R3 1B3",
    ]


def test_split_backwards_recompute_before_the_input_gradients():
    assert orders(with_recompute(zero_bubble(1, 2), ahead())) == ["0F0 0R0 0I0 0W0 0F1 0R1 0I1 0W1"]


@pytest.mark.parametrize(
    ("exempt", "expected"),
    [
        ((), ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1F1 1R0 1B0 1R1 1B1"]),
        ("last_stage", ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1F1 1B0 1B1"]),
        ("last_micro_batch", ["0F0 0F1 0R0 0B0 0B1", "1F0 1F1 1R0 1B0 1B1"]),
        ("first_backward", ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1B0 1R1 1B1"]),
        ([(1, 1), "first_backward"], ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1B0 1B1"]),
        ({(0, 0), (1, 1)}, ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1R0 1B0 1B1"]),
    ],
)
def test_what_is_exempt(exempt, expected):
    for policy in [ahead(exempt=exempt), arrival(exempt)]:
        assert orders(with_recompute(gpipe(2, 2), policy)) == expected


def test_chosen_ones_only():
    schedule = with_recompute(gpipe(2, 2), ahead(only={(0, 1), (1, 0)}, exempt="last_stage"))
    assert orders(schedule) == ["0F0 0F1 0B0 0R1 0B1", "1F0 1F1 1B0 1B1"]


def test_with_costs_a_recompute_stands_where_its_rank_would_idle():
    policy = ahead(exempt="last_stage", costs=StageCosts(), link=Link(1.0))
    assert orders(with_recompute(one_f_one_b(3, 3), policy)) == [
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2",
        "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1B2",
        "2F0 2B0 2F1 2B1 2F2 2B2",
    ]


def test_greedy_does_not_idle_where_it_could_recompute():
    schedule, link = one_f_one_b(3, 6), Link(1.0)
    fixed = with_recompute(schedule, ahead(exempt="last_stage"))
    greedy = with_recompute(schedule, ahead(exempt="last_stage", costs=StageCosts(), link=link))
    #                                                     1F3, 1F4 not there yet: 1R2, 1R3 first
    assert orders(fixed)[1] == "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1F4 1R3 1B3 1F5 1R4 1B4 1R5 1B5"
    assert orders(greedy)[1] == "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1F3 1B2 1R3 1F4 1B3 1F5 1R4 1B4 1R5 1B5"
    assert [simulate(placed, link=link).step_seconds for placed in (fixed, greedy)] == [35, 34]


def test_without_recompute_is_the_way_back():
    for schedule in [gpipe(2, 3), one_f_one_b(3, 6), zero_bubble(4, 8, chunks=2), zbv(3, 6), dualpipe_v(2, 4)]:
        policies = [arrival("last_stage"), ahead(3), ahead(costs=StageCosts(), link=Link(0.5)), partial(1, 3)]
        for policy in [none(), *policies]:
            assert without_recompute(with_recompute(schedule, policy)) == schedule
        again = with_recompute(without_recompute(with_recompute(schedule, arrival())), ahead())
        assert again == with_recompute(schedule, ahead())


def test_partial_says_how_much_each_recompute_does():
    schedule = with_recompute(gpipe(2, 1), partial(1, 3))
    assert schedule.segments == (Segments(1, 3), Segments(1, 3))
    assert orders(schedule) == ["0F0 0R0 0B0", "1F0 1R0 1B0"]
    assert with_recompute(gpipe(2, 1), partial(3, 3)).segments == (Segments(3, 3), Segments(3, 3))
    assert with_recompute(gpipe(2, 1), ahead()).segments == ()


def test_a_policy_of_your_own():
    def right_after_the_forward(schedule):
        order = (Action(0, Kind.FORWARD, 0), Action(0, Kind.RECOMPUTE, 0), Action(0, Kind.BACKWARD, 0))
        return replace(schedule, ranks=(order,))

    assert orders(with_recompute(gpipe(1, 1), right_after_the_forward)) == ["0F0 0R0 0B0"]


def moved(action, to, late=()):
    """A policy that recomputes ``action`` on rank 0, before its action number ``to``."""

    def place(schedule):
        order = list(schedule.ranks[0])
        order.insert(to, action)
        return replace(schedule, ranks=(tuple(order), *schedule.ranks[1:]), late=frozenset(late))

    return place


RECOMPUTE = Action(0, Kind.RECOMPUTE, 0)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (ahead(k=0), r"with_recompute\(\): k is an integer >= 1\n.*k=0"),
        (ahead(k=1.5), r"k is an integer >= 1\n.*k=1\.5"),
        (partial(0, 4), r"1 <= early <= total segments; if no segment is early, use arrival\(\)\n.*early=0, total=4"),
        (partial(5, 4), r"1 <= early <= total segments.*\n.*early=5, total=4"),
        (ahead(exempt="last_stag"), r"one of last_stage, last_micro_batch, first_.*\n.*'last_stag'\n.*'last_stage'"),
        (ahead(exempt=[(2, 0)]), r"stages are 0 to 1, micro-batches 0 to 2\n.*\(2, 0\)"),
        (arrival(only=[(0, 3)]), r"stages are 0 to 1, micro-batches 0 to 2\n.*\(0, 3\)"),
        (arrival(only=[7]), r"stages are 0 to 1, micro-batches 0 to 2\n.*7"),
        (arrival(only=7), r"only is a collection of \(stage, micro-batch\)\n.*only=7"),
        (arrival(only="all"), r"only is a collection of \(stage, micro-batch\)\n.*only='all'"),
        (arrival(exempt=None), r"exempt is a collection of \(stage, micro-batch\)\n.*exempt=None"),
        ("ahead", r"a policy is a Policy, or a function that places each R\n.*'ahead'\n.*ahead\(\)"),
        (lambda schedule: None, r"a schedule is a Schedule\n.*None"),
        (ahead(costs=StageCosts(forward_seconds=-1)), r"finite numbers >= 0\n.*costs\.forward_seconds=-1"),
        (ahead(costs=[StageCosts()]), r"one StageCosts, or one for each of 2 stages\n.*1 of 2"),
        (ahead(costs=StageCosts(), link=Link(-2)), r"link\.latency_seconds=-2"),
        (Policy(k=0, exempt="x", segments=Segments(2, 1)), r"with_recompute\(\): 3 faults"),
        (moved(RECOMPUTE, 0), r"rank 0, action 0: 0R0 comes after its forward"),
        (moved(RECOMPUTE, 6), r"rank 0, action 6: 0R0 comes before its backward"),
        (moved(RECOMPUTE, 1, late=[(0, 1)]), r"only a recompute can be late\n.*no 0R1"),
        (moved(RECOMPUTE, 1, late=[(0, 0)]), r"rank 0, action 1: .* a deadlock\n.*0R0 waits for 1B0 of rank 1"),
        (lambda schedule: replace(schedule, segments=(Segments(),)), r"given for every stage, or for none"),
        (lambda schedule: replace(schedule, segments=(Segments(0, 1),) * 2), r"1 <= early <= total .*\n.*stage 0: "),
    ],
)
def test_bad_policies(policy, text):
    with pytest.raises(ArgumentError, match=text):
        with_recompute(gpipe(2, 3), policy)


def test_recomputing_twice():
    once = with_recompute(gpipe(2, 2), ahead())
    with pytest.raises(ArgumentError, match=r"recomputed once, so the schedule has no R yet\n.*'gpipe'"):
        with_recompute(once, arrival())
