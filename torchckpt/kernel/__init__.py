"""One checkpointed call: its activations are dropped in the forward, and computed again for the backward.

The problem. Recomputation frees memory and costs a forward. Where gradients travel (a pipeline, an all-reduce) a device
waits for them, and could recompute meanwhile, but only if something can start the recomputation before they arrive.

The standard answers. *Reentrant* checkpointing runs the forward under ``no_grad`` and a nested backward inside the
backward: an own node of the graph, which could be placed early, but which breaks ``autograd.grad``, ``inputs=``, double
and split backward. *Non-reentrant* checkpointing replaces what autograd saves by hooks, and is right in every respect;
but the first tensor that the backward asks for starts the recomputation, and that is when the gradient is there.

Ours. Non-reentrant hooks, on a frame that can be filled from outside, and a pair of autograd Functions at its ends:

     forward                                                   backward, read upwards

       inputs
          │
      Checkpoint                                                 [4] Checkpoint.backward: the region's backward ends.
          │                                                          frame.let_go(); what waits for that may run
          ▼
       function(*args, **kwargs), in grad mode                   [3] its nodes run, and take their slots.
          │    pack:   drop the tensor, hand out a slot              A slot that nobody has filled yet
          │    unpack: take what the slot holds                      recomputes here: late, never wrong
          │    keep:   save as autograd does, note the result        The replay hands out what was noted
          ▼
        fork ─ ─ phony ─ ─► Recompute                            [2] Recompute.backward: frame.recompute()
          ▼                     ┆
         ...                    ┆                                    ... the gradient is on its way here ...
          ▼                     ▼
        join ◄ ─ ─ phony ─ ─ ─ ─                                 [1] the backward gets here

``Frame`` joins both sides. It keeps the inputs (``Boundary``) and hands over through two deques of one element each:

     forward ──► frame.ambient ──► replay ──► frame.recomputed ──► backward
                 settings and                 what the function saved
                 random numbers               when it ran again, for the slots

``recompute()`` is idempotent: the ``Recompute`` node, a caller of ``prefetch()`` and the first unpack all call it, and
whoever comes first does the work. The phonies say when; no gradient depends on it. The single call ``checkpoint`` has
no ``Recompute``, and goes without ``Checkpoint`` too: the first unpack does it all.

A replay sees the call as it was. ``boundary`` gives it the same arguments, ``module_state`` the same parameters and
buffers, ``ambient`` the same settings and random numbers, ``norms`` statistics to update that nobody sees.
"""
from torchckpt.kernel.checkpointing import Checkpointing, checkpoint
from torchckpt.kernel.flags import is_checkpointing, is_recomputing
from torchckpt.kernel.keep import keep
from torchckpt.kernel.layers import checkpoint_layers
from torchckpt.kernel.module import checkpoint_module

__all__ = [
    "Checkpointing",
    "checkpoint",
    "checkpoint_layers",
    "checkpoint_module",
    "is_checkpointing",
    "is_recomputing",
    "keep",
]
