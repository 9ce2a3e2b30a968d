"""Arithmetic without torch: schedules, their simulation and bounds.

A *schedule* says in which order every rank does what; *costs* say how long that takes; a *timeline* is what comes out.

    plan, remat       what fits a byte budget: a pipeline; one traced step
    report            what a step costs, in words
    place             where recomputes go, and the bound
    simulation        a schedule, played: when
    draw, figures     pictures; a step as data
    schedule          who does what, in which order
    amount, device    sizes as users write them; data sheets

>>> schedule = with_recompute(one_f_one_b(4, 16), ahead(exempt="last_stage"))
>>> simulate(one_f_one_b(4, 16)).step_seconds, bound(schedule).step_seconds, simulate(schedule).step_seconds
(57.0, 70.0, 71.0)
"""
from torchckpt.model.figures import Event, Message
from torchckpt.model.place.bound import Bound, Supply, bound
from torchckpt.model.place.placement import with_recompute
from torchckpt.model.place.policy import Policy, ahead, arrival, none, partial
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.costs import Link, StageCosts
from torchckpt.model.schedule.csv_format import from_csv, to_csv
from torchckpt.model.schedule.named import NAMES, named_schedule
from torchckpt.model.schedule.schedule import Schedule, Segments
from torchckpt.model.schedule.schedules import (
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchckpt.model.simulation.simulator import simulate
from torchckpt.model.simulation.timeline import Timeline

__all__ = [
    "NAMES",
    "Action",
    "Bound",
    "Event",
    "Kind",
    "Link",
    "Message",
    "Policy",
    "Schedule",
    "Segments",
    "StageCosts",
    "Supply",
    "Timeline",
    "ahead",
    "arrival",
    "bound",
    "dualpipe_v",
    "eager_one_f_one_b",
    "from_csv",
    "gpipe",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "named_schedule",
    "none",
    "one_f_one_b",
    "partial",
    "simulate",
    "to_csv",
    "with_recompute",
    "zbv",
    "zero_bubble",
]
