"""What a plan says of itself: tables, one line, JSON, a picture."""
from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.planning.plan.published import CASES, gpt
from torchckpt.errors import ArgumentError
from torchckpt.planning import Action, Block, Kind, Stage, one_f_one_b, zero_bubble
from torchckpt.planning.plan import PipelinePlan, plan_pipeline
from torchckpt.planning.plan.figures import WholeStep
from torchckpt.planning.plan.result import _runs


@pytest.fixture(scope="module")
def plan():
    schedule, stages, link = CASES["A"]
    return plan_pipeline(schedule, stages, "50%", link)


def test_a_longer_step_that_recomputes_nothing_says_why():
    even, last = Stage((Block(),) * 2), Stage((Block(1.2, 1.2, 1.2, 1.2, 1.5),) * 2)
    plan = plan_pipeline(zero_bubble(4, 8), [even, even, even, last], 9)
    assert max(plan.problem.keep_all.peak_bytes) == 12
    assert plan.summary == (
        "step 64.4, +1.3 % over keeping all (bound +1.3 %); nothing is recomputed, as another order of the actions "
        "holds little enough"
    )


def test_the_line_that_people_quote(plan):
    assert str(plan).split("\n")[-1] == plan.summary == (
        "step 283.0, +6.8 % over keeping all (bound +6.8 %); recomputing all +32.5 %, "
        "the same 5 blocks on every stage +20.8 %"
    )


def test_the_tables():
    plan = plan_pipeline(one_f_one_b(2, 3), [Stage((Block(boundary_bytes=0.25),) * 2)] * 2, 3.0)
    assert str(plan).split("\n\n") == [
        "1f1b: 2 stages on 2 ranks, 3 micro-batches",
        "stage  rank  blocks  bytes  recomputed  seconds  kept/early/late\n"
        "0         0       2      2      50.0 %        3  2/0/0, 0/0/2, 1/0/1\n"
        "1         1       2      2       0.0 %        0  2/0/0 x3",
        "blocks kept/early/late by micro-batch: kept; recomputed before the gradient arrives; inside the backward",
        "rank  peak  budget    idle\n0      2.5       3  16.0 %\n1        2       3  28.0 %",
        "step 25.0, +4.2 % over keeping all (bound +4.2 %); recomputing all +33.3 %, "
        "the same block on every stage +16.7 %",
    ]


def test_sizes_of_real_models_have_units():
    block = Block(1e-3, 1e-3, 1e-3, 1e-3, 64e6, 4e6, static_bytes=1.5e9)
    plan = plan_pipeline(one_f_one_b(2, 4), [Stage((block,) * 4)] * 2, "0.4GB")
    ranks = str(plan).split("\n\n")[3].split("\n")
    assert ranks[0].split("  ")[-1] == "parameters and optimizer"
    assert ranks[1].split()[3:5] == ["400", "MB"]
    assert ranks[1].endswith("6000 MB")


def test_json_and_back(plan):
    text = plan.to_json()
    again = PipelinePlan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    json.loads(text, parse_constant=pytest.fail)  # no Infinity: other readers refuse it
    assert (str(again), again.timeline) == (str(plan), plan.timeline)


def test_json_of_moved_blocks_and_back():
    schedule, stages, link = CASES["D"]
    plan = plan_pipeline(schedule, stages, "70%", link, balance=True)
    again = PipelinePlan.from_json(plan.to_json())
    assert plan.asked is not None
    assert (again, again.asked) == (plan, plan.asked)
    assert again.summary == plan.summary


def test_json_has_what_stages_wait_for_their_own_collectives():
    stage = Stage((Block(boundary_bytes=0.1),) * 4, collective_seconds=0.25)
    plan = plan_pipeline(one_f_one_b(2, 3), [stage] * 2, "50%")
    stored = json.loads(plan.to_json())
    assert PipelinePlan.from_json(json.dumps(stored)) == plan
    for stage in stored["stages"]:
        del stage["collective_seconds"]  # as in plans of earlier releases
    assert PipelinePlan.from_json(json.dumps(stored)).choices == plan.choices


