"""What a step takes while it runs, for ``layers/``, ``pipe/`` and ``distributed/``.

    inputs            what calls are called with, and what of it a kept call does not need
    link              bytes a second to the host and back
    remembered        the steps that were counted, and what becomes of a plan that takes too much
    shapes            what the bytes of a step depend on; what the steps of a plan over ranks must have alike
    live              the bytes that are alive in each action
    record            the times of each action, and of the replays
    saved             the bytes that the regions of one visit save, and the scope that has them counted
"""
__all__: list[str] = []
