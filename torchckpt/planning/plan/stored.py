"""Stored: a plan as JSON, and back."""
from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from torchckpt.errors import ArgumentError, Fault, called, named, raise_fault
from torchckpt.planning.order.csv_format import from_csv, to_csv
from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.order.validity import check_schedule
from torchckpt.planning.plan.figures import Alone, PlanFigures, Rule, WholeStep
from torchckpt.planning.plan.problem import problem_of
from torchckpt.planning.step.boundary import misplaced_moves
from torchckpt.planning.step.placement import recomputed_early
from torchckpt.planning.work.block import Block, Link, Stage, fixed, restaged
from torchckpt.planning.work.choice import Choice
from torchckpt.planning.work.host import Boundary, Host, Move

__all__ = ["read", "written"]

_FORMAT = 1


def written(plan: PlanFigures) -> str:
    """The plan as JSON: the problem, the order of each rank, and the choices for each visit."""
    problem = plan.problem
    stored = {
        "format": _FORMAT,
        "schedule": problem.schedule.name,
        "given": to_csv(problem.schedule),
        "planned": to_csv(plan.schedule),
        "stages": [_stored_stage(stage) for stage in (plan.asked or problem).stages],
        "balance": plan.balance,
        "links": [[link.latency_seconds, _finite(link.bandwidth)] for link in problem.links],
        "budget_bytes": problem.budget_bytes,
        "bound_seconds": plan.bound_seconds,
        "choices": [_choices_of(plan, stage) for stage in range(len(problem.stages))],
    }
    if plan.whole_step is not None:
        stored["whole_step"] = plan.whole_step
    if plan.counted_rules:
        stored["rules"] = plan.counted_rules
    if problem.host is not None:
        stored |= {"host": asdict(problem.host), "moves": plan.moves}
    if plan.alone is not None:
        stored["alone"] = list(map(_finite, plan.alone))
    return json.dumps(stored)


@called("PipelinePlan.from_json()")
def read(text: str) -> PlanFigures:
    """Read the JSON of :func:`written`, or what the command ``plan`` has printed, and count it again. Its bound is that
    of the problem."""
    try:
        stored = json.loads(text)
        if "format" not in stored and isinstance(stored.get("plan"), dict):  # what the command plan --json prints
            stored = stored["plan"]
        if stored["format"] != _FORMAT:
            _refuse(f"format {stored['format']}")
        ranks = len(stored["budget_bytes"])
        given, planned = (_schedule(stored[name], stored["schedule"], ranks) for name in ("given", "planned"))
        stages = [_stage(stage) for stage in stored["stages"]]
        links = [Link(latency, rate or math.inf) for latency, rate in stored["links"]]
        budgets, balance = _amounts(stored["budget_bytes"], ranks), stored["balance"]
        blocks = [len(stage.blocks) for stage in stages]
        if len(balance) != len(blocks) or sum(balance) != sum(blocks) or min(balance) < 0:
            _refuse(f"balance {balance} for {blocks} blocks")
        host = Host(**stored["host"]) if "host" in stored else None
        asked = problem_of(given, stages, "100%", links, host).within(budgets)
        problem = replace(asked, stages=restaged(stages, balance))
        choices = {
            (stage, i): Choice(*map(tuple, choice))
            for stage, of_stage in enumerate(stored["choices"])
            for i, choice in enumerate(of_stage)
        }
        whole = stored.get("whole_step")
        step = None if whole is None else WholeStep(*(_amounts(amounts, ranks) for amounts in whole))
        moves = tuple(
            Move(stage, i, block, Boundary(*release), Boundary(*issue), behind)
            for stage, i, block, release, issue, behind in stored.get("moves", ())
        )
        alone = [math.inf if seconds is None else float(seconds) for seconds in stored.get("alone", ())]
        if not all(seconds >= 0 for seconds in alone):
            _refuse(f"{alone} seconds of recomputing and offloading alone")
        other = None if problem.stages == asked.stages else asked
        rules = _rules(stored.get("rules", ()), ranks)
        plan = PlanFigures(problem, planned, choices, other, step, moves, Alone(*alone) if alone else None, rules)
        _check(plan)
        return plan
    except ArgumentError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        _refuse(named(error))


def _refuse(received: str) -> NoReturn:
    raise_fault(Fault("the text is no plan that to_json() wrote", received, "plan.to_json()"))


def _choices_of(plan: PlanFigures, stage: int) -> list[tuple[tuple[int, ...], ...]]:
    choices = (plan.step.choice((stage, i)) for i in range(plan.schedule.micro_batches))
    return [tuple(choice.blocks(state) for state in plan.states) for choice in choices]


def _schedule(text: str, name: str, ranks: int) -> Schedule:
    """The schedule of a CSV. Last ranks without actions are not in the CSV, and are added."""
    schedule = from_csv(text, name)
    if len(schedule.ranks) > ranks:
        _refuse(f"{ranks} budgets of {len(schedule.ranks)} ranks")
    return replace(schedule, ranks=(*schedule.ranks, *[()] * (ranks - len(schedule.ranks))))


