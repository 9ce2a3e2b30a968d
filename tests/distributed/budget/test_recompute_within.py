"""A schedule with a byte budget, or with a plan: the numbers are torch's, and regions do what the plan tells them."""
from __future__ import annotations

import functools
import re
import weakref
from contextlib import suppress
from itertools import product

import pytest
import torch
from torch import nn

from tests.distributed.ranks import attempted, on_ranks
from tests.distributed.stages import (
    OLD,
    V_SHAPED,
    Block,
    Blocks,
    batch,
    equal,
    events,
    parameters_of,
    run,
    schedule_on,
    stages_of,
    step,
    train,
)
from tests.helpers import doing
from tests.settings import with_gloo, without_collector
from tests.slow import few, selected, slow, slow_but
from torchckpt import checkpoint_module
from torchckpt.distributed import recompute_ahead, schedule_of
from torchckpt.errors import ArgumentError, BudgetInfeasible, ScheduleError
from torchckpt.planning import Action, Choice, Kind, Schedule, Stage, with_recompute
from torchckpt.planning import Block as Work
from torchckpt.planning.plan import PipelinePlan, plan_pipeline
from torchckpt.testing import count_recomputes

pytestmark = with_gloo

NAMES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", *V_SHAPED)
ROWS = 64  # so that activations, not gradients, take most of the bytes
STEPS = 7  # four that are measured, and three that follow the plan
CASES = [*((name, "85%") for name in NAMES), ("Schedule1F1B", "1GB"), ("ScheduleInterleavedZeroBubble", "1GB")]
ON_TWO_RANKS = [case if number in (1, 3, 5, 6) else slow([case])[0] for number, case in enumerate(CASES)]
_OLD_V = pytest.mark.skipif(OLD, reason="torch 2.11 alone: gloo cannot send to itself")


_ON_ONE_RANK = [pytest.param(*case, marks=() if case[0] in NAMES[:2] else _OLD_V) for case in CASES]


def trained(schedule, stages, m):
    return train(schedule, stages, m, STEPS, ROWS)


def same_within(name, budget):
    """Whether all is equal; whether bytes were within the budget; how many blocks were recomputed, and how many split
    backwards became whole ones."""
    seen = {}

    def drive(schedule, stages, m):
        found = trained(schedule, stages, m)
        report = schedule.report()
        peaks = zip(report.measured_peak_bytes, report.budget_bytes)
        seen["fits"] = all(peak <= budget for peak, budget in peaks)
        choices = schedule.plan.choices.values()
        seen["recomputed"] = sum(len(one.early) + len(one.late) for one in choices)
        seen["whole"] = splits_of(schedule._plain_schedule) - splits_of(schedule.plan.schedule)
        seen["report"] = str(report)
        return found

    expected = run(name, None, trained)
    return equal(run(name, {"budget": budget}, drive), expected), seen


def splits_of(schedule):
    """How many backwards are split."""
    return sum(action.kind is Kind.INPUT_GRAD for rank in schedule.ranks for action in rank)


# numbers --------------------------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("name", "budget"), _ON_ONE_RANK)
def test_all_stages_on_one_rank(name, budget):
    try:
        is_equal, seen = same_within(name, budget)
    except BudgetInfeasible as error:  # 1F1B on one rank holds one micro-batch, whatever is recomputed
        is_equal, seen = same_within(name, error.least_bytes)
    assert is_equal
    assert seen["fits"]
    assert (seen["recomputed"] > 0) == (budget != "1GB")


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "is_nested"),
    slow_but(
        [("ScheduleGPipe", True), ("ScheduleInterleaved1F1B", False)],
        product(["ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"], [False, True]),
    ),
)
def test_all_of_a_share_is_what_keeping_everything_takes(name, is_nested):
    class Around(Nested):
        def forward(self, x):
            return self.both(x)

    make = Around if is_nested else Blocks
    kept, share = (step_with({"budget": budget}, 6, name, make).report() for budget in ("1GB", "100%"))
    assert share.plan.recomputed_share == kept.plan.recomputed_share == 0
    assert share.budget_bytes == kept.planned_peak_bytes
    assert kept.measured_peak_bytes <= kept.planned_peak_bytes


