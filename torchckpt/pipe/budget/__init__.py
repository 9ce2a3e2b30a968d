"""A byte budget for the steps of one ``Pipe``.

    within            the steps that are known, by their shapes; what a step recomputes; ``report``
    plan              the plan for the bytes and seconds that were counted; the blocks of a stage
    count             bytes and seconds of one step, while it runs
"""
__all__: list[str] = []
