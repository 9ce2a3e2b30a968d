"""Step: one step of a pipeline: in which order, what work, what becomes of it. Everything else is read from it.

Each rank has one engine, which computes one action at a time and is never taken away from it. Each direction between
two ranks is a wire, which carries one message at a time, in the order in which they were sent. Everything starts as
soon as it can: an action when the one before it on its rank has ended and its input is there, a message when its
sender has ended and the wire is free. What an action waits for stands in
:class:`~torchckpt.planning.order.schedule.Schedule`.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat

from torchckpt.errors import Fault, brief, called, check
from torchckpt.planning.figures import Event, Message
from torchckpt.planning.order.program import NOTHING, Program, Run, compile_program, run
from torchckpt.planning.order.schedule import BACKWARDS, Action, Kind, Schedule, Visit
from torchckpt.planning.order.validity import check_order, check_schedule
from torchckpt.planning.step.boundary import Engines, Places, host_curve, host_peak, levels_of_places, places_of
from torchckpt.planning.step.memory import Change, Curve, Level, changes_of, curve, levels_of
from torchckpt.planning.step.placement import recomputed_early, with_recompute
from torchckpt.planning.step.timeline import Timeline, critical_path, message_of
from torchckpt.planning.work.block import Block, Link, Links, Stage, Stages, per_boundary, per_stage
from torchckpt.planning.work.choice import Choice, Choices, State, visit_faults
from torchckpt.planning.work.host import Host, Move

__all__ = ["Step", "simulate", "step_of"]


@dataclass(frozen=True)
class Step:
    """One step. Its parts are not checked: :func:`simulate` checks what a user gave.

    >>> schedule = one_f_one_b(4, 8)
    >>> Step(schedule, (Stage((Block(),)),) * 4, (Link(),) * 3).seconds
    33.0
    """

    schedule: Schedule
    """The order of each rank. It has an ``R`` for each visit that has early blocks, and no other of a stage that has
    blocks."""
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    choices: Choices = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    """One of each block that is away."""
    host: Host | None = None

    def choice(self, visit: Visit) -> Choice:
        """The choice for the blocks of ``visit``."""
        choice = self._choice_by_visit.get(visit)
        return self._uniform[visit[0]][State.KEPT] if choice is None else choice

    @cached_property
    def program(self) -> Program:
        """The program that the simulation runs."""
        return self.compiled()

    def compiled(self, apart: bool = True) -> Program:
        """The program. ``apart``: late recomputes are actions of their own. Default: True; else part of backwards."""
        late = self._late_seconds
        seconds = {
            (stage, kind): value
            for stage, work in enumerate(self.stages)
            for kind, value in (
                (Kind.FORWARD, work.forward_seconds),
                (Kind.BACKWARD, work.input_grad_seconds + work.weight_grad_seconds),
                (Kind.INPUT_GRAD, work.input_grad_seconds),
                (Kind.WEIGHT_GRAD, work.weight_grad_seconds),
            )
        }

        def seconds_of(action: Action) -> float:
            stage, kind, i = action
            if kind is Kind.RECOMPUTE:
                return self._recompute_seconds((stage, i), self.choice((stage, i)).early)
            return seconds[stage, kind] + (0.0 if apart or kind not in BACKWARDS else late.get((stage, i), 0.0))

        return compile_program(self.schedule, seconds_of, self.travel_seconds, late if apart else None)

    @cached_property
    def _late_seconds(self) -> dict[Visit, float]:
        late = ((visit, self.choice(visit).late) for visit in self.choices)
        return {visit: self._recompute_seconds(visit, blocks) for visit, blocks in late if blocks}

    @cached_property
    def run(self) -> Run:
        """When each action of :attr:`program` starts and ends."""
        return run(self.program, self._engines) if self.moves else run(self.program)

    @cached_property
    def _engines(self) -> list[Engines | None]:
        """Those of each rank that has moves, for :attr:`run`."""
        engines: list[Engines | None] = []
        for rank, (order, places) in enumerate(zip(self.schedule.ranks, self.places)):
            late = [self._late_seconds.get(each.visit) if each.kind in BACKWARDS else None for each in order]
            engines.append(Engines(rank, places, late, self.stages, self.host) if places and self.host else None)
        return engines

    @cached_property
    def places(self) -> list[Places]:
        """For each rank that has moves, the places of each action; an empty list for the others."""
        by_rank: list[list[Move]] = [[] for _ in self.schedule.ranks]
        for move in self.moves:
            by_rank[self.schedule.placement[move.stage]].append(move)
        pairs = zip(self.schedule.ranks, by_rank)
        return [places_of(order, self.stages, self.choice, moves) if moves else [] for order, moves in pairs]

    @property
    def seconds(self) -> float:
        return self.run.step_seconds

    @property
    def travel_seconds(self) -> list[float]:
        """For each pair of neighbouring stages, the seconds of a message."""
        return [
            link.latency_seconds + stage.arriving_bytes / link.bandwidth
            for link, stage in zip(self.links, self.stages[1:])
        ]

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each rank holds."""
        levels = map(self.levels, range(len(self.schedule.ranks)))
        return tuple(max((level.highest for level in of_rank), default=0.0) for of_rank in levels)

    @property
    def static_bytes(self) -> tuple[float, ...]:
        """Parameters, gradients and optimizer state of each rank; no peak counts them."""
        static = [0.0] * len(self.schedule.ranks)
        for stage, rank in zip(self.stages, self.schedule.placement):
            static[rank] += stage.static_bytes
        return tuple(static)

    def levels(self, rank: int) -> list[Level]:
        """The bytes of ``rank`` during and after each action of its order."""
        if not self.places[rank]:
            return list(levels_of(map(self._change, self.schedule.ranks[rank])))
        pieces = levels_of_places(self.places[rank], self.stages)
        return [Level(max(level.highest for level in of_action), of_action[-1].left) for of_action in pieces]

    @property
    def host_peak_bytes(self) -> tuple[float, ...]:
        """The most bytes of each rank on its host, by position, however slow a copy is: of a block from the end of its
        forward until its backward begins."""
        return tuple(host_peak(places, self.stages) for places in self.places)

    def curves(self, played: Run) -> tuple[Curve, ...]:
        """For each rank its bytes over time, for the times of a run of :attr:`program`, simulated or measured."""
        return tuple(curve(self.levels(rank), self._times(rank, played)) for rank in range(len(self.schedule.ranks)))

    @cached_property
    def timeline(self) -> Timeline:
        """When everything happens, and the bytes of each rank."""
        columns = enumerate(zip(self.program.actions, self.run.starts, self.run.ends))
        events = tuple(chain.from_iterable(map(Event, repeat(rank), *each) for rank, each in columns))
        timeline = Timeline(self.schedule, events, self._messages(), self.curves(self.run))
        if not self.moves:
            return timeline
        copies = [engines.copies if engines else [] for engines in self._engines]
        waited = tuple(engines.waited_seconds if engines else 0.0 for engines in self._engines)
        host_memory = tuple(map(host_curve, copies))
        moved = tuple(chain.from_iterable(copies))
        return replace(timeline, copies=moved, host_memory=host_memory, waited_seconds=waited)

    def explained(self) -> Timeline:
        """The timeline, with its critical path, and by how much the recomputation of each stage lengthens it. That runs
        the step once more for each stage that recomputes."""
        path = critical_path(self.schedule, self.program, self.run)
        return replace(self.timeline, exposed_seconds=tuple(self._exposed()), critical_path=path)

    def is_late(self, rank: int, position: int) -> bool:
        """Whether the action at a position of :attr:`program` is a late recompute."""
        action = self.program.actions[rank][position]
        return action.kind is Kind.RECOMPUTE and self.program.ranks[rank][position][0] != NOTHING

    @property
    def recomputed(self) -> dict[Visit, float]:
        """The visits of which something is recomputed, and the seconds of that."""
        redone = ((visit, self.choice(visit).recomputed) for visit in self.choices)
        return {visit: self._recompute_seconds(visit, blocks) for visit, blocks in redone if blocks}

    @cached_property
    def _changes_by_key(self) -> dict[tuple[int, int], dict[Kind, Change]]:
        """The changes that were counted before, as most visits of a stage share their choice."""
        return {}

    @cached_property
    def _choice_by_visit(self) -> dict[Visit, Choice]:
        return {
            visit: self._uniform[visit[0]][choice] if isinstance(choice, State) else choice
            for visit, choice in self.choices.items()
        }

    @cached_property
    def _uniform(self) -> list[dict[State, Choice]]:
        """By stage, the choice in which all blocks are in one state."""
        return [{state: Choice.all(state, len(stage.blocks)) for state in State} for stage in self.stages]

    def _recompute_seconds(self, visit: Visit, redone: Iterable[int]) -> float:
        """The seconds in which these blocks of ``visit`` are made again for their backward."""
        return sum([self.stages[visit[0]].blocks[block].recompute_seconds for block in redone])

    def _change(self, action: Action) -> Change:
        stage, kind, i = action
        choice = self.choice((stage, i))
        key = stage, id(choice)
        if key not in self._changes_by_key:
            self._changes_by_key[key] = changes_of(self.stages[stage], choice)
        return self._changes_by_key[key][kind]

    def _times(self, rank: int, played: Run) -> Iterator[tuple[float, float]]:
        """When each action of the rank's order starts and ends: a backward with its late recompute, which takes all."""
        begun = None
        for position, (start, end) in enumerate(zip(played.starts[rank], played.ends[rank])):
            begun = start if begun is None else begun
            if not self.is_late(rank, position):
                yield begun, end
                begun = None

    def _messages(self) -> tuple[Message, ...]:
        return tuple(
            message_of(self.schedule, self.program.actions[rank][place], self.run, token)
            for token, (rank, place) in self.program.senders.items()
            if self.run.sent[token] >= 0.0
        )

    def _exposed(self) -> Iterator[float]:
        """For each stage: the step, less the same step where the recomputation of that stage takes no time."""
        recomputing = {stage for stage, _ in self.recomputed}
        for stage, work in enumerate(self.stages):
            if stage not in recomputing:
                yield 0.0
                continue
            free = replace(work, blocks=tuple(replace(block, recompute_seconds=0.0) for block in work.blocks))
            stages = (*self.stages[:stage], free, *self.stages[stage + 1 :])
            yield self.seconds - replace(self, stages=stages).seconds


