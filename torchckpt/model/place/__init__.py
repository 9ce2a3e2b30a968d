"""Where recomputes go in a schedule, and what no placement can beat.

    bound, idle       a step that no placement is shorter than, from when each rank has nothing to do
    placement         ``with_recompute``
    quickest, greedy  places that make the shortest step
    policy            what a user writes: ``arrival``, ``ahead``, ``partial``
    partition         layers into stages that cost alike
"""
__all__: list[str] = []
