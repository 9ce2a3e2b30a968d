"""One traced training step: its dataflow, what it costs, and the code that runs a schedule of it.

    halves            a forward and its backwards, also those that some gradients do not reach
    emit, compiled    a schedule as a graph; fused operations and updates of buffers, as Inductor has them
    joint             forward and backward as operations on storages
    costs             seconds, FLOPs and bytes of an operation
    repeat            what a repeat runs in an operation's place; random numbers
"""
__all__: list[str] = []