@called("simulate()")
def simulate(
    schedule: Schedule,
    stages: Stages = Block(),  # noqa: B008  # frozen
    link: Links = 0.0,
    choices: Choices | None = None,
    *,
    exposed: bool = True,
) -> Timeline:
    """Run a step on paper.

    >>> plain = one_f_one_b(4, 16)
    >>> simulate(plain).step_seconds, simulate(plain, choices=ahead(plain)).step_seconds
    (57.0, 73.0)

    Args:
        stages: one for every stage, or a list with one for each. A Block stands for a stage of that one block.
        link: seconds or a Link, between any two neighbouring stages on different ranks; or a list of Links, one for
            each pair of neighbouring stages. A message is as large as the input of the later stage, both ways.
        choices: what becomes of the blocks of each visit. Default: what has an ``R`` in ``schedule`` is recomputed
            early, all else is kept. If the schedule has no ``R``, they are placed by
            :func:`~torchckpt.planning.step.placement.with_recompute`.
        exposed: also find the critical path, and by how much each stage's recomputation lengthens the step. Default:
            True.

    Returns:
        The timeline. Events are in the order of ranks, and of actions on each; messages in the order of the actions
        that sent them. For what memory counts, see :mod:`~torchckpt.planning.step.memory`.

    Raises:
        ArgumentError: seconds or bytes are missing, negative or not numbers; the schedule cannot run; choices are of
            visits that it does not have, or contradict its ``R``.
    """
    step = step_of(schedule, stages, link, choices)
    return step.explained() if exposed else step.timeline


