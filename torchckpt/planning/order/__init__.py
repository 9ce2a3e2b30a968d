"""Schedules as data: which rank does what, in which order.

    csv_format        to and from the CSV of torch.distributed.pipelining
    validity          whether a schedule can run; if not, which action is wrong
    schedules         GPipe, 1F1B, interleaved, zero bubble, ZBV, DualPipeV
    program           a schedule compiled to numbers, and what runs it
    orders            the order of one rank, and what is counted in it
    schedule          the types: a schedule, and its actions, such as ``0F3``
"""
__all__: list[str] = []
