"""The step as users call it.

    rematerialize     a module or function, traced and planned
    in_place          a module, in place
    calls, call       its traces; one call
    narrowed          the plan, as a backward that some gradients do not reach runs it
    backend           for ``torch.compile``
"""
__all__: list[str] = []
