"""The layers of one model on one device: which are regions, and within a byte budget which of their calls are kept.

    apply             what users call: ``checkpoint_layers``, and its handle; the repeated blocks of a model
    follow            at each call, which step it is of, and whether it is kept
    step              the step that is running
    agree             the calls that all ranks keep, where they communicate inside of layers
    known             the steps that were counted, and the plan of each
    count             a step that is counted while it runs
    plan              the calls that are kept, for the least time within a budget
    away              which calls go to a host, when they leave and come back
    took              what a counted step took, call by call; what one of another size takes
"""
from torchckpt.layers.apply import PlannedLayers, checkpoint_layers
from torchckpt.layers.plan import LayersPlan

__all__ = ["LayersPlan", "PlannedLayers", "checkpoint_layers"]
