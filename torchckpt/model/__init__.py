"""Arithmetic without torch: schedules, their simulation and bounds.

A *schedule* says in which order every rank does what; *blocks* say how long that takes and how much it holds; *choices*
say what becomes of each block; a :class:`Step` is the three together, and a *timeline* is what comes out.

    plan, remat       what fits a byte budget: a pipeline; one traced step
    step              one step: its time, its bytes, the bound
    work              blocks, links, choices
    draw, figures     pictures; a step as data
    schedule          who does what, in which order
    amount, device    sizes as users write them; data sheets

>>> plain = one_f_one_b(4, 16)
>>> choices = exempt(plain, ahead(plain), "last_stage")
>>> simulate(plain).step_seconds, simulate(plain, choices=choices).step_seconds
(57.0, 71.0)
>>> bound(plain, choices=choices).step_seconds
70.0
"""
from torchckpt.model.figures import Event, Message
from torchckpt.model.schedule.action import Action, Kind
from torchckpt.model.schedule.csv_format import from_csv, to_csv
from torchckpt.model.schedule.named import NAMES, named_schedule
from torchckpt.model.schedule.schedule import Schedule
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
from torchckpt.model.step.bound import Bound, Supply, bound
from torchckpt.model.step.placement import with_recompute
from torchckpt.model.step.quickest import quickest
from torchckpt.model.step.step import Step, simulate
from torchckpt.model.step.timeline import Timeline
from torchckpt.model.work.block import Block, Stage, fixed
from torchckpt.model.work.choice import Choice, State, ahead, arrival, exempt, first_blocks, none
from torchckpt.model.work.link import Link

__all__ = [
    "NAMES",
    "Action",
    "Block",
    "Bound",
    "Choice",
    "Event",
    "Kind",
    "Link",
    "Message",
    "Schedule",
    "Stage",
    "State",
    "Step",
    "Supply",
    "Timeline",
    "ahead",
    "arrival",
    "bound",
    "dualpipe_v",
    "eager_one_f_one_b",
    "exempt",
    "first_blocks",
    "fixed",
    "from_csv",
    "gpipe",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "named_schedule",
    "none",
    "one_f_one_b",
    "quickest",
    "simulate",
    "to_csv",
    "with_recompute",
    "zbv",
    "zero_bubble",
]