def step_of(schedule: Schedule, stages: Stages, link: Links, choices: Choices | None = None) -> Step:
    """The step for the arguments of :func:`simulate`, checked."""
    check_order(schedule)
    listed, wrong_stages = per_stage(stages, schedule.stages)
    links, wrong_links = per_boundary(link, schedule.stages)
    check([*wrong_stages, *wrong_links])
    placed = recomputed_early(schedule)
    if choices is None:
        choices = dict.fromkeys(placed, State.EARLY)
    check(list(_choice_faults(schedule, listed, choices)))
    step = Step(schedule, tuple(listed), tuple(links), choices)
    if not placed:
        step = replace(step, schedule=with_recompute(schedule, {visit: step.choice(visit) for visit in choices}))
    check(list(_early_faults(step)))
    if step.run.stuck:
        check_schedule(schedule)
    return step


def _choice_faults(schedule: Schedule, stages: Sequence[Stage], choices: object) -> Iterator[Fault]:
    if not isinstance(choices, Mapping):
        rule = "choices is not a mapping of each (stage, micro-batch) to what becomes of its blocks"
        yield Fault(rule, brief(choices), "choices=ahead(schedule)")
        return
    wrong = list(visit_faults(schedule, list(choices)))
    yield from wrong
    for visit, choice in {} if wrong else choices.items():
        if isinstance(choice, State):
            continue
        blocks = len(stages[visit[0]].blocks)
        if not (isinstance(choice, Choice) and choice.is_of(blocks)):
            rule = f"a choice does not give each of the {blocks} blocks of stage {visit[0]} one state"
            yield Fault(rule, f"choices[{visit}]={brief(choice)}", f"Choice.all(State.LATE, {blocks})")


def _early_faults(step: Step) -> Iterator[Fault]:
    blocks = [stage.blocks for stage in step.stages]  # where there are none, all of them are early
    placed = {visit for visit in recomputed_early(step.schedule) if blocks[visit[0]]}
    for visit in sorted(placed ^ {visit for visit in step.choices if step.choice(visit).early}):
        recompute = Action(visit[0], Kind.RECOMPUTE, visit[1])
        rule = "the schedule has an R without early blocks, or early blocks without an R"
        parts = (str(recompute), "early block") if visit in placed else (f"early blocks of {visit}", str(recompute))
        yield Fault(rule, "{}, and no {}".format(*parts), "the schedule without R, which places them")
