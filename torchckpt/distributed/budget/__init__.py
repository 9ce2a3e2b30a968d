"""Planning within a byte budget during a run: measure the first steps, make a plan, and run the other steps by it.

    recompute_within  the schedule: its first steps are measured, and the others follow the plan made of them
    phases            what differs between the two
    make_plan         rank 0 plans for all
    live_bytes        what is measured beside the regions: bytes that are alive
    arguments         the checks of ``budget`` and ``plan``
"""

__all__: list[str] = []
