"""One step of a pipeline, on paper or measured.

    comparison, table     a measured step beside paper; named policies side by side
    bound, idle           the recomputation that no placement can hide
    quickest, greedy      where ``R`` goes if seconds are known
    measured              a real step, in the same types
    simulated             ``Step``, and everything that follows from it
    placement             where ``R`` goes
    timeline              what comes out; why it takes so long
    memory                bytes by position
"""
__all__: list[str] = []
