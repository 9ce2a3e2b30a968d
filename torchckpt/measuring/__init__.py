"""What a step takes while it runs, for ``layers/``, ``pipe/`` and ``distributed/``.

    link              bytes a second to the host and back
    remembered        the steps that were counted; what their bytes depend on, and what the steps of a plan over ranks
                      must have alike; what becomes of a plan that takes too much
    live              the bytes that are alive in each action
    record            the times of each action, and of the replays
    saved             the bytes that the regions of one visit save, and the scope that has them counted; what calls are
                      called with, and what of it a kept call does not need
"""
__all__: list[str] = []
