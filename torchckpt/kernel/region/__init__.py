"""A region: one call whose activations are dropped, and the frame that joins its forward and its backward.

    checkpointing     what users call: ``checkpoint`` and ``Checkpointing``
    scope             what a schedule wants of the regions of a forward
    keep, nesting     what is not dropped; where in regions a call is
    checkpoint, recompute    the pair: autograd Functions at the two ends of a region
    frame             what both share: filled once, whoever asks first
    call, slots       the function, its arguments and its state, to be run again; places of saved tensors
    options, outside_graph   what users set; for Dynamo
    selective         torch's selective contexts and the hooks around them
"""
__all__: list[str] = []
