"""One checkpointed call: its activations are dropped in the forward, and computed again for the backward.

The problem. Recomputation frees memory and costs a forward. Where gradients come from another device (a pipeline, an
all-reduce), this device waits for them. It could recompute while it waits, if something can start the recomputation
before the gradients arrive.

The standard answers. *Reentrant* checkpointing runs the forward under ``no_grad`` and a nested backward inside the
backward. It is a node of its own in the graph, which could be placed early, but it breaks ``autograd.grad``,
``inputs=``, double backward and split backward. *Non-reentrant* checkpointing uses saved-tensor hooks, and works with
all of these. But the recomputation starts when the backward asks for its first saved tensor, and by then the gradient
has arrived.

Our answer. Saved-tensor hooks, a frame that can be filled from outside, and a pair of autograd Functions at its ends.
The code cites the numbers of this drawing:

     forward                                                   backward, read upwards

       inputs
          │
     [1] Checkpoint                                            The region's backward ends: frame.fill_slots()
          ▼
     [2] function(*args, **kwargs), in grad mode               Its nodes run, and unpack their slots. The first
          │    pack:   drop the tensor, hand out a slot        unpack replays, if nothing has yet
          │    unpack: return the slot's tensor
          │    keep:   save as autograd does, note the result
          ▼
     [3] Wait       compute ─► copy stream                     Compute waits for the copied gradient
          ▼
     [4] fork ─ ─ phony ─ ─► [5] Recompute                     [4] waits, in the graph, for [5]: frame.recompute()
          ▼                       ┆
     [6] Copy       copy stream ─► copy stream                 The gradient's copy is enqueued
          ▼                       ┆
     [7] Wait       copy stream ─► compute                     The copies wait for the gradient to be made
          ▼                       ┆
         ...                      ┆                            ... the gradient is on its way here ...
          ▼                       ▼
     [8] join ◄ ─ ─ phony ─ ─ ─ ─ ┘                            The backward gets here, and [5] may run

[3], [6] and [7] stand between two stages of a ``Pipe`` on accelerators. In a ``Pipe``, [5] waits for the [1] of a later
micro-batch, or for its output. ``Checkpointing.recompute`` places [4], [5] and [8] at one point.

``Frame`` connects forward and backward. It keeps the inputs (``Boundary``), and passes data through two deques of one
element each:

     forward ──► frame.ambient ──► replay ──► frame.recomputed ──► backward
                 settings and                 what the function saved
                 random numbers               when it ran again, for the slots

``frame.kept`` passes what ``keep`` noted.

``recompute()`` is idempotent: the ``Recompute`` node, a caller of ``prefetch()`` and the first unpack all call it, and
the first caller does the work. The phonies decide only when the replay runs; the gradients are the same at any time.
The single call ``checkpoint`` uses neither ``Recompute`` nor ``Checkpoint``: its first unpack starts the replay.

A replay runs under the conditions of the forward. ``boundary`` gives it the same arguments, ``module_state`` the same
parameters and buffers, ``ambient`` the same settings and random numbers, and ``norms`` throw-away copies of the running
statistics to update.

    wrap              modules of which every call is a region
    moved             a region that is not run again: what it saves goes to the host
    core              a region: what users call, the frame, the nodes of the graph, what ``keep`` leaves
    state             what a replay must find again
    saved, live       bytes that autograd keeps; bytes that are alive
    places            lines and operations for which autograd saves tensors
    flags, devices    what a thread is doing; accelerators, waits between streams, clocks
    private           private names of torch
"""
from torchckpt.regions.core.checkpointing import Checkpointing, checkpoint
from torchckpt.regions.core.keep import keep
from torchckpt.regions.flags import is_checkpointing, is_recomputing
from torchckpt.regions.moved.region import offload
from torchckpt.regions.wrap.layers import offload_layers, offload_module
from torchckpt.regions.wrap.module import checkpoint_module

__all__ = [
    "Checkpointing",
    "checkpoint",
    "checkpoint_module",
    "is_checkpointing",
    "is_recomputing",
    "keep",
    "offload",
    "offload_layers",
    "offload_module",
]