@pytest.mark.parametrize("case", ON_TWO_RANKS, ids="-".join)
def test_two_ranks(reported, case):
    for report in reported:
        is_equal, seen = report[case]
        assert is_equal
        assert seen["fits"]
        assert (seen["recomputed"] + seen["whole"] > 0) == (case[1] != "1GB")


@pytest.fixture(scope="module")
def reported(request, tmp_path_factory):
    cases = selected(request, "case")
    return on_ranks(functools.partial(report_of_rank, cases=cases), tmp_path_factory.mktemp("ranks"))


def report_of_rank(rank, cases):
    report = {case: attempted(same_within, *case) for case in cases}
    report["budgets"] = attempted(step_with, {"budget": "1GB" if rank else "2GB"})
    report["plans"] = attempted(step_with, {"plan": all_late("Schedule1F1B", 2, kept=rank)})
    mode = {"plan": all_late("Schedule1F1B", 2)} if rank else {"budget": "1GB"}
    report["budget and plan"] = attempted(step_with, mode)
    report["one budget"] = attempted(kept_of, {"budget": [1e9, "1000MB"] if rank else "1GB"})
    report["none"] = attempted(step_with, {"budget": "1GB"} if rank else {})
    report["plan or none"] = attempted(step_with, {} if rank else {"plan": all_late("Schedule1F1B", 2)})
    report["costs"] = attempted(step_with, {} if rank else {"costs": "measured"})
    report["segments"] = attempted(step_with, {"segments": 1} if rank else {})
    report["exempt"] = attempted(step_with, {"exempt": "none"} if rank else {})
    report["visits"] = attempted(step_with, {"exempt": [(0, rank)]})
    report["micro-batches"] = attempted(step_with, {"budget": "1GB"}, 4, "Schedule1F1B", Blocks, 4 - 2 * rank)
    report["least"] = attempted(step_with, {"budget": 1000})
    return report


def step_with(mode, steps=4, name="Schedule1F1B", make=Blocks, m=4):
    stages = stages_of(name, make)
    schedule = recompute_ahead(schedule_on(stages, name, m), **mode)
    for _ in range(steps):
        fresh_step(schedule, stages)
    return schedule


def kept_of(mode):
    """The share of the blocks that is recomputed after the first steps."""
    return step_with(mode).plan.recomputed_share


def fresh_step(schedule, stages, rows=ROWS):
    """One that begins without gradients."""
    for parameter in parameters_of(stages):
        parameter.grad = None
    return step(schedule, stages, *batch(4, rows))


# what a visit is told -------------------------------------------------------------------------------------------------


def given(name, choices, actions=None, stages=None):
    """A plan of ``name`` on one rank, as somebody may have made it by hand; ``actions`` in place of the schedule's."""
    live = schedule_of(schedule_on(stages_of(name, Blocks), name, 4))
    blocks = stages or [Stage((Work(boundary_bytes=0.25),) * 2)] * live.stages
    problem = plan_pipeline(live, blocks, "100%").problem
    order = live if actions is None else Schedule(live.name, (tuple(actions),), live.placement, live.micro_batches)
    return PipelinePlan.of(problem, order, choices)


def all_late(name, stages, kept=0):
    """Of two blocks each; the last ``kept`` are kept."""
    live = schedule_of(schedule_on(stages_of(name, Blocks), name, 4))
    problem = plan_pipeline(live, [Stage((Work(boundary_bytes=0.25),) * 2)] * stages, "100%").problem
    choice = Choice((0, 1)[2 - kept :], (), (0, 1)[: 2 - kept])
    return PipelinePlan.of(problem, live, {(j, i): choice for j in range(stages) for i in range(4)})


def actions(text):
    return [Action(int(word[0]), Kind(word[1]), int(word[2:])) for word in text.split()]


