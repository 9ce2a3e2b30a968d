"""From what is to be kept to what is saved."""
from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.graph.traced import joint_of, plan_of
from tests.helpers import leaf
from tests.slow import few
from torchckpt.errors import ArgumentError
from torchckpt.graph import mark
from torchckpt.graph.keep import POLICIES, Values, check_keep, kept_by, schedule_of
from torchckpt.planning.remat.flow.memory import simulate


class Layers(nn.Module):
    """Four of a product and a GELU; what is alive when the backward starts is spared, so the last ones are saved."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(layers))

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = mark(layer(x), f"out_{place}")
        return x.sum()


@pytest.fixture(scope="module")
def joint():
    torch.manual_seed(0)
    return joint_of(Layers(), torch.randn(64, 4))


def named(joint, storages):
    flow = joint.flow
    return sorted(flow.operations[flow.writer[storage]].name for storage in storages)


PRODUCTS, GELUS = ["addmm", "addmm_1", "addmm_2", "addmm_3"], ["gelu", "gelu_1", "gelu_2", "gelu_3"]


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        ("speed", PRODUCTS),
        ("collection", GELUS),
        (["out_1"], ["gelu_1"]),
        (["layers.1"], ["gelu_1"]),
        (["layers.1.0"], ["addmm_1"]),
        (["layers.*.0"], PRODUCTS),
        (["out_[12]"], ["gelu_1", "gelu_2"]),
        (["1.0", "out_3"], ["addmm_1", "gelu_3"]),
        (["ers.2"], ["addmm_2", "gelu_2"]),
        (("out_0",), ["gelu"]),
        (lambda value: value.flops > 0, PRODUCTS),
        (lambda value: "out_2" in value.marks, ["gelu_2"]),
        (lambda value: value.module == "layers.3.1", ["gelu_3"]),
        (lambda value: value.operator == "aten.gelu" and value.shape == (64, 4) and value.bytes == 1024, GELUS),
        (None, [*PRODUCTS, *GELUS, "sum_1"]),
    ],
    ids=str,
)
def test_kept(joint, keep, names):
    """A name as it is comes before a pattern, and a pattern before a part of names."""
    assert named(joint, kept_by(keep, Values(joint))) == names


def test_schedule_brings_back_what_is_dropped(joint):
    flow = joint.flow
    for keep in (None, "speed", "collection", ["out_1"]):
        schedule = schedule_of(keep, Values(joint))
        saved = named(joint, simulate(flow, schedule).saved)
        assert set(named(joint, kept_by(keep, Values(joint)))) & set(PRODUCTS) <= set(saved)
        assert simulate(flow, schedule).peak_bytes <= simulate(flow, flow.eager).peak_bytes


def test_speed_recomputes_no_product(joint):
    flow, schedule = joint.flow, schedule_of("speed", Values(joint))
    again = {flow.operations[index].name for place, index in enumerate(schedule) if index in schedule[:place]}
    assert again
    assert not again & {*PRODUCTS}


@pytest.mark.slow
def test_memory_of_a_long_chain_is_about_twice_its_root():
    """Of 100 nodes; TensorFlow's plan of it keeps ten, and recomputes the rest."""
    def chain(x):
        for _ in range(99):
            x = x.tanh()
        return x.sum()

    plan = plan_of(chain, leaf(1000), keep="memory")
    assert plan.eager_peak_bytes == 100 * 4000 + 8
    assert plan.peak_bytes <= 22 * 4000


# faults ---------------------------------------------------------------------------------------------------------------


def text_of(function, *args):
    with pytest.raises(ArgumentError) as caught:
        function(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keep", "near"), [("sped", "speed"), ("memry", "memory"), ("collect", "collection"), ("", "speed")]
)
def test_policy_that_is_unknown(keep, near):
    assert text_of(check_keep, keep) == (
        'keep is not one of "collection", "speed", "memory", a list of names, or a function\n'
        f"  received: {keep!r}\n"
        f'  works:    keep="{near}"; or keep=["{keep}"], if it is the name of a module or a mark'
    )


@pytest.mark.parametrize("keep", [b"speed", [1, 2], 3, ["a", None], {"a"}, 1.5, True])
def test_what_is_no_keep(keep):
    assert text_of(check_keep, keep) == (
        f'keep is not a policy, a list of names, or a function\n  received: {keep!r}\n  works:    keep="memory"'
    )


@pytest.mark.parametrize("keep", [None, *POLICIES, [], ["a"], ("a", "b"), len])
def test_what_is_a_keep(keep):
    check_keep(keep)


def test_names_that_are_unknown_are_all_listed(joint):
    text = text_of(kept_by, ["out_1", "layer.0", "attention"], Values(joint))
    assert text.startswith("2 faults\n")
    rule = "a name in keep is that of no module or mark of the traced call"
    assert f"{rule}\n  received: 'layer.0'\n  works:    keep=['" in text
    assert "  received: 'attention'" in text
    assert "'layers.0" in text


def test_names_where_there_are_none():
    joint = joint_of(lambda x: x.sin().sum(), leaf(3))
    assert text_of(kept_by, ["h"], Values(joint)).endswith('works:    graph.mark(h, "h") in the model, then keep=["h"]')


@few(1)
@pytest.mark.parametrize(
    ("keep", "received", "works"),
    [
        ([], "keep=[]", 'the name of a module that computes something, or keep="memory"'),
        (lambda value: False, "a function that returns False for every value", "keep=lambda value: value.flops > 0"),
        ("speed", 'keep="speed", but there is no convolution and no product', 'keep="memory"'),
        ("collection", 'keep="collection", but no value is marked', 'h = graph.mark(h, "h") in the model'),
    ],
    ids=["names", "function", "speed", "collection"],
)
def test_nothing_to_keep(keep, received, works):
    joint = joint_of(lambda x: x.sin().exp().sum(), leaf(3))
    rule = "keep selects no value"
    assert text_of(kept_by, keep, Values(joint)) == f"{rule}\n  received: {received}\n  works:    {works}"


def test_faults_of_a_traced_call_reach_the_caller():
    with pytest.raises(ArgumentError, match=re.escape('keep="collection", but no value is marked')):
        plan_of(lambda x: x.sin().sum(), leaf(3), keep="collection")
