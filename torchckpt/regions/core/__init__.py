"""A region: one call whose activations are dropped, and the frame that joins its forward and its backward.

    checkpointing     what users call: ``checkpoint`` and ``Checkpointing``
    scope             what a schedule wants of the regions of a forward
    keep, kept        what is not dropped: the function that users call, and what it leaves for a replay
    hooks             the regions that a thread is in, by the hooks that it has entered
    nodes             autograd Functions: those at the ends of a region, and those that make an edge of the graph
    frame             what forward and replay share: filled once, whoever asks first
    call              the function, its arguments and its state, to be run again
    slots             places of saved tensors
    difference        a replay that differs: its operation and line, and those of the forward; the likely causes
    options           what users set
    outside_graph     how a region runs outside the graph that Dynamo traces
"""
__all__: list[str] = []
