"""Modules of which every call is a region.

    offload           those whose calls move: ``offload_module``, ``offload_layers``
    layers            those that a class, a pattern or a list selects
    module            one of them: ``checkpoint_module``
    mixin             a class in front of a module's own, that can be taken away again
"""
__all__: list[str] = []