_FIXED = ("forward_seconds", "input_grad_seconds", "weight_grad_seconds", "saved_bytes", "static_bytes")


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _stored_stage(stage: Stage) -> dict[str, Any]:
    before, after = ({key: getattr(part, key) for key in _FIXED} for part in (stage.before, stage.after))
    blocks = [{key: value for key, value in asdict(block).items() if value is not None} for block in stage.blocks]
    own = {key: getattr(stage, key) for key in ("message_bytes", "collective_seconds")}
    return {"blocks": blocks, "before": before, "after": after, **own}


def _stage(stored: dict[str, Any]) -> Stage:
    before, after = fixed(**stored["before"]), fixed(**stored["after"])
    own = stored["message_bytes"], stored.get("collective_seconds", 0.0)  # missing in plans of earlier releases
    return Stage(tuple(Block(**block) for block in stored["blocks"]), before, after, *own)


def _amounts(stored: Sequence[object], ranks: int) -> tuple[float, ...]:
    amounts = tuple(map(float, stored))  # type: ignore[arg-type]  # what is no number is refused
    if len(amounts) != ranks or not all(0 <= amount < math.inf for amount in amounts):
        _refuse(f"{len(amounts)} amounts of bytes, {stored}")
    return amounts


def _rules(stored: Sequence[Any], ranks: int) -> tuple[Rule, ...]:
    if len(stored) not in (0, 2):
        _refuse(f"{len(stored)} rules")
    for _, blocks, _ in stored:
        if type(blocks) is not int or blocks < 0:
            _refuse(f"a rule of {blocks} blocks")
    return tuple(Rule(_amounts([seconds], 1)[0], n, _amounts(peaks, ranks)) for seconds, n, peaks in stored)


def _check(plan: PlanFigures) -> None:
    """Refuse unless the plan can run: the actions of its problem in their order, choices for every block, an ``R`` for
    each visit that has early blocks and for no other, moves that can be, and no more bytes than its budgets."""
    problem, planned, choices = plan.problem, plan.schedule, plan.choices
    if planned.placement != problem.schedule.placement or planned.micro_batches != problem.schedule.micro_batches:
        _refuse("the planned schedule has other stages, ranks or micro-batches")
    for rank, (before, after) in enumerate(zip(problem.schedule.ranks, planned.ranks)):
        given, split = ({each.visit for each in order if each.kind is Kind.INPUT_GRAD} for order in (before, after))
        if _whole(before) != _whole(after) or not split <= given:
            _refuse(f"rank {rank} has another order of forwards and backwards than the schedule that was given")
    replayed = recomputed_early(planned)
    away: set[tuple[int, ...]] = set()
    stages, micro_batches = len(problem.stages), planned.micro_batches
    if len(choices) != stages * micro_batches:
        _refuse(f"choices of {len(choices)} visits, of {stages} stages x {micro_batches} micro-batches")
    for stage, own_stage in enumerate(problem.stages):
        for i in range(micro_batches):
            choice = choices[stage, i]
            if not (isinstance(choice, Choice) and choice.is_of(len(own_stage.blocks))):
                _refuse(f"choices of stage {stage}, micro-batch {i}")
            away |= {(stage, i, block) for block in choice.away}
            early, article = choice.early, "an" if (stage, i) in replayed else "no"
            if bool(early) != ((stage, i) in replayed):
                _refuse(f"stage {stage}, micro-batch {i}: {len(early)} early blocks, {article} R")
    check_schedule(planned)
    _check_moves(plan, away)
    if not math.isfinite(plan.step_seconds):
        _refuse("seconds or bytes without a finite sum")
    for rank in plan.over_budget:
        peak, budget = plan.peak_bytes[rank], problem.budget_bytes[rank]
        _refuse(f"rank {rank} holds {peak:.12g} bytes, its budget is {budget:.12g}")


def _check_moves(plan: PlanFigures, away: set[tuple[int, ...]]) -> None:
    """Refuse unless each block that is ``away`` (stage, micro-batch, block) has one move, which can be, and hosts have
    room for all of them."""
    if sorted(move[:3] for move in plan.moves) != sorted(away) or (away and plan.problem.host is None):
        _refuse(f"{len(plan.moves)} moves of {len(away)} blocks that are away")
    for rank, places in enumerate(plan.step.places):
        here = (move for move in plan.moves if plan.schedule.placement[move.stage] == rank)
        for stage, i, block, release, issue, behind in misplaced_moves(places, here):
            where = f"released at {list(release)}, issued at {list(issue)} behind {behind}"
            _refuse(f"stage {stage}, micro-batch {i}, block {block}: {where}")
    for rank in plan.over_host:
        peak, room = plan.step.host_peak_bytes[rank], plan.problem.host_bytes[rank]
        _refuse(f"rank {rank} holds {peak:.12g} bytes on its host, which has {room:.12g}")


def _whole(order: Sequence[Action]) -> list[Action]:
    """Forwards and backwards, all of them whole."""
    kinds = {Kind.FORWARD: Kind.FORWARD, Kind.BACKWARD: Kind.BACKWARD, Kind.INPUT_GRAD: Kind.BACKWARD}
    return [action._replace(kind=kinds[action.kind]) for action in order if action.kind in kinds]
