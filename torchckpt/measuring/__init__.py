"""What a step of a pipeline takes while it runs, in one process (``pipe``) or in many (``distributed``).

    link              bytes a second to the host and back
    live              the bytes that are alive in each action
    record            the times of each action, and of the replays
    saved             the bytes that the regions of one visit save
"""
__all__: list[str] = []
