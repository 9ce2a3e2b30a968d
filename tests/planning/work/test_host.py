"""A host as users write it, and every way in which it can be wrong."""
from __future__ import annotations

import pytest

from torchckpt.errors import ArgumentError
from torchckpt.planning import Host, Stage, one_f_one_b
from torchckpt.planning.plan import plan_bound, plan_pipeline
from torchckpt.planning.work.block import Block


def test_sizes_and_numbers():
    host = Host("2KiB", out="1.5kB")
    assert (host.bytes_of(2), host.out_rate, host.back_rate) == ((2048.0, 2048.0), 1500.0, 1500.0)
    assert Host(["1kB", 3], out=0.25, back="2 kB").bytes_of(2) == (1000.0, 3.0)
    assert Host(1, out=0.25, back="2 kB").back_rate == 2000.0
    assert hash(Host([1, 2], out=1)) == hash(Host((1, 2), out=1))


BYTES = 'Host(): the bytes of a host are not a number of at least 1, or a size such as "200GiB"\n  received: '
LINK = 'Host(): the link to a host is not a number of bytes a second above 0, or a size such as "25GB"\n  received: '
WORKS = '\n  works:    Host("200GiB", out="25GB", back="25GB")'
ROOM = '\n  works:    "200GiB", or a list with one for each rank'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), f"{BYTES}0{ROOM}"),
        ((-5, 1), f"{BYTES}-5{ROOM}"),
        ((0.5, 1), f"{BYTES}0.5 (less than a byte; a share is text){ROOM}"),
        (("200", 1), f"{BYTES}'200' (it has no unit){ROOM}"),
        (("50%", 1), f"{BYTES}'50%'{ROOM}"),
        (("2 boxes", 1), f"{BYTES}'2 boxes' (boxes is not a unit){ROOM}"),
        ((float("inf"), 1), f"{BYTES}inf{ROOM}"),
        ((None, 1), f"{BYTES}None{ROOM}"),
        (([4, 0], 1), f"{BYTES}0{ROOM}"),
        ((1, 0), f"{LINK}out=0{WORKS}"),
        ((1, -2.0), f"{LINK}out=-2.0{WORKS}"),
        ((1, "25"), f"{LINK}out='25' (it has no unit){WORKS}"),
        ((1, True), f"{LINK}out=True{WORKS}"),
        ((1, 1, 0), f"{LINK}back=0{WORKS}"),
        ((1, 1, float("nan")), f"{LINK}back=nan{WORKS}"),
        ((1, 1, 1, False, -1), "Host(): the drag of a host is not a number of seconds >= 0 for each second of copying\n"
         "  received: drag=-1\n  works:    drag=0.02"),
        ((10**400, 1), f"{BYTES}{'1' + '0' * 400}{ROOM}"),
        ((1, 1, 10**400), f"{LINK}back={'1' + '0' * 400}{WORKS}"),
        ((1, 1, 1, "no"), "Host(): half_duplex is not True or False\n  received: half_duplex='no'\n"
         "  works:    half_duplex=True"),
    ],
)  # fmt: skip
def test_what_it_is_not(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        Host(*arguments)
    assert str(caught.value) == message


def test_all_faults_at_once():
    with pytest.raises(ArgumentError, match="3 faults"):
        Host(0, out=0, drag=-1)


STAGES = [Stage((Block(boundary_bytes=0.06),) * 2)] * 2


@pytest.mark.parametrize("plan", [plan_pipeline, plan_bound])
def test_a_list_has_one_for_each_rank(plan):
    with pytest.raises(ArgumentError) as caught:
        plan(one_f_one_b(2, 4), STAGES, "50%", host=Host([1, 2, 3], out=1))
    assert str(caught.value) == (
        f"{plan.__name__}(): the bytes of a host are neither one for every rank nor a list of 2\n"
        "  received: 3 amounts\n"
        "  works:    1, or a list with one for each rank"
    )


def test_a_size_is_no_host():
    with pytest.raises(ArgumentError, match=r"plan_pipeline\(\): host is not a Host\n  received: host='200GiB'\n"):
        plan_pipeline(one_f_one_b(2, 4), STAGES, "50%", host="200GiB")
