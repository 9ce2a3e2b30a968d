"""A call traced with its derivatives, and when it must be traced anew.

    capture           the trace
    guard, reason     what a later call is compared with; why it is traced anew, or refused
    free_variables, side_effects    what the code reads elsewhere; what it leaves on modules
    trace_lock        one thread traces at a time; what Dynamo leaves to eager
"""
__all__: list[str] = []
