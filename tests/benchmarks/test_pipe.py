"""The benchmark of ``Pipe``, its short versions: counts, bytes, bits, and seconds of simulated devices."""
from __future__ import annotations

import pytest

from tests.device import why_not
from tests.scripts import printed_by


@pytest.fixture(scope="module")
def found():
    return printed_by("pipe/short.py")


@pytest.fixture(scope="module", params=[0, 1], ids=["transformer stack", "conv net"])
def row(request, found):
    return found["ratios"][request.param]


def test_the_twin_and_ours_compute_what_the_plain_layers_do(found):
    assert found["twin and ours equal to plain"] == {
        f"{shape} layers, {mode}": True
        for shape in ("1 x 2", "1 x 8", "2 x 2", "4 x 2")
        for mode in ("never", "except_last", "always")
    }


def test_variants_of_micro_batches_have_equal_gradients_to_the_bit(row):
    differing = [name for name, equal in row["gradients bit-equal"].items() if not equal]
    assert set(differing) <= {"plain, one batch"}


def test_replays_are_those_of_two_stages_and_four_micro_batches(row):
    assert {name: count for name, count in row["replays"].items() if count} == {
        "Pipe, except_last": 2 * 3,
        "Pipe, always": 2 * 4,
        "Pipe.step, always": 4,  # all but on the last stage
    }


def test_a_pipe_keeps_what_its_mode_says(row):
    kept = row["kept"]
    assert kept["Pipe, never"] == kept["plain"]
    assert kept["Pipe, always"] == kept["torch.utils.checkpoint"] < kept["plain"] / 8
    assert kept["Pipe, always"] < kept["Pipe, except_last"] < kept["plain"] / 2


def test_a_step_needs_less_at_most_than_a_backward_of_all_micro_batches(row):
    assert row["peak"]["Pipe.step, never"] < row["peak"]["Pipe, never"] / 2
    assert row["peak"]["Pipe.step, always"] < row["peak"]["Pipe, always"]


@pytest.mark.parametrize("model", ["ResNet", "GPT"])
def test_late_and_early_recompute_the_same_regions(found, model):
    replays = found["large"][model]["replays"]
    assert replays["late"] == replays["Pipe, always"] == 2 * 4


@pytest.mark.parametrize("model", ["ResNet", "U-Net", "GPT"])
def test_all_modes_of_the_large_models_have_the_gradients_of_never(found, model):
    equal = found["large"][model]["equal to never"]
    late = [] if model == "U-Net" else ["late", "late, torch.utils.checkpoint"]
    assert {"Pipe, never", "Pipe, except_last", "Pipe, always", *late} <= set(equal)


def test_copies_are_throttled_inside_of_the_block_only(found):
    assert found["throttle"] == [[0.5], []]


def test_hidden_is_the_share_of_what_late_adds(found):
    assert found["hidden"] == [0.5, None, None]


# On simulated devices: the times are those of their clocks, which are exact ------------------------------------------


@pytest.fixture(scope="module")
def simulated():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    return printed_by("pipe/simulated.py", "--short")


@pytest.mark.slow
def test_steps_on_simulated_devices_take_what_the_model_says(simulated):
    off = simulated["measured over simulated, less 1"]
    assert len(off) == 8
    assert {name: share for name, share in off.items() if abs(share) > 0.07} == {}


@pytest.mark.slow
def test_recomputation_ahead_hides_what_the_model_says(simulated):
    for measured, on_paper in simulated["hidden, measured and simulated"].values():
        assert measured >= 0.9 * on_paper > 0
    assert simulated["ours / stock"]["1F1B"] <= 0.86
    assert simulated["ours / stock"]["GPipe"] < 0.95


@pytest.mark.slow
def test_devices_need_the_bytes_that_follow_from_the_sizes_of_their_stages(simulated):
    assert simulated["bytes other than predicted"] == []


@pytest.mark.slow
def test_replays_of_torchgpipes_graph_wait_for_the_stage_behind_and_ours_do_not(simulated):
    assert simulated["replays ahead"] == {
        "torchgpipe's graph": False,
        "its nodes on copy streams": True,
        "Pipe": True,
    }
