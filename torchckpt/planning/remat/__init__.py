"""Rematerialization without torch: which operations of one training step to run twice, so that it fits a byte budget.

A step is operations that read and write storages (``dataflow``). A schedule is the order in which they run; a repeat
makes a value again. ``memory`` says, to the byte, what a schedule needs. All else chooses one: ``late`` from values to
keep, such as some that separate inputs from outputs, ``planner`` under a budget, ``exact`` with a proof.

    plan              what users get
    table, plan_svg   a plan as text, and as a picture
    frontier_svg      the picture of a frontier
    search            the search for an order that fits
    flow              one traced step, as operations on storages, and its memory
"""
__all__: list[str] = []
