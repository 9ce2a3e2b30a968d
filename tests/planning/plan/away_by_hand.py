"""Plans with a host made by a rule: the first blocks of each visit are away, the next ones late, the rest is kept."""
from __future__ import annotations

from torchckpt.planning import Boundary, Choice, Kind, Move
from torchckpt.planning.plan.result import PipelinePlan


def first_blocks_away(problem, away, late=0):
    """The plan in which so many blocks go. Each is released two boundaries after its forward, and comes back one before
    its backward."""
    schedule, moves, choices = problem.schedule, [], {}
    for order in schedule.ranks:
        at = [(index, block) for index, action in enumerate(order) for block in boundaries(problem, action)]
        for index, (stage, kind, i) in enumerate(order):
            n = len(problem.stages[stage].blocks)
            if kind is Kind.FORWARD:
                gone, last = min(away, n), min(away + late, n)
                choices[stage, i] = Choice(
                    tuple(range(last, n)), (), tuple(range(gone, last)), tuple(range(gone))
                )
                made = {block: at.index((index, block)) for block in range(gone)}
                back = next(b for b, action in enumerate(order) if b > index and action.visit == (stage, i))
                used = {block: at.index((back, block)) for block in range(gone)}
                for block in range(gone):
                    release = min(made[block] + 2, used[block])
                    issue = max(release, used[block] - 1)
                    moves.append(Move(stage, i, block, Boundary(*at[release]), Boundary(*at[issue])))
    return PipelinePlan.of(problem, schedule, choices, tuple(moves))


def boundaries(problem, action):
    n = len(problem.stages[action.stage].blocks)
    return {Kind.FORWARD: range(n + 1), Kind.WEIGHT_GRAD: range(1)}.get(action.kind, range(n, -1, -1))
