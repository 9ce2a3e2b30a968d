"""One step of a pipeline, on paper or measured.

    table             named steps side by side, on paper or measured
    bound             the recomputation that no placement can hide
    quickest          where ``R`` goes if seconds are known
    measured          a real step, in the same types
    simulated         ``Step``, and everything that follows from it
    boundary          bytes from boundary to boundary, where blocks are away; the engines beside the compute that copy
                      these to a host and back
    placement         where ``R`` goes
    timeline          what comes out; why it takes so long
    memory            bytes by position
"""
__all__: list[str] = []