def change(text, name, value):
    return json.dumps({**json.loads(text), name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 9), ("given", "0F0"), ("planned", 3), ("stages", []), ("choices", []), ("budget_bytes", [1.0]),
        ("choices", [[[[0], [], []]] * 8] * 4), ("links", [[0.0]]), ("stages", [{"blocks": []}] * 4), ("balance", None),
    ],
)  # fmt: skip
def test_other_json_is_refused(plan, name, value):
    with pytest.raises(ArgumentError):
        PipelinePlan.from_json(change(plan.to_json(), name, value))


def early(stored):
    """The first visit that is recomputed early: of ``choices`` its stage and micro-batch."""
    return next((stage, i) for stage, own in enumerate(stored["choices"]) for i, one in enumerate(own) if one[1])


def without_a_recompute(stored):
    stage, i = early(stored)
    stored["planned"] = stored["planned"].replace(f"{stage}R{i},", "", 1)


def with_another_order(stored):
    stored["planned"] = stored["planned"].replace("0F0,0F1", "0F1,0F0", 1)


def with_late_blocks_alone(stored):
    stage, i = early(stored)
    kept, again, late = stored["choices"][stage][i]
    stored["choices"][stage][i] = [kept, [], sorted(again + late)]


def with_all_kept(stored):
    stored["choices"] = [[[[*kept, *again, *late], [], []] for kept, again, late in own] for own in stored["choices"]]
    stored["planned"] = stored["given"]


def with_less_to_hold(stored):
    stored["budget_bytes"][2] /= 2


def with_no_budget(stored):
    stored["budget_bytes"][2] = float("nan")


@pytest.mark.parametrize(
    ("edit", "received"),
    [
        (without_a_recompute, r"stage \d, micro-batch \d: \d early blocks, no R"),
        (with_late_blocks_alone, r"stage \d, micro-batch \d: 0 early blocks, an R"),
        (with_another_order, "rank 0 has another order of forwards and backwards"),
        (with_all_kept, "rank 0 holds 32.08 bytes, its budget is 16.04"),
        (with_less_to_hold, "rank 2 holds 16 bytes, its budget is 8.02"),
        (with_no_budget, "4 amounts of bytes"),
        (lambda stored: stored.update(balance=[]), r"balance \[\] for \[8, 8, 8, 7\] blocks"),
        (lambda stored: stored.update(balance=[8, 8, 8, 8]), r"balance \[8, 8, 8, 8\] for "),
        (lambda stored: stored.update(balance=[8, 8, 8, 7, 0]), r"balance \[8, 8, 8, 7, 0\] for "),
        (lambda stored: stored.update(budget_bytes=stored["budget_bytes"][:1]), "1 budgets of 4 ranks"),
        (lambda stored: stored.update(budget_bytes=[]), "0 budgets of 4 ranks"),
        (lambda stored: stored.update(alone=[float("nan"), 3.0]), r"\[nan, 3.0\] seconds of recomputing and"),
        (lambda stored: stored.update(alone=[2.0, -1.5]), r"\[2.0, -1.5\] seconds of recomputing and offloading"),
        (lambda stored: stored.update(rules=[[1.0, -3, [1.0] * 4]] * 2), "a rule of -3 blocks"),
        (lambda stored: stored.update(rules=[[1.0, 1.5, [1.0] * 4]] * 2), "a rule of 1.5 blocks"),
        (lambda stored: stored.update(rules=[[1.0, 1, [1.0] * 3]] * 2), "3 amounts of bytes"),
        (lambda stored: stored.update(rules=[[1.0, 1, [1.0] * 4]]), "1 rules"),
        (lambda stored: stored["choices"].append(stored["choices"][0]), "choices of 40 visits, of 4 stages x 8 micro"),
        (lambda stored: stored["choices"][1].append([[0], [], []]), "choices of 33 visits, of 4 stages x 8 micro"),
        (lambda stored: stored["stages"][0]["blocks"][0].update(saved_bytes=1e308), ""),
        (lambda stored: stored["stages"][0]["blocks"][0].update(forward_seconds=1e308), ""),
    ],
)
def test_what_does_not_add_up_is_refused(plan, edit, received):
    stored = json.loads(plan.to_json())
    edit(stored)
    with pytest.raises(ArgumentError, match=rf"the text is no plan that to_json\(\) wrote\n  received: {received}"):
        PipelinePlan.from_json(json.dumps(stored))


