"""One traced training step: its dataflow, what it costs, and the code that runs a schedule of it.

    partial, unused_outputs     a backward that some gradients do not reach
    emit, fusion, values        a schedule as a graph; groups that Inductor fuses; values by the names users know
    sums              gradients that are added in place
    joint             forward and backward as operations on storages
    costs, measure    FLOPs and bytes of an operation
    repeat, rng, updates        what a repeat runs in an operation's place; random numbers; buffers
"""
__all__: list[str] = []
