"""Simulator: a step of all ranks, or one rank amid the messages of a step."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchckpt.planning.order.program import Run, run
from torchckpt.planning.plan.away.outlook import Gene, Habits, Outlook, Times, Work
from torchckpt.planning.plan.away.rank import Rank, Unfit
from torchckpt.planning.plan.problem import Problem
from torchckpt.planning.work.host import Host

__all__ = ["Played", "Simulator"]

_LONG = float("inf")


class Played(NamedTuple):
    """A simulated step."""

    key: tuple[float, float]
    """To compare steps, smaller is better: seconds; how early messages arrive, and how little is dropped and moved."""
    ranks: list[Rank]
    run: Run


class Simulator:
    """Simulates steps, and counts the pieces of compute in :attr:`effort`."""

    def __init__(self, problem: Problem, host: Host) -> None:
        works = {stage: Work(stage, host) for stage in dict.fromkeys(problem.stages)}
        self.host, self.program, self.lanes = host, problem.program, problem.lanes
        self.works = [[works[problem.stages[stage]] for stage, _ in lane.visits] for lane in self.lanes]
        self.pieces = [2 * sum(work.blocks + 1 for work in of_rank) for of_rank in self.works]
        """Of each rank."""
        self.effort = 0
        self._outlooks: dict[int, tuple[Gene, Outlook]] = {}
        """By rank, that of the last step."""
        rows = enumerate(self.program.ranks)
        self._receivers = {each[0]: (rank, place) for rank, row in rows for place, each in enumerate(row)}

    def ideal(self, pending: int) -> list[Gene]:
        """Genes of a step that keeps everything and has no budget."""
        habits = Habits(pending=pending)
        none = [[0] * len(lane.visits) for lane in self.lanes]
        plain = [Times([0.0] * len(lane), [], [0.0] * len(lane)) for lane in self.lanes]
        return [Gene(zero, zero, habits, times, 0.0, False) for zero, times in zip(none, plain)]

    def play(self, genes: Sequence[Gene], limit: float = _LONG) -> Played | None:
        """The step with these genes. None if it does not fit, or takes longer than ``limit`` seconds."""
        ranks = [self._rank(index, gene, limit) for index, gene in enumerate(genes)]
        self._outlooks = {index: (gene, rank.outlook) for index, (gene, rank) in enumerate(zip(genes, ranks))}
        try:
            played = run(self.program, ranks)
            seconds = max(rank.finish() for rank in ranks)
        except Unfit:
            return None
        finally:
            self.effort += sum(rank.pieces for rank in ranks)
        blocks = sum(1e-3 * sum(rank.dropped) + 1e-4 * sum(rank.away) for rank in ranks)
        return Played((seconds, sum(played.arrived) / len(played.arrived) + blocks), ranks, played)

    def alone(self, index: int, gene: Gene, times: Times, limit: float = _LONG) -> tuple[float, float]:
        """The seconds of the step if of all ranks this one alone had another gene than when its times were taken; and
        the seconds by which its actions end later than for a step of ``gene.until``, in all."""
        rank, longest, late = self._rank(index, gene, _LONG), 0.0, 0.0
        try:
            for arrived, tail in zip(times.arrived, times.tail):
                seconds = rank(max(arrived, rank.clock)) + tail
                longest, late = max(longest, seconds), late + max(0.0, seconds - gene.until)
                if longest > limit:
                    return _LONG, _LONG
            return max(longest, rank.finish()), late
        except Unfit:
            return _LONG, _LONG
        finally:
            self.effort += rank.pieces

    def _rank(self, index: int, gene: Gene, limit: float) -> Rank:
        return Rank(self.lanes[index], self.works[index], self.host, gene, self._outlook(index, gene), limit)

    def _outlook(self, index: int, gene: Gene) -> Outlook:
        if index in self._outlooks and self._outlooks[index][0] is gene:
            return self._outlooks[index][1]
        return Outlook(self.lanes[index], self.works[index], gene, 1 + self.host.half_duplex)

    def times(self, played: Played) -> list[Times]:
        """The times of each rank."""
        ranks, ends, arrived = played.ranks, played.run.ends, played.run.arrived
        tails = [[0.0] * len(of_rank) for of_rank in ends]
        places = [(start, rank, place) for rank, row in enumerate(ranks) for place, start in enumerate(row.starts)]
        for _, rank, place in sorted(places, reverse=True):
            instruction = self.program.ranks[rank][place]
            tails[rank][place] = max(self._following(played, tails, rank, place, instruction[1], instruction[4]))
        needs = [[instruction[0] for instruction in row] for row in self.program.ranks]
        came = [[arrived[token] if token >= 0 else 0.0 for token in row] for row in needs]
        return [Times(*each) for each in zip([rank.starts for rank in ranks], came, tails)]

    def _following(
        self, played: Played, tails: list[list[float]], rank: int, place: int, token: int, travel: float
    ) -> Iterator[float]:
        """The seconds that follow an action on its rank, and where its message goes."""
        ends, row = played.run.ends, played.ranks[rank]
        if place + 1 < len(row.starts):
            yield row.filled[place + 1] + ends[rank][place + 1] - row.starts[place + 1] + tails[rank][place + 1]
        else:
            yield row.clock - ends[rank][place]
        if token in self._receivers:
            other, use = self._receivers[token]
            yield travel + ends[other][use] - played.ranks[other].starts[use] + tails[other][use]

    def critical(self, played: Played) -> list[tuple[int, int]]:
        """Rank and visit of each action on one critical path, from the end of the step to its start."""
        ranks, ends = played.ranks, played.run.ends
        rank = max(range(len(ranks)), key=lambda index: ranks[index].clock)
        place, path = len(ranks[rank].starts) - 1, []
        while place >= 0:
            path.append((rank, self.lanes[rank].visit_at[place]))
            ready = ranks[rank].filled[place] + (ends[rank][place - 1] if place else 0.0)
            token = self.program.ranks[rank][place][0]
            waited = ranks[rank].starts[place] > ready and token in self.program.senders
            rank, place = self.program.senders[token] if waited else (rank, place - 1)
        return path
