"""A byte budget for the steps of one ``Pipe``.

    within            the steps that are known, by their shapes; what a step recomputes; ``report``
    following         one step: its parts, and what is counted of it
    plan              the plan for the bytes and seconds that were counted
    count             bytes and seconds of one step, while it runs
    blocks            the blocks of a stage
"""
__all__: list[str] = []
