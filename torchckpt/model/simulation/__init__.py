"""A schedule and its costs, played: a timeline comes out.

    simulator         ``simulate``
    measured          a real step, in the same types
    critical, memory  why a step takes so long; how many bytes are held
    inputs, timeline  what goes in, checked; what comes out
"""
__all__: list[str] = []
