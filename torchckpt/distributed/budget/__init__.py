"""Planning within a byte budget during a run: measure the first steps, make a plan, and run the other steps by it.

    recompute_within  the schedule: it measures, plans, and follows its plan
    make_plan         rank 0 plans for all
    stage_parts, live_bytes    what is measured: seconds and bytes of regions; bytes that are alive
    arguments         the checks of ``budget`` and ``plan``
"""

__all__: list[str] = []