def test_the_bound_is_counted_again(plan):
    assert PipelinePlan.from_json(change(plan.to_json(), "bound_seconds", 1.0)).bound_seconds == plan.bound_seconds


def test_budgets_below_one_come_back():
    """Bytes may count in any unit."""
    plan = plan_pipeline(one_f_one_b(2, 2), [Stage((Block(saved_bytes=0.25),) * 2)] * 2, "60%")
    assert max(plan.problem.budget_bytes) < 1
    assert PipelinePlan.from_json(plan.to_json()) == plan


def test_the_bytes_of_a_whole_step_come_back(plan):
    made = replace(plan, whole_step=WholeStep((80.0,) * 4, (79.0,) * 4))
    again = PipelinePlan.from_json(made.to_json())
    assert again == made
    assert "\n0       79      80 " in str(again)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "null"])
def test_no_json_is_refused(text):
    with pytest.raises(ArgumentError, match="the text is no plan that to_json"):
        PipelinePlan.from_json(text)


def test_the_picture_has_the_memory_of_each_rank_under_its_budget(plan):
    drawn = ElementTree.fromstring(plan.draw())
    name = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in drawn.iter(f"{name}text")]
    assert [words.count(f"memory {rank}") for rank in range(4)] == [2] * 4
    assert "planned" in words
    lines = [element for element in drawn.iter(f"{name}line") if element.get("class") == "budget"]
    assert len(lines) == 2 * 4 + 1  # and the legend's


@pytest.mark.parametrize("make", [lambda: CASES["A"][0], lambda: zero_bubble(2, 4)])
def test_what_backwards_recompute_is_drawn_as_recomputes(make):
    schedule = make()
    stages = [Stage((Block(boundary_bytes=0.25, recompute_seconds=0.5),) * 4)] * schedule.stages
    plan = plan_pipeline(schedule, stages, "60%")
    late = {visit for visit, choice in plan.choices.items() if choice.late}
    assert late
    shown = plan.timeline
    actions = [event.action for event in shown.events if event.action.kind is Kind.RECOMPUTE]
    of_its_own = [action for order in plan.schedule.ranks for action in order if action.kind is Kind.RECOMPUTE]
    assert sorted(actions) == sorted([*of_its_own, *(Action(stage, Kind.RECOMPUTE, i) for stage, i in late)])
    seconds = sum(event.end_seconds - event.start_seconds for event in shown.events if event.action in actions)
    assert seconds == pytest.approx(sum(plan.recompute_seconds))


def test_a_notebook_shows_the_picture(plan):
    assert plan._repr_svg_() == plan.draw()


def test_the_picture_is_written_to_a_file(plan, tmp_path):
    for number, drawn in enumerate((plan, plan.timeline)):
        file = tmp_path / f"{number}.svg"
        assert drawn.draw(file) == drawn.draw() == file.read_text(encoding="utf-8")


def test_shares(plan):
    assert plan.balance == (8, 8, 8, 7)
    every = sum(len(stage.blocks) for stage in gpt(8, 8, 8, 7)) * 8
    assert plan.recomputed_share == pytest.approx(sum(plan.recompute_seconds) / every)
    assert plan.step_seconds == pytest.approx(plan.bound_seconds)


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        ("a", "a"),
        ("ab", "a, b"),
        ("aaab", "a x3, b"),
        ("abab", "(a, b) x2"),
        ("cababaa", "c, (a, b) x2, a x2"),
        ("abcabcabcd", "(a, b, c) x3, d"),
        ("", ""),
    ],
)
def test_micro_batches_alike_are_written_once(letters, text):
    assert _runs(letters) == text