@pytest.mark.usefixtures("alone")
def test_regions_do_what_the_plan_says():
    """Of GPipe on one rank: micro-batch 0 keeps all, 1 the last block, 2 has the last one early, 3 all late."""
    choices = {
        (0, 0): Choice((0, 1)),
        (0, 1): Choice((1,), (), (0,)),
        (0, 2): Choice((), (1,), (0,)),
        (0, 3): Choice((), (), (0, 1)),
    }
    plan = given("ScheduleGPipe", choices, actions("0F0 0F1 0F2 0F3 0R2 0B0 0B1 0B2 0B3"))
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), plan=plan)
    step(schedule, stages, *batch(4))
    events.clear()
    reaches = schedule.reaches
    schedule.reaches = lambda action: (events.append(action), reaches(action))
    step(schedule, stages, *batch(4))
    assert [event for event in events if "SHARD" not in event and "REDUCE" not in event] == [
        *("0F0", "plain call 0.0", "plain call 0.1"),
        *("0F1", "forward 0.0", "plain call 0.1"),
        *("0F2", "forward 0.0", "forward 0.1"),
        *("0F3", "forward 0.0", "forward 0.1"),
        *("0R2", "replay 0.1"),
        "0B0",
        *("0B1", "replay 0.0"),
        *("0B2", "replay 0.0"),
        *("0B3", "replay 0.1", "replay 0.0"),
    ]


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_plan_that_was_made_before_is_followed_from_the_first_step(kept, tmp_path):
    plan = all_late("ScheduleGPipe", 1, kept)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    expected = run("ScheduleGPipe", None)
    for form in (plan, plan.to_json(), path, str(path)):
        with count_recomputes() as recomputes:
            assert equal(run("ScheduleGPipe", {"plan": form}), expected)
        assert recomputes.total == 3 * 4 * (2 - kept)


@pytest.mark.usefixtures("alone")
def test_the_plan_of_a_run_is_what_another_run_takes():
    first = step_with({"budget": "1GB"}, name="ScheduleGPipe")
    second = step_with({"plan": first.plan.to_json()}, 1, name="ScheduleGPipe")
    assert second.plan.choices == first.plan.choices


@pytest.mark.usefixtures("alone")
def test_weight_gradients_are_where_the_plan_has_them():
    """Of a rank with two stages: weight gradients right behind those of the inputs, which torch merges into none."""
    name = "ScheduleInterleavedZeroBubble"
    if OLD:
        pytest.skip("torch 2.11 alone: gloo cannot send to itself")
    live = schedule_of(schedule_on(stages_of(name, Blocks), name, 4))
    order = [action for action in live.ranks[0] if action.kind is not Kind.WEIGHT_GRAD]
    moved = []
    for action in order:
        moved.append(action)
        if action.kind is Kind.INPUT_GRAD:
            moved.append(action._replace(kind=Kind.WEIGHT_GRAD))
    choices = {(j, i): Choice((), (), (0, 1)) for j in range(2) for i in range(4)}
    plan = given(name, choices, moved)
    expected = run(name, None)
    seen = []

    def drive(schedule, stages, m):
        seen.append(schedule.schedule.ranks[0])
        return train(schedule, stages, m)

    assert equal(run(name, {"plan": plan}, drive), expected)
    assert seen == [tuple(moved)]


@pytest.mark.usefixtures("alone")
def test_evaluation_follows_no_plan():
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    for _ in range(5):
        step(schedule, stages, *batch(4))
    with torch.no_grad():
        assert schedule.eval(batch(4)[0], target=batch(4)[1], losses=[]).shape == batch(4)[0].shape
    assert schedule.plan is not None


# stages ---------------------------------------------------------------------------------------------------------------


def half(stage):
    return Blocks(stage, regions="none" if stage else "ours")


