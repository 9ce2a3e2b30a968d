"""Schedules as data: which rank does what, in which order.

    csv_format        to and from the CSV of torch.distributed.pipelining
    validity          whether a schedule can run; if not, which action is wrong
    schedules         GPipe, 1F1B, eager and interleaved 1F1B, looped BFS, zero bubble, ZBV, DualPipeV
    program           a schedule compiled to numbers, and what runs it
    schedule          the types: a schedule, and its actions, such as ``0F3``; what the order of a rank is made of
"""
__all__: list[str] = []
