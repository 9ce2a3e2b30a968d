"""Schedules as data: which rank does what, in which order.

    csv_format        to and from the CSV of torch.distributed.pipelining
    validity          whether a schedule can run; if not, which action is wrong
    named, schedules  GPipe, 1F1B, interleaved, zero bubble, ZBV, DualPipeV
    free_to_keep      what may be kept without a higher peak
    run, program      one pass through a schedule that is compiled to numbers
    schedule, orders  the type; orders of one rank
    action, costs, counts    the words: ``0F3``; seconds and bytes of a stage; how many of each
"""
__all__: list[str] = []