@_OLD_V
@pytest.mark.usefixtures("alone")
def test_the_bytes_of_a_stage_without_regions_are_fixed():
    schedule = step_with({"budget": "1GB"}, 6, "ScheduleInterleaved1F1B", half)
    first, second = schedule.plan.problem.stages
    assert (len(first.blocks), len(second.blocks)) == (2, 0)
    assert second.saved_bytes > 0
    assert schedule.plan.choices[1, 0] == Choice(())
    assert schedule.report().measured_peak_bytes == schedule.report().planned_peak_bytes


@pytest.mark.usefixtures("alone")
def test_no_stage_with_regions():
    text = (
        "recompute_ahead(): no stage has regions, so nothing can be recomputed to meet the budget\n"
        "  received: stages whose forwards entered none\n"
        "  works:    for block in stage_module.layers: torchckpt.checkpoint_module(block)"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(text)}$"):
        step_with({"budget": "1GB"}, 4, "ScheduleGPipe", functools.partial(Blocks, regions="none"))


@pytest.mark.usefixtures("alone")
def test_bytes_are_counted_by_region():
    """A block saves its input, two arrays of twice its width, and what a dropout has dropped. The input of the first
    one is that of the step, which is there before."""
    schedule = step_with({"budget": "1GB"}, name="ScheduleGPipe")
    (stage,) = schedule.plan.problem.stages
    row = ROWS * 8 * 4
    assert [(block.boundary_bytes, block.freed_bytes) for block in stage.blocks] == [(0, 5 * row), (row, 5 * row)]
    assert stage.before.saved_bytes == stage.after.saved_bytes == 0.0


# the report -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_the_report_shows_planned_beside_measured():
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    for _ in range(5):
        fresh_step(schedule, stages)
    early = schedule.report()
    assert early.measured_peak_bytes is None
    fresh_step(schedule, stages)
    report = schedule.report()
    assert report.measured_peak_bytes == report.planned_peak_bytes
    assert report.measured.schedule == schedule.schedule
    assert report.budget_bytes == (1e9,)
    text = str(report)
    head = r"^ +step  overhead +bound  hidden +peak"
    assert re.search(head + r"\nplanned +[\d.]+ ms .*\nmeasured +[\d.]+ ms ", text, re.MULTILINE)
    assert re.search(r"^rank  planned peak  measured peak   budget\n0 .* 1000 MB$", text, re.MULTILINE)
    assert "everything fits, so nothing need be recomputed" in text
    assert early.measured.peak_bytes == schedule.plan.peak_bytes  # nothing else is known yet
    assert schedule.timeline().peak_bytes == report.measured.peak_bytes == report.measured_peak_bytes


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("early", "late"), [((), (0, 1)), ((1,), (0,)), ((0, 1), ())])
def test_what_a_backward_of_a_plan_recomputes_stands_before_it(early, late):
    name = "ScheduleGPipe"
    schedule = step_with({"budget": "1GB"}, 4, name)
    choices = {visit: Choice((), early, late) for visit in schedule.plan.choices}
    order = with_recompute(schedule.plan.problem.schedule, choices)
    plan = PipelinePlan.of(schedule.plan.problem, order, choices)
    timeline = step_with({"plan": plan}, 2, name).timeline()
    kinds = [event.action.kind.value for event in timeline.events]
    each = ["R"] * bool(early) + ["R"] * bool(late) + ["B"]
    assert kinds == ["F"] * 4 + each * 4
    ends = [event.end_seconds for event in timeline.events]
    assert all(event.start_seconds >= end for event, end in zip(timeline.events[1:], ends))


@pytest.mark.usefixtures("alone")
def test_there_is_no_report_before_a_step_of_the_plan():
    schedule = step_with({"budget": "1GB"}, 2, "ScheduleGPipe")
    assert schedule.timeline().step_seconds > 0
    text = (
        "no step has followed a plan yet: it is made of the first 4\n  received: report() after 2\n"
        "  works:    print(schedule.report()) after step 5"
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}$"):
        schedule.report()
    schedule = step_with({"budget": "1GB"}, 4, "ScheduleGPipe")
    assert schedule.timeline().step_seconds > 0
    with pytest.raises(ScheduleError, match=r"^no step has followed a plan yet: .*\n  received: report\(\) after 4\n"):
        schedule.report()


# faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_budget_below_the_least():
    with pytest.raises(BudgetInfeasible) as caught:
        step_with({"budget": "1kB"}, name="ScheduleGPipe")
    error = caught.value
    least = int(error.least_bytes)
    assert str(error) == (
        f"recompute_ahead(): the budget is too small: rank 0 takes {least} bytes even if it recomputes everything\n"
        "  received: 1000 bytes for rank 0\n"
        f"  works:    budget={least} or more, or fewer micro-batches in flight, or smaller ones"
    )
    assert error.rank == 0
    assert isinstance(error.plan, PipelinePlan)
    schedule = step_with({"budget": error.least_bytes}, 6, name="ScheduleGPipe")
    assert schedule.report().measured_peak_bytes == (error.least_bytes,)


def test_all_ranks_hear_of_a_budget_below_the_least(reported):
    first, second = (report["least"] for report in reported)
    line = "BudgetInfeasible: recompute_ahead(): the budget is too small"
    assert line in first
    assert first.splitlines()[-3:] == second.splitlines()[-3:]


def test_ranks_that_disagree_on_the_budget(reported):
    for report in reported:
        both = r"(1f1b of 4 micro-batches in order \w{8}), budget='2GB' on rank 0, \1, budget='1GB' on rank 1"
        assert re.search(rf"have the same arguments\n  received: {both}", report["budgets"])


def test_budgets_that_are_written_otherwise_are_the_same(reported):
    assert [report["one budget"] for report in reported] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("what", "received"),
    [
        ("none", "segments=None, 5 exempt visits, .* on rank 0, .*, budget='1GB' on rank 1"),
        ("plan or none", r"plan \w{16} on rank 0, segments=None, 5 exempt visits, .* on rank 1"),
        ("costs", ".* in order .*, costs='measured' on rank 0, segments=None, 5 exempt visits, .* on rank 1"),
        ("segments", "segments=None, 5 exempt visits, .* on rank 0, segments=1, 0 exempt visits, .* on rank 1"),
        ("exempt", "segments=None, 5 exempt visits, .* on rank 0, segments=None, 0 exempt visits, .* on rank 1"),
        ("micro-batches", "1f1b of 4 micro-batches in order .* on rank 0, 1f1b of 2 micro-batches .* on rank 1"),
        ("visits", r".*1f1b with R in order (\w{8}) on rank 0, .*1f1b with R in order (?!\1)\w{8} on rank 1"),
    ],
)
def test_ranks_that_would_wait_for_each_other(reported, what, received):
    """Until the group's timeout, in a step or in report()."""
    for report in reported:
        text = f"ScheduleError: the ranks do not have the same arguments\n  received: {received}\n  works:    "
        assert re.search(text, report[what])


def test_ranks_that_disagree_on_the_plan(reported):
    for report in reported:
        assert re.search(
            r"ScheduleError: the ranks do not have the same arguments\n  received: plan \w{16} on rank 0, "
            r"plan \w{16} on rank 1\n  works:    recompute_ahead\(\) with the same arguments on every rank",
            report["plans"],
        )


def test_ranks_of_which_one_has_a_budget_and_another_a_plan(reported):
    for report in reported:
        assert re.search("received: .*, budget='1GB' on rank 0, plan ", report["budget and plan"])


def several(schedule, stages):
    for _ in range(7):
        step(schedule, stages, *batch(4))


