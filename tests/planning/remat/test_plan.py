"""What a plan says of a step of five operations, as literals."""
from __future__ import annotations

import json
from base64 import b64decode
from html import escape

import pytest

from tests.planning.remat.random_flows import random_flow
from torchckpt.errors import ArgumentError
from torchckpt.planning.remat.flow.dataflow import Dataflow, Operation
from torchckpt.planning.remat.flow.late import late
from torchckpt.planning.remat.flow.memory import Memory
from torchckpt.planning.remat.plan import Plan

FLOW = Dataflow(
    (
        Operation("mm", (0,), (1,), 4.0, flops=100),
        Operation("dropout", (1,), (2, 3), 1.0, substitute=Operation("scale", (1, 3), (2,), 1.0, flops=1)),
        Operation("mm_1", (2,), (4,), 4.0, flops=200),
        Operation("back_1", (2,), (5,), 5.0),
        Operation("back", (1, 3, 5), (6,), 6.0),
    ),
    (1000, 100, 100, 25, 4, 60, 70), 3, frozenset({0}), frozenset({4, 6}),
)
"""A product, a dropout with a mask of 25 bytes, a product that is the output; each has a gradient."""

PATHS = ("body", "body.drop", "head", "head", "body")


@pytest.fixture
def plan():
    """The output of the dropout is recomputed by its mask."""
    return Plan(FLOW, (0, 1, 2, 1, 3, 4), PATHS, {"body": (2,), "h": (1,)}, 400)


def test_figures(plan):
    assert plan.memory == Memory((100, 225, 229, 229, 289, 259), 3, (1, 3))
    assert (plan.peak_bytes, plan.eager_peak_bytes, plan.lower_bound) == (289, 289, 259)
    assert (plan.recompute_flops, plan.recompute_share) == (1, 1 / 20)
    assert plan.boundary == 3


def test_names_of_what_is_saved_recomputed_and_run(plan):
    assert plan.saved == ("mm", "dropout")
    assert plan.recomputed == ("dropout",)
    assert plan.order == ("mm", "dropout", "mm_1", "dropout", "back_1", "back")


def test_plan_of_the_eager_step_recomputes_nothing():
    plan = Plan(FLOW, tuple(FLOW.eager), PATHS)
    assert (plan.recomputed, plan.recompute_flops, plan.recompute_share) == ((), 0, 0.0)
    assert plan.peak_bytes == plan.eager_peak_bytes
    assert Plan(Dataflow((), (), 0), (), ()).recompute_share == 0.0


def test_printed(plan):
    assert str(plan).splitlines()[:5] == [
        "peak         289 B  100.0 % of eager",
        "budget       400 B  138.4 % of eager",
        "eager peak   289 B  100.0 % of eager",
        "lower bound  259 B   89.6 % of eager",
        "recompute             5.0 % of the eager step's time",
    ]
    assert repr(plan) == "<Plan: 289 B of 289 B, +5.0%>"
    assert "(root)" in str(Plan(FLOW, tuple(FLOW.eager), ("",) * 5))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("body", ["mm: 100 B, saved", "dropout: 125 B, 25 B of it saved, the rest dropped, recomputed 1x (1 FLOPs)",
                  "back: 70 B, backward"]),
        ("body.drop", ["dropout: 125 B, 25 B of it saved, the rest dropped, recomputed 1x (1 FLOPs)"]),
        ("head", ["mm_1: 4 B, dropped after its last use", "back_1: 60 B, backward"]),
        ("h", ["mm: 100 B, saved"]),
        ("back", ["back: 70 B, backward"]),
    ],
    ids=["module", "module inside", "module of an output", "mark", "operation"],
)
def test_explained(plan, name, lines):
    assert plan.explain(name).splitlines() == [f"{name}:", *(f"  {line}" for line in lines)]


@pytest.mark.parametrize(("name", "near"), [("bdy", "body"), ("droput", "dropout"), ("", "back")])
def test_name_that_is_none(plan, name, near):
    with pytest.raises(ArgumentError) as caught:
        plan.explain(name)
    assert str(caught.value) == (
        "plan.explain(): the plan has no module, mark or operation of this name\n"
        f"  received: {name!r}\n  works:    plan.explain({near!r})"
    )


def test_drawn_and_written(plan, tmp_path):
    text = plan.draw(tmp_path / "plan.svg", title="A step")
    assert text.startswith("<svg")
    assert "A step" in text
    assert (tmp_path / "plan.svg").read_text() == text == plan.draw(title="A step")


# as text --------------------------------------------------------------------------------------------------------------


def test_json_has_all_of_it(plan):
    twin = Plan.from_json(plan.to_json())
    assert twin == plan
    assert str(twin) == str(plan)
    stored = json.loads(plan.to_json())
    assert stored["format"] == 1
    assert [operation["again"]["name"] for operation in stored["flow"]["operations"] if operation["again"]] == ["scale"]


def test_json_of_random_steps():
    for seed in range(20):
        flow = random_flow(seed, 20)
        plan = Plan(flow, tuple(late(flow, set())), ("",) * len(flow.operations))
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "JSONDecodeError"),
        ("junk", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("null", "TypeError"),
        ("{}", "KeyError('format')"),
        ('{"format": 2}', "KeyError(2)"),
        ('{"format": 1}', "KeyError('flow')"),
        (None, "TypeError"),
        (b"\xff", "UnicodeDecodeError"),
    ],
)
def test_junk(text, cause):
    with pytest.raises(ArgumentError) as caught:
        Plan.from_json(text)
    message = str(caught.value)
    rule = "Plan.from_json(): the text is no plan that plan.to_json() wrote"
    assert message.startswith(f"{rule}\n  received: {text!r} (")
    assert cause in message
    assert message.endswith("works:    Plan.from_json(plan.to_json())")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"schedule": [99]}, "IndexError"),
        ({"schedule": [0, 1]}, "the schedule does not run every operation"),
        ({"schedule": ["a"]}, "TypeError"),
        ({"names": []}, "AttributeError"),
        ({"paths": 3}, "TypeError"),
    ],
)
def test_plan_of_no_schedule(plan, change, cause):
    with pytest.raises(ArgumentError, match=cause) as caught:
        Plan.from_json(json.dumps({**json.loads(plan.to_json()), **change}))
    assert caught.value.__cause__ is not None


def test_lowered_is_the_same_with_less_in_each_operation(plan):
    less = plan.lowered(1)
    assert less.peak_bytes == plan.peak_bytes - 1
    assert (less.schedule, less.recomputed) == (plan.schedule, plan.recomputed)
    assert Plan.from_json(less.to_json()) == less


def test_notebook_shows_the_picture_and_the_table(plan):
    assert plan._repr_svg_() == plan.draw()
    image, table = plan._repr_html_().split("\n", 1)
    data = image.partition("base64,")[2].partition('"')[0]
    assert b64decode(data).decode() == plan.draw()
    assert "<style>" not in plan._repr_html_()
    assert f"<pre>{escape(str(plan))}</pre>" in table
