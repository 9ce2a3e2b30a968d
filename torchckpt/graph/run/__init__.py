"""The step as users call it.

    rematerialize     a module or function, traced and planned; a module, in place
    calls             its traces; one call, and its plan as a backward runs it
    backend           for ``torch.compile``
"""
__all__: list[str] = []