class Growing(Blocks):
    """Has another region from its step ``at`` on."""

    def __init__(self, stage, at):
        super().__init__(stage)
        self.more, self.calls, self.at = Block("more"), 0, at
        checkpoint_module(self.more)

    def forward(self, x):
        self.calls += doing() != "replay"
        x = super().forward(x)
        return self.more(x) if self.calls > 4 * self.at + (not OLD) else x


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("at", "than", "name", "works"),
    [
        (2, "one before, and a plan is for one of each stage", "before", "a number of rows that n_microbatches divid"),
        (5, "those that the plan is for", "planned", "the same shapes and flags in every step; "),
    ],
)
def test_regions_that_change(at, than, name, works):
    stages = stages_of("ScheduleGPipe", lambda stage: Growing(stage, at))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    text = (
        rf"^a micro-batch has other shapes or regions than {than}\n"
        r"  received: micro-batch \d of stage 0: 3 regions, input \[2, 8\], output float32 \[2, 8\]; "
        rf"{name}: 2 regions, input \[2, 8\], output float32 \[2, 8\]\n"
        rf"  works:    {works}"
    )
    with pytest.raises(ScheduleError, match=text):
        several(schedule, stages)


@pytest.mark.skipif(OLD, reason="torch 2.11 alone: it refuses another shape itself")
@pytest.mark.usefixtures("alone")
def test_rows_that_the_micro_batches_do_not_divide():
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    x, y = batch(4, 2)
    with pytest.raises(ScheduleError, match=r"works:    a number of rows that n_microbatches divides"):
        step(schedule, stages, torch.cat([x, x[:2]]), torch.cat([y, y[:2]]))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_share_of_no_bytes():
    """Nothing is trained, and what is compiled keeps nothing then."""
    stages = stages_of("ScheduleGPipe", lambda stage: Blocks(stage).requires_grad_(False))
    for stage in stages:
        for block in stage.submod.blocks:
            block.compile(backend="aot_eager")
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="100%")
    several(schedule, stages)
    assert schedule.plan.recomputed_share == 0


@pytest.mark.usefixtures("alone")
def test_a_shape_that_changes():
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    for _ in range(5):
        step(schedule, stages, *batch(4))
    ours, of_torch_2_11 = r"recompute_ahead\(schedule, budget=\.\.\.\)", "new stages and their schedule"
    with pytest.raises(ScheduleError, match=f"{ours}|{of_torch_2_11}"):
        step(schedule, stages, *batch(4, 3))


@pytest.mark.usefixtures("alone")
def test_a_plan_for_stages_of_other_blocks():
    choices = {(0, i): Choice((0, 1, 2)) for i in range(4)}
    plan = given("ScheduleGPipe", choices, stages=[Stage((Work(),) * 3)])
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), plan=plan)
    with pytest.raises(ScheduleError, match=r"stage 0: 2 regions, .*; planned: 3 regions, "):
        step(schedule, stages, *batch(4))


class Full(Blocks):
    """Its device is full from its call ``at`` on."""

    def __init__(self, stage, at):
        super().__init__(stage)
        self.calls, self.at = 0, at

    def forward(self, x):
        self.calls += 1
        if self.calls > self.at:
            raise torch.OutOfMemoryError("no memory is left")
        return super().forward(x)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("at", "said"),
    [
        (6, "the first steps, which recompute everything, take more than the device has left\n  works:    fewer mi"),
        (22, "a step of the plan, which has \\d+ bytes on a rank, takes more than .*\n  works:    budget=\\d+ or less"),
    ],
)
def test_a_step_out_of_memory_says_what_to_do(at, said):
    stages = stages_of("ScheduleGPipe", lambda stage: Full(stage, at))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    with pytest.raises(torch.OutOfMemoryError, match=said) as caught:
        several(schedule, stages)
    text = str(caught.value)
    assert text.startswith("no memory is left\n")
    for planned, asked in re.findall(r"has (\d+) bytes on a rank, .*\n  works:    budget=(\d+)", text):
        assert int(asked) == round(0.9 * int(planned))  # one between that and the budget has the same plan


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"costs": "measured"}], ids=str)
def test_without_a_budget_it_is_the_same_error(options):
    stages = stages_of("ScheduleGPipe", lambda stage: Full(stage, 2))
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), **options)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory is left$"):
        several(schedule, stages)


# what a user does beside ----------------------------------------------------------------------------------------------


