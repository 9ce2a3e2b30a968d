"""Private: all names of torch that the graph level uses and that are private, or new in some release.

    trace             a call and its derivatives as one graph
    functional        a function of tensors as one graph without in-place operators
    dynamo, inductor  graphs of ``torch.compile``; the compiler
    witness, generators    tensors that outlive a trace; random numbers that it would freeze
    surroundings      settings of torch during a trace
    operators         each operator call, intercepted; operators with special needs; modules wrapped for devices
    runtime           what really runs during a trace
"""
from __future__ import annotations

__all__: list[str] = []
