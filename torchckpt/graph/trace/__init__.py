"""A call traced with its derivatives, and when it must be traced anew.

    capture           the trace, in one thread at a time; what it leaves on modules is taken back
    guard, reason     what a later call is compared with; why it is traced anew, or refused
    free_variables    what the code reads elsewhere
"""
__all__: list[str] = []
