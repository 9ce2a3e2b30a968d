"""Arithmetic without torch: schedules, their simulation and bounds.

A *schedule* says in which order every rank does what; *blocks* say how long that takes and how much it holds; *choices*
say what becomes of each block; a :class:`Step` is the three together, and a *timeline* is what comes out.

    plan, remat       what fits a byte budget: a pipeline; one traced step
    step              one step: its time, its bytes, the bound
    work              blocks, links, choices
    draw, figures     pictures; a step as data
    order             who does what, in which order
    rates             what devices reach of their peaks
    budget, device    budgets and sizes as users write them; data sheets

>>> plain = one_f_one_b(4, 16)
>>> choices = exempt(plain, ahead(plain), "last_stage")
>>> simulate(plain).step_seconds, simulate(plain, choices=choices).step_seconds
(57.0, 71.0)
>>> bound(plain, choices=choices).step_seconds
70.0
"""
from torchckpt.planning.figures import Copy, Event, Message
from torchckpt.planning.order.csv_format import from_csv, to_csv
from torchckpt.planning.order.schedule import Action, Kind, Schedule
from torchckpt.planning.order.schedules import (
    NAMES,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    named_schedule,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchckpt.planning.step.bound import Bound, Supply, bound
from torchckpt.planning.step.placement import with_recompute
from torchckpt.planning.step.quickest import quickest
from torchckpt.planning.step.simulated import Step, simulate
from torchckpt.planning.step.timeline import Timeline
from torchckpt.planning.work.block import Block, Link, Stage, fixed
from torchckpt.planning.work.choice import Choice, State, ahead, arrival, exempt, first_blocks, none
from torchckpt.planning.work.host import Boundary, Host, Move

__all__ = [
    "NAMES", "Action", "Block", "Bound", "Boundary", "Choice", "Copy", "Event", "Host", "Kind", "Link", "Message",
    "Move", "Schedule", "Stage", "State", "Step", "Supply", "Timeline", "ahead", "arrival", "bound", "dualpipe_v",
    "eager_one_f_one_b", "exempt", "first_blocks", "fixed", "from_csv", "gpipe", "interleaved_one_f_one_b",
    "looped_bfs", "named_schedule", "none", "one_f_one_b", "quickest", "simulate", "to_csv", "with_recompute", "zbv",
    "zero_bubble",
]
