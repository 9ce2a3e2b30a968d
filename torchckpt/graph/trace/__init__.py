"""A call traced with its derivatives, and when it must be traced anew.

    capture           the trace
    guard, reason     what a later call is compared with; why it is traced anew
    free_variables, side_effects    what the code reads elsewhere; what it leaves on modules
    unsupported       modules that are refused
    trace_lock, outside_graph       one thread traces at a time; for Dynamo
"""
__all__: list[str] = []
