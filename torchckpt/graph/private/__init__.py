"""Private: all names of torch that the graph level uses and that are private, or new in some release.

    trace             a call and its derivatives as one graph; a function of tensors as one without in-place operators
    dynamo            graphs of ``torch.compile``, run by operator or compiled by Inductor
    witness           tensors that outlive a trace; random numbers that it would freeze
    surroundings      settings of torch during a trace
    layouts           how results lie in memory where fake tensors say otherwise
    runtime           operators and storages, and what really runs during a trace

What gets around something in torch says in which file of torch that is, and what ends it. Where that can be tested,
``tests/test_workarounds.py`` fails as soon as torch needs it no more.
"""
__all__: list[str] = []
