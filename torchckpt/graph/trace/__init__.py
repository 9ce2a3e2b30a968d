"""A call traced with its derivatives, and when it must be traced anew.

    capture           the trace, in one thread at a time
    guard, reason     what a later call is compared with; why it is traced anew, or refused
    free_variables, side_effects    what the code reads elsewhere; what it leaves on modules
"""
__all__: list[str] = []