class Nested(Blocks):
    """A region around both blocks, which are regions too."""

    def __init__(self, stage):
        super().__init__(stage)
        self.both = nn.Sequential(*self.blocks)
        checkpoint_module(self.both)

    def forward(self, x):
        return super().forward(self.both(x))


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("budget", ["90%", "75%"])
def test_regions_inside_of_regions_stay_within_the_budget(budget):
    report = step_with({"budget": budget}, 6, "ScheduleGPipe", Nested).report()
    assert report.measured_peak_bytes <= report.planned_peak_bytes <= report.budget_bytes


@few(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("failing", [0, 1, *slow([2, 3])])
def test_a_first_step_that_fails_is_made_again(failing):
    expected = step_with({"budget": "70%"}, 6, "ScheduleGPipe").report()
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="70%")
    for at in range(6):
        if at == failing:
            stages[0].submod.register_forward_hook(fails := Fails())
            with pytest.raises(Exception, match="once"):
                fresh_step(schedule, stages)
            assert fails.calls == 3
        fresh_step(schedule, stages)
    assert schedule.report().measured_peak_bytes == expected.measured_peak_bytes
    assert schedule.plan.problem.stages[0].saved_bytes == expected.plan.problem.stages[0].saved_bytes


class Fails:
    """A hook that raises at its third call."""

    calls = 0

    def __call__(self, module, args, output):
        self.calls += 1
        if self.calls == 3:
            raise ValueError("once")


@pytest.mark.usefixtures("alone")
def test_gradients_that_are_there_in_the_counted_step_are_in_the_budget():
    """The step that follows begins without any, and makes them."""
    expected = step_with({"budget": "1GB"}, 6, "ScheduleGPipe").report()
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    for _ in range(5):
        step(schedule, stages, *batch(4, ROWS))
    fresh_step(schedule, stages)
    report = schedule.report()
    assert expected.measured_peak_bytes == report.measured_peak_bytes
    assert report.measured_peak_bytes <= report.planned_peak_bytes


@pytest.mark.usefixtures("alone")
def test_an_input_of_another_shape_that_gives_an_output_of_the_same():
    class Pooled(Blocks):
        def forward(self, x):
            return super().forward(x).mean(1)

    stages = stages_of("ScheduleGPipe", Pooled)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget="1GB")
    for length in (3, 3, 3, 3, 3, 4):
        x = torch.randn(8, length, 8)
        if length == 4:
            # Torch 2.11 looks at the shapes itself, before the stage runs.
            ours = r"input \[2, 4, 8\], .* planned: 2 regions, input \[2, 3, 8\]"
            torchs = r"shape mismatch: expected torch.Size\(\[2, 3, 8\]\) .* as a plan is for one shape"
            with pytest.raises(ScheduleError, match=rf"(?s){ours}|{torchs}"):
                step(schedule, stages, x, torch.randn(8, 8))
        else:
            step(schedule, stages, x, torch.randn(8, 8))


@pytest.mark.usefixtures("alone")
def test_a_schedule_whose_budget_was_refused_says_so_again():
    stages = stages_of("ScheduleGPipe", Blocks)
    schedule = recompute_ahead(schedule_on(stages, "ScheduleGPipe", 4), budget=1000)
    for _ in range(3):
        fresh_step(schedule, stages)
    for _ in range(2):
        with pytest.raises(BudgetInfeasible, match="the budget is too small"):
            fresh_step(schedule, stages)
    x, target = batch(4)
    x.requires_grad_()
    reference = weakref.ref(x)
    with without_collector():
        with suppress(BudgetInfeasible):
            step(schedule, stages, x, target)
        del x
        assert reference() is None


@pytest.mark.usefixtures("alone")
def test_a_planner_that_fails_tells_all_ranks(monkeypatch):
    def fails(*args):
        raise MemoryError("no more")

    monkeypatch.setattr("torchckpt.distributed.phases.fitted", fails)
    with pytest.raises(ArgumentError, match="rank 0 could not make the plan\n  received: MemoryError: no more"):
        step_with({"budget": "1GB"}, 4, "ScheduleGPipe")
