"""A region: one call whose activations are dropped, and the frame that joins its forward and its backward.

    checkpointing     what users call: ``checkpoint`` and ``Checkpointing``
    scope             where in regions a call is; what a schedule wants of the regions of a forward
    keep              what is not dropped
    pair              ``Checkpoint`` and ``Recompute``: autograd Functions at the two ends of a region
    frame             what both share: filled once, whoever asks first
    call, slots       the function, its arguments and its state, to be run again; places of saved tensors
    options           what users set
    selective         torch's selective contexts and the hooks around them
"""
__all__: list[str] = []
