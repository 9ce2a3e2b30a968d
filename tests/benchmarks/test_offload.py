"""The benchmark of offloaded layers, its short version: bits, bytes, waits and races; no seconds."""
from __future__ import annotations

import pytest

from tests.device import why_not
from tests.scripts import printed_by
from tests.slow import slow

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no simulated device")
OURS = ["checkpoint_layers", "offload_layers", "offload_layers, every=2"]


@pytest.fixture(scope="module", params=[1, *slow([4])])
def runs(request):
    """Of each program that may race."""
    return request.param


@pytest.fixture(scope="module")
def found(runs):
    return printed_by("offload/beside.py", "--short", str(runs))


@pytest.fixture(scope="module")
def steps(found):
    return {row["way"]: row for row in found["steps"]}


def test_all_steps_have_the_gradients_of_the_plain_one(steps):
    assert [row["is_equal"] for row in steps.values()] == [True] * len(steps)
    assert {"keep all", "save_on_cpu", *OURS} <= set(steps)


def test_layers_wait_on_the_host_and_pin_memory_in_no_step(steps):
    assert [(steps[name]["waits"], steps[name]["pins"]) for name in OURS] == [(0, 0)] * 3
    assert steps["save_on_cpu"]["pins"] > 50


def test_two_regions_of_six_are_on_the_device(steps):
    assert steps["offload_layers"]["peak"] < 0.6
    assert steps["offload_layers"]["peak"] < steps["offload_layers, every=2"]["peak"] < 1


def test_nothing_of_ours_races_and_what_is_changed_in_place_is_an_error(found, runs):
    right, error = {"right": runs}, {"an error": runs}
    assert list(found["races"]["offload_layers"].values()) == [right, right, error]
    assert list(found["races"]["keep all"].values()) == [right, right, error]
    assert list(found["races"]["save_on_cpu"].values()) == [right, right, right]
