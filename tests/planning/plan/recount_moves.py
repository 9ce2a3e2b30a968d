"""Recount of a step with moves, from its order, its choices and its moves alone, by means of its own.

All times are the least that keep every rule, found by going over the rules until nothing changes. Bytes are counted
thing by thing: at each boundary, and over time, both as planned (from issue on, up to release) and as copies really
need them (from the start of a copy on, up to the end of one).
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from torchckpt.planning.order.schedule import Kind

F, B, I, W, R = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE  # noqa: E741  # as in torch


@dataclass
class Recount:
    step_seconds: float
    ends: dict = field(default_factory=dict)
    """Of each action."""
    copies: dict = field(default_factory=dict)
    """By stage, micro-batch, block and direction: start and end."""
    levels: list = field(default_factory=list)
    """For each rank, by boundary: the most bytes up to the next boundary, and the bytes left then."""
    host_bytes: list = field(default_factory=list)
    """Of each rank, from the forward of a block to its backward."""


class Rank:
    """The positions of one rank: an index for each boundary."""

    def __init__(self, step, rank):
        self.order, self.stages = step.schedule.ranks[rank], step.stages
        self.moves = [move for move in step.moves if step.schedule.placement[move.stage] == rank]
        self.boundaries = []
        for index, (stage, kind, _) in enumerate(self.order):
            n = len(step.stages[stage].blocks)
            at = range(n + 1) if kind is F else range(n, -1, -1) if kind in (B, I) else range(1)
            self.boundaries += [(index, block) for block in at]
        self.place = {boundary: position for position, boundary in enumerate(self.boundaries)}
        self.made, self.used = {}, {}
        for position, (index, block) in enumerate(self.boundaries):
            stage, kind, i = self.order[index]
            if kind in (F, B, I):
                (self.made if kind is F else self.used)[stage, i, block] = position
        self.away = {tuple(move[:3]): self.interval(move) for move in self.moves}
        self.outs = sorted(self.away, key=self.made.__getitem__)
        self.before = {tuple(move[:3]): self.releases_before(move) for move in self.moves}
        self.backs = sorted(self.away, key=lambda key: (self.away[key][1], len(self.before[key]), self.used[key]))

    def interval(self, move):
        """The positions of release and issue; raises unless they are in order."""
        release, issue = self.place[tuple(move.release)], self.place[tuple(move.issue)]
        key = tuple(move[:3])
        assert self.made[key] < release <= issue <= self.used[key]
        return release, issue

    def releases_before(self, move):
        """Those at the boundary of its issue that come before that."""
        there = [key for key in self.outs if self.away[key][0] == self.place[tuple(move.issue)]]
        own = tuple(move[:3])
        return there[: max(move.behind, there.index(own) + 1 if own in there else 0)]

    def action(self, position):
        return self.order[self.boundaries[position][0]]

    def is_first(self, position):
        return position == 0 or self.boundaries[position][0] != self.boundaries[position - 1][0]


def moved_bytes(stage, block):
    moved = stage.blocks[block].moved_bytes
    if moved is None:
        moved = stage.blocks[block].saved_bytes - (stage.blocks[0].boundary_bytes if block == 0 else 0)
    return moved


def recount(step) -> Recount:
    """Raises if the step is none that can run, or if it holds more at some time than at its boundaries."""
    ranks = [Rank(step, rank) for rank in range(len(step.schedule.ranks))]
    check_choices(step, ranks)
    times = Times(step, ranks)
    found = Recount(times.step_seconds, times.action_ends(), dict(times.copies))
    for number, rank in enumerate(ranks):
        levels, peak = by_position(step, rank)
        found.levels.append(levels)
        starts_and_ends = [
            {key: times.issued(number, rank, key) for key in rank.away},
            {key: times.let_go(number, rank, key) for key in rank.away},
        ]
        assert over_time(step, rank, times, number, *starts_and_ends) <= peak + 1e-9
        real = [{key: times.copies[(*key, way)][0 if way else 1] for key in rank.away} for way in (True, False)]
        assert over_time(step, rank, times, number, *real) <= peak + 1e-9
        check_engines(step, rank, times)
        found.host_bytes.append(host_by_position(step, rank))
        assert host_over_time(step, rank, times) <= found.host_bytes[-1] + 1e-9
    return found


def check_choices(step, ranks):
    """Each block is in one state, and each block that is away has one move."""
    away = sorted(key for rank in ranks for key in rank.away)
    assert len(step.moves) == len(away)
    listed = []
    for stage, work in enumerate(step.stages):
        for i in range(step.schedule.micro_batches):
            choice = step.choice((stage, i))
            states = (*choice.kept, *choice.early, *choice.late, *choice.away)
            assert sorted(states) == list(range(len(work.blocks)))
            listed += [(stage, i, block) for block in choice.away]
    assert sorted(listed) == away


class Times:
    """The least times that keep every rule."""

    def __init__(self, step, ranks):
        self.step, self.ranks = step, ranks
        self.due, self.released, self.start, self.end = ([[0.0] * len(r.boundaries) for r in ranks] for _ in range(4))
        self.copies = {(*key, way): (0.0, 0.0) for rank in ranks for key in rank.away for way in (False, True)}
        self.arrived = defaultdict(float)
        rounds = 0
        while self.goes_on():
            rounds += 1
            assert rounds < 10_000, "something waits for itself"
        self.step_seconds = max(max(ends, default=0.0) for ends in self.end)

    def goes_on(self):
        before = [list(ends) for ends in self.end], dict(self.copies)
        for number, rank in enumerate(self.ranks):
            self.compute(number, rank)
            self.copy(number, rank)
        self.send()
        return before != (self.end, self.copies)

    def compute(self, number, rank):
        for p in range(len(rank.boundaries)):
            self.due[number][p] = self.end[number][p - 1] if p else 0.0
            out_ends = [self.copies[(*key, False)][1] for key, (release, _) in rank.away.items() if release == p]
            self.released[number][p] = max([self.due[number][p], *out_ends])
            waits = [self.released[number][p]]
            if rank.is_first(p):
                waits.append(self.arrived[rank.action(p)])
            waits += [self.copies[(*key, True)][1] for key in rank.away if rank.used[key] == p]
            self.start[number][p] = max(waits)
            self.end[number][p] = self.start[number][p] + self.seconds(rank, p)

    def let_go(self, number, rank, key):
        """When its release is done."""
        p = rank.away[key][0]
        before = [other for other in rank.outs if rank.away[other][0] == p and rank.made[other] <= rank.made[key]]
        return max([self.due[number][p], *(self.copies[(*other, False)][1] for other in before)])

    def seconds(self, rank, p):
        stage, kind, i = rank.action(p)
        work, choice, block = self.step.stages[stage], self.step.choice((stage, i)), rank.boundaries[p][1]
        if kind is W:
            own = sum(part.weight_grad_seconds for part in (work.before, *work.blocks, work.after))
        elif kind is R:
            own = sum(work.blocks[at].recompute_seconds for at in choice.early)
        else:
            parts = [(*work.blocks, work.after)[block], *([work.before] if block == 0 else [])]
            own = {
                F: sum(part.forward_seconds for part in parts),
                I: sum(part.input_grad_seconds for part in parts),
                B: sum(part.input_grad_seconds + part.weight_grad_seconds for part in parts),
            }[kind]
            if kind is not F and block in choice.late:
                own += work.blocks[block].recompute_seconds
        queued = [(key, False) for key in rank.away if rank.made[key] == p - 1]
        queued += [(key, True) for key, (_, issue) in rank.away.items() if issue == p]
        return own + self.step.host.drag * sum(self.copy_seconds(key, is_back) for key, is_back in queued)

    def copy_seconds(self, key, is_back):
        moved = moved_bytes(self.step.stages[key[0]], key[2])
        return moved / (self.step.host.back_rate if is_back else self.step.host.out_rate)

    def copy(self, number, rank):
        queue = [(rank.made[key] + 1, 0, rank.made[key], key, False) for key in rank.outs]
        queue += [(rank.away[key][1], 1 + len(rank.before[key]), rank.used[key], key, True) for key in rank.backs]
        free = {False: 0.0, True: 0.0}
        for position, _, _, key, is_back in sorted(queue):
            engine = is_back and not self.step.host.half_duplex
            queued = self.end[number][position - 1] if position else 0.0
            if is_back:
                queued = self.issued(number, rank, key)
            start = max(queued, free[engine], self.copies[(*key, False)][1] if is_back else 0.0)
            end = free[engine] = start + self.copy_seconds(key, is_back)
            self.copies[(*key, is_back)] = start, end

    def issued(self, number, rank, key):
        """When the copy back is queued."""
        ends = [self.copies[(*other, False)][1] for other in rank.before[key]]
        return max([self.due[number][rank.away[key][1]], *ends])

    def send(self):
        schedule, ends = self.step.schedule, self.action_ends()
        wire = defaultdict(float)
        for sender, order in enumerate(schedule.ranks):
            for action in order:
                stage, kind, i = action
                to = stage + 1 if kind is F else stage - 1
                if kind not in (F, B, I) or not 0 <= to < schedule.stages:
                    continue
                end, there = ends[action], schedule.placement[to]
                if there != sender:
                    size, link = self.step.stages[max(stage, to)], self.step.links[min(stage, to)]
                    seconds = link.latency_seconds + size.arriving_bytes / link.bandwidth
                    end = wire[sender, there] = max(end, wire[sender, there]) + seconds
                for taker in schedule.ranks[there]:
                    if taker[::2] == (to, i) and (taker.kind is F) == (kind is F) and taker.kind in (F, B, I):
                        self.arrived[taker] = end

    def action_ends(self):
        return {
            rank.action(p): self.end[number][p]
            for number, rank in enumerate(self.ranks)
            for p in range(len(rank.boundaries))
        }


def pieces(step, rank):
    """For each position, what is taken when it starts and what goes when it ends: names of things."""
    for p, (_, block) in enumerate(rank.boundaries):
        stage, kind, i = rank.action(p)
        choice = step.choice((stage, i))
        edge = ["before"] if block == 0 else []
        here = block if block < len(step.stages[stage].blocks) else "after"
        everything = [*range(len(step.stages[stage].blocks)), "before", "after"]
        if kind is F:
            yield p, [(stage, i, each) for each in (here, *edge)], []
        elif kind is R:
            yield p, [(stage, i, each) for each in choice.early], []
        elif kind is W:
            yield p, [], [(stage, i, each) for each in everything]
        else:
            late = [(stage, i, here)] if here in choice.late else []
            yield p, late, [(stage, i, each) for each in (here, *edge)] if kind is B else []


def sizes(step, key):
    """What a thing holds after its forward, and when its backward begins."""
    stage, i, name = key
    work, choice = step.stages[stage], step.choice((stage, i))
    if name in ("before", "after"):
        size = getattr(work, name).saved_bytes
        return size, size
    block = work.blocks[name]
    is_dropped = name in (*choice.early, *choice.late)
    return (block.boundary_bytes if is_dropped else block.saved_bytes), block.saved_bytes


def by_position(step, rank):
    alive, levels, peak = {}, {}, 0.0
    for p, takes, frees in pieces(step, rank):
        released = [key for key in rank.outs if rank.away[key][0] == p]
        at_boundary = 0.0
        for done in range(len(released) + 1):
            if done:
                alive[released[done - 1]] -= moved_bytes(step.stages[released[done - 1][0]], released[done - 1][2])
            issued = [key for key, (_, issue) in rank.away.items() if issue == p and len(rank.before[key]) == done]
            alive |= {(key, "back"): moved_bytes(step.stages[key[0]], key[2]) for key in issued}
            at_boundary = max(at_boundary, sum(alive.values()) if issued else 0.0)
        for key in takes:
            alive[key] = sizes(step, key)[1 if key in alive else 0]
        highest = max(at_boundary, sum(alive.values()))
        for key in frees:
            del alive[key]
            alive.pop((key, "back"), None)
        levels[rank.boundaries[p]] = highest, sum(alive.values())
        peak = max(peak, highest)
    assert not alive
    return levels, peak


def over_time(step, rank, times, number, taken, freed):
    """The most bytes at any time, if what is away is taken and freed at these times. What goes then goes first."""
    changes, here = [], {}
    for p, takes, frees in pieces(step, rank):
        start, end = times.start[number][p], times.end[number][p]
        for key in takes:
            size = sizes(step, key)[1 if key in here else 0]
            changes.append((start, size - here.get(key, 0.0)))
            here[key] = size
        changes += [(end, -here.pop(key)) for key in frees]
    for key in rank.away:
        moved = moved_bytes(step.stages[key[0]], key[2])
        changes += [(freed[key], -moved), (taken[key], moved)]
    return most(changes)


def most(changes):
    alive = highest = 0.0
    for _, amount in sorted(changes):
        alive += amount
        highest = max(highest, alive)
    assert abs(alive) < 1e-6
    return highest


def check_engines(step, rank, times):
    """No engine copies two blocks at once, and none comes back before it has left."""
    spans = {way: sorted(times.copies[(*key, way)] for key in rank.away) for way in (False, True)}
    if step.host.half_duplex:
        spans = {None: sorted((*spans[False], *spans[True]))}
    for of_engine in spans.values():
        assert all(start >= end - 1e-9 for (_, end), (start, _) in pairwise(of_engine))
    assert all(times.copies[(*key, False)][1] <= times.copies[(*key, True)][0] for key in rank.away)


def host_by_position(step, rank):
    alive = [0.0] * (len(rank.boundaries) + 1)
    for key in rank.away:
        for p in range(rank.made[key] + 1, rank.used[key] + 1):
            alive[p] += moved_bytes(step.stages[key[0]], key[2])
    return max(alive)


def host_over_time(step, rank, times):
    changes = []
    for key in rank.away:
        moved = moved_bytes(step.stages[key[0]], key[2])
        changes += [(times.copies[(*key, False)][0], moved), (times.copies[(*key, True)][1], -moved)]
    return most(changes)
